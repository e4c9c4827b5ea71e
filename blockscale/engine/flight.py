"""Decode steps that are launched before the tokens of the step before were read, so that what the host does with tokens
- text, ends, scheduling - takes its time while the GPU works.

The next step needs of the tokens only their values, and takes them where they lie, on the device. A request that turns
out to have ended is computed once for nothing: its row is dropped, and what the row wrote lies in a page that, in the
order of the device's work, is the request's until then.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockscale.engine.compute import Computed
from blockscale.engine.request import Request
from blockscale.engine.runner import Runner
from blockscale.engine.sampler import Row, sample
from blockscale.engine.scheduler import Work
from blockscale.engine.transfer import sent


@dataclass(frozen=True)
class Flight:
    """A step under way.

    tokens   int64 [B] on the device
    on_host  int64 [B]: the tokens, -1 for one that means nothing; there once `landing` has come
    landing  torch.cuda.Event; None on the CPU
    """

    works: Sequence[Work]
    tokens: Tensor
    on_host: Tensor
    landing: Any


def can_fly(works: Sequence[Work]) -> bool:
    """Each is one token of a request whose sampling looks at no other token, and asks for nothing but the next."""
    return all(
        work.num_tokens == 1 and work.is_sampled and not work.draft and _is_plain(work.request) for work in works
    )


def _is_plain(request: Request) -> bool:
    sampling = request.sampling
    return request.structure is None and sampling.logprobs is None and not sampling.has_penalties


@torch.inference_mode()
def launch(runner: Runner, works: Sequence[Work], before: Flight | None = None) -> Flight:
    """Starts a step of works that `can_fly`, after `before` where that is not read yet."""
    tokens = None if before is None else _tokens(before, works)
    logits = runner.model.logits(runner.run(works, tokens))
    rows = [
        Row(w.request.sampling, w.request.seed, w.end - w.request.num_prompt, end_ids=tuple(w.request.end_ids))
        for w in works
    ]
    result = sample(logits, rows)
    shown = torch.where(result.is_valid, result.tokens, -1)
    if shown.device.type == "cpu":
        return Flight(works, result.tokens, shown, None)
    on_host = torch.empty(shown.shape, dtype=shown.dtype, pin_memory=True)
    on_host.copy_(shown, non_blocking=True)
    landing = torch.cuda.Event()
    landing.record()
    return Flight(works, result.tokens, on_host, landing)


def landed(flight: Flight) -> list[Computed]:
    """Waits for its tokens."""
    if flight.landing is not None:
        flight.landing.synchronize()
    tokens = flight.on_host.tolist()
    return [Computed(work, (t,), is_valid=t >= 0) for work, t in zip(flight.works, tokens, strict=True)]


def _tokens(before: Flight, works: Sequence[Work]) -> Tensor:
    """int64 [B]: what the step before gave to the requests of `works`."""
    if len(works) == len(before.works):
        return before.tokens
    rows = {id(work.request): row for row, work in enumerate(before.works)}
    return before.tokens[sent([rows[id(work.request)] for work in works], torch.int64, before.tokens.device)]
