"""One step's arithmetic: forward pass, logits, sampling. It changes no request, so that it can be done again."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.engine.ngram import accepted, rows_along
from blockscale.engine.pooling import pooled
from blockscale.engine.request import Request, TokenLogprob
from blockscale.engine.runner import Runner, last_rows
from blockscale.engine.sampler import Row, logprobs, sample
from blockscale.engine.scheduler import Work
from blockscale.engine.transfer import sent

_ROWS = 256  # of prompts' logits at once: float32 of a large vocabulary


@dataclass(frozen=True)
class Computed:
    """What a step gave for one work.

    tokens           sampled; empty while the prompt is not all computed
    logprobs         of `tokens`, where asked for
    prompt_logprobs  of the prompt's next tokens, where asked for
    is_valid         False where logits or vector were not finite, or no token was allowed
    pooled           fp64 [H] on the CPU: what the prompt's first tokens, up to this work's, have given so far; None
                     where no vector is asked for
    """

    work: Work
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    is_valid: bool = True
    pooled: Tensor | None = None

    @property
    def num_accepted(self) -> int:
        """Tokens of the draft that are among `tokens`."""
        return max(len(self.tokens) - 1, 0)


@torch.inference_mode()
def compute(runner: Runner, works: Sequence[Work]) -> list[Computed]:
    hidden = runner.run(works)  # [T, H]
    prompts = _prompt_logprobs(runner, works, hidden)
    vectors = _vectors(works, hidden)
    sampled = [work for work in works if work.is_sampled]

    def not_sampled(i: int) -> Computed:
        vector = vectors.get(i)
        is_valid = vector is None or bool(vector.isfinite().all())
        return Computed(works[i], prompt_logprobs=prompts.get(i, ()), is_valid=is_valid, pooled=vector)

    if not sampled:
        return [not_sampled(i) for i in range(len(works))]
    at = last_rows(works)
    if len(at) < hidden.shape[0]:
        hidden = hidden[sent(at, torch.int64, hidden.device)]
    logits = runner.model.logits(hidden)  # [R, V]
    spans: list[tuple[int, int]] = []  # of each work in `rows`
    rows: list[Row] = []
    kept: list[int] = []  # rows of the logits that are sampled
    begin = 0
    for work in sampled:
        own = _rows(work)  # a structure may cut the draft short
        spans.append((len(rows), len(rows) + len(own)))
        rows += own
        kept += range(begin, begin + len(own))
        begin += 1 + len(work.draft)
    if len(kept) < len(at):
        logits = logits[sent(kept, torch.int64, logits.device)]
    result = sample(logits, rows)
    num_top = max((row.sampling.logprobs or 0 for row in rows), default=0)
    has_logprobs = any(row.sampling.logprobs is not None for row in rows)
    entries = _entries(logits, result.tokens, num_top) if has_logprobs else []
    tokens, is_valid = result.tokens.tolist(), result.is_valid.tolist()
    spans_of = iter(spans)
    computed = []
    for i, work in enumerate(works):
        if not work.is_sampled:
            computed.append(not_sampled(i))
            continue
        first, end = next(spans_of)
        new = accepted(work.draft[: end - first - 1], tokens[first:end])
        num_own = work.request.sampling.logprobs
        computed.append(
            Computed(
                work,
                tuple(new),
                () if num_own is None else _cut(entries[first : first + len(new)], num_own),
                prompts.get(i, ()),
                all(is_valid[first : first + len(new)]),
            )
        )
    return computed


def _vectors(works: Sequence[Work], hidden: Tensor) -> dict[int, Tensor]:
    """Place in `works` -> what its prompt's tokens have given so far, where a vector is asked for."""
    found, begin = {}, 0
    for i, work in enumerate(works):
        if work.request.sampling.pooling is not None:
            value = pooled(work, hidden[begin : begin + work.num_tokens])
            if value is not None:
                found[i] = value
        begin += work.num_tokens
    return found


def _rows(work: Work) -> list[Row]:
    request = work.request
    has_penalties = request.sampling.has_penalties
    row = Row(
        request.sampling,
        request.seed,
        request.num_output,
        request.tokens[: request.num_prompt] if has_penalties else (),
        request.tokens[request.num_prompt :] if has_penalties else (),
        tuple(request.end_ids),
        request.structure.mask() if request.structure is not None and not work.draft else None,
    )
    if not work.draft:
        return [row]
    masks = request.structure.masks_along(work.draft) if request.structure is not None else None
    return rows_along(row, work.draft[: len(masks) - 1] if masks is not None else work.draft, masks)


def _prompt_logprobs(runner: Runner, works: Sequence[Work], hidden: Tensor) -> dict[int, tuple[TokenLogprob, ...]]:
    """Place in `works` -> log-probabilities of the prompt's tokens that this step's rows stand before."""
    found, begin = {}, 0
    for i, work in enumerate(works):
        request = work.request
        if request.wants_prompt_logprobs:
            known = len(request.prompt_logprobs)  # of tokens 1 .. known, from rows 0 .. known - 1
            places = range(max(work.begin, known), min(work.end, request.num_prompt - 1))
            rows = hidden[begin + places.start - work.begin : begin + places.stop - work.begin]
            found[i] = _of_prompt(runner, request, places, rows) if len(places) else ()
        begin += work.num_tokens
    return found


def _of_prompt(runner: Runner, request: Request, places: range, hidden: Tensor) -> tuple[TokenLogprob, ...]:
    num_top = request.sampling.prompt_logprobs or 0
    entries: list[TokenLogprob] = []
    for first in range(0, len(places), _ROWS):
        part = places[first : first + _ROWS]
        logits = runner.model.logits(hidden[first : first + len(part)])
        tokens = torch.tensor(request.tokens[part.start + 1 : part.stop + 1], device=logits.device)
        entries += _entries(logits, tokens, num_top)
    return tuple(entries)


def _entries(logits: Tensor, tokens: Tensor, num_top: int) -> list[TokenLogprob]:
    found = logprobs(logits, tokens, num_top)
    ids, values = found.top_ids.tolist(), found.top.tolist()
    pairs = zip(tokens.tolist(), found.chosen.tolist(), ids, values, strict=True)
    return [TokenLogprob(t, p, tuple(zip(i, v, strict=True))) for t, p, i, v in pairs]


def _cut(entries: Sequence[TokenLogprob], num_top: int) -> tuple[TokenLogprob, ...]:
    """Rows are sampled together, with as many of the likeliest as the greediest of them asks for."""
    return tuple(TokenLogprob(e.token_id, e.logprob, e.top[:num_top]) for e in entries)
