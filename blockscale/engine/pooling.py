"""A prompt's hidden states to one vector, over as many steps as the prompt takes."""

import torch
from torch import Tensor

from blockscale.engine.request import Event, FinishReason, Request
from blockscale.engine.scheduler import Work
from blockscale.models.pooling import Pooling


def pooled(work: Work, hidden: Tensor) -> Tensor | None:
    """fp64 [H] on the CPU: what the prompt's tokens before `work.end` give. None before the one that counts.

    hidden  [work.num_tokens, H]

    Tokens that the request has taken count once, though their rows come again after it had to give way.
    """
    request = work.request
    known = request.num_pooled
    match request.sampling.pooling:
        case Pooling.LAST:
            return _sum(hidden[-1:]) if work.end == request.num_prompt else None
        case Pooling.FIRST:
            return _sum(hidden[:1]) if known == 0 else request.pooled
        case _:
            begin = max(work.begin, known)
            if begin >= work.end:
                return request.pooled
            new = _sum(hidden[begin - work.begin :])
            return new if request.pooled is None else request.pooled + new


def take_pooled(request: Request, work: Work, value: Tensor | None) -> Event | None:
    """Notes what a step gave; the event of a request whose prompt is computed to its end."""
    if work.end > request.num_pooled:
        request.pooled, request.num_pooled = value, work.end
    if work.end < request.num_prompt:
        return None
    assert request.pooled is not None
    count = request.num_prompt if request.sampling.pooling is Pooling.MEAN else 1
    vector = tuple((request.pooled / count).tolist())
    return Event(request.id, finish_reason=FinishReason.STOP, usage=request.usage(), vector=vector)


def _sum(rows: Tensor) -> Tensor:
    return rows.sum(0, dtype=torch.float64).cpu()
