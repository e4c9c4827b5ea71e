"""A fixed text, scored again and again by the engine that serves: has the model become another?

The reference is a file that the same command wrote with the 16-bit model (`serve MODEL --canary TEXT --write-reference
NUMBERS.json`). It holds the tokens, the perplexity, and at each token the likeliest ones with their log-probabilities.
The KL divergence is that of two coarser distributions: the tokens that both sides name, each by itself, and all others
as one. By the data-processing inequality it is never above the divergence over the whole vocabulary.
"""

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockscale.engine.request import TokenLogprob
from blockscale.engine.sampling import MAX_LOGPROBS, Sampling
from blockscale.errors import CheckpointError, OutputError, UsageError
from blockscale.server.generation import chunk_of, joined
from blockscale.server.service import Service

_WINDOW = 512  # tokens that are scored together
_MAX_TOKENS = 4096
_KIND = "blockscale-canary-1"


@dataclass(frozen=True)
class Bounds:
    """Where a warning begins. Between two scores of one server only rounding may differ.

    max_ratio     perplexity against the reference's
    max_kl        nats a token against the reference
    max_movement  change of perplexity since the first score of this server, as a share
    """

    max_ratio: float = 1.1
    max_kl: float = 0.1
    max_movement: float = 0.01


@dataclass(frozen=True)
class Numbers:
    """perplexity  of the scored tokens: every token but the first of each window
    tokens      sha256 of the token ids, in hexadecimal
    scored      one a scored token, in order; None where a reference has the perplexity alone
    """

    perplexity: float
    tokens: str
    scored: tuple[TokenLogprob, ...] | None


@dataclass(frozen=True)
class Reading:
    """One score beside the reference. `warnings` say which bounds are passed."""

    perplexity: float
    ratio: float | None
    kl: float | None
    warnings: tuple[str, ...]


def read_reference(path: Path) -> Numbers:
    """CheckpointError for a file that is not one that `write_reference` wrote."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["kind"] != _KIND:
            raise ValueError(f"kind is {data['kind']!r}")
        scored = tuple(
            TokenLogprob(int(token), float(own), tuple((int(t), float(value)) for t, value in top))
            for token, own, top in data["scored"]
        )
        return Numbers(float(data["perplexity"]), str(data["tokens"]), scored)
    except FileNotFoundError:
        raise UsageError(f"{path}: there is no such file", hint="write it with --write-reference") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "write it with --write-reference, from the 16-bit model"
        raise CheckpointError(f"{path}: not a canary's reference ({error})", hint=hint) from error


def write_reference(path: Path, numbers: Numbers, model: str) -> None:
    scored = [[s.token_id, s.logprob, s.top] for s in numbers.scored or ()]
    data = {"kind": _KIND, "model": model, "perplexity": numbers.perplexity, "tokens": numbers.tokens, "scored": scored}
    try:
        path.write_text(json.dumps(data) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror})") from error


async def score(service: Service, text: str) -> Numbers:
    """Scores a text, window after window; users' metrics do not count it. UsageError for a text too short to score."""
    ids = await service.with_tokenizer(lambda t: t(text, add_special_tokens=False)["input_ids"])
    start = await service.with_tokenizer(lambda t: t("")["input_ids"])  # BOS, for the tokenizers that want one
    ids = ids[:_MAX_TOKENS]
    window = min(_WINDOW, service.context - len(start) - 1)
    scored: list[TokenLogprob] = []
    sampling = Sampling(max_tokens=1, prompt_logprobs=MAX_LOGPROBS, ignore_eos=True)
    for begin in range(0, len(ids), window):
        prompt = [*start[:1], *ids[begin : begin + window]]
        if len(prompt) < 2:
            continue
        request_id = f"canary-{time.monotonic_ns()}"
        async with aclosing(service.engine.submit(prompt, sampling, request_id)) as events:
            whole = joined([chunk_of(event) async for event in events])
        scored += whole.prompt_logprobs
    if not scored:
        raise UsageError("the canary's text has nothing to score", hint="give a longer text")
    digest = hashlib.sha256(json.dumps([s.token_id for s in scored]).encode()).hexdigest()
    nll = -sum(s.logprob for s in scored) / len(scored)
    return Numbers(math.exp(nll) if nll < 700 else math.inf, digest, tuple(scored))


def compare(now: Numbers, reference: Numbers | None, first: Numbers | None, bounds: Bounds) -> Reading:
    """`first`: of this server. UsageError where the reference is of another text or tokenizer."""
    if reference is not None and reference.tokens != now.tokens:
        raise UsageError(
            "the canary's reference is of another text or another tokenizer", hint="write it again from this text"
        )
    ratio = None if reference is None else now.perplexity / reference.perplexity
    kl = None
    if reference is not None and reference.scored and now.scored:
        kl = sum(map(divergence, reference.scored, now.scored)) / len(now.scored)
    warnings = []
    if not math.isfinite(now.perplexity):
        warnings.append("the perplexity is not finite")
    if ratio is not None and not ratio <= bounds.max_ratio:
        warnings.append(f"the perplexity is {ratio:.4g} times the reference's, above {bounds.max_ratio:g}")
    if kl is not None and not kl <= bounds.max_kl:
        warnings.append(f"the divergence from the reference is {kl:.4g} nats a token, above {bounds.max_kl:g}")
    if first is not None:
        moved = abs(now.perplexity / first.perplexity - 1)
        if not moved <= bounds.max_movement:
            warnings.append(f"the perplexity moved by {100 * moved:.3g} % since the server began")
    return Reading(now.perplexity, ratio, kl, tuple(warnings))


def divergence(reference: TokenLogprob, now: TokenLogprob) -> float:
    """KL(reference || now) in nats, over the tokens that both name and all others as one."""
    theirs, ours = _named(reference), _named(now)
    both = theirs.keys() & ours.keys()
    pairs = [(math.exp(theirs[token]), math.exp(ours[token])) for token in both]
    rest = (_rest(p for p, _ in pairs), _rest(q for _, q in pairs))
    tiny = 1e-30  # what is left may be nothing but rounding
    return max(0.0, sum(p * math.log(max(p, tiny) / max(q, tiny)) for p, q in (*pairs, rest) if p > 0))


def _rest(shares: Any) -> float:
    return max(0.0, 1.0 - sum(shares))


def _named(entry: TokenLogprob) -> Mapping[int, float]:
    return {**dict(entry.top), entry.token_id: entry.logprob}


class Canary:
    """Scores the text at the start and every `every_s` seconds, when nothing else runs.

    last  the latest reading
    """

    def __init__(
        self, service: Service, text: str, reference: Numbers | None, every_s: float, bounds: Bounds, warn: Any
    ) -> None:
        self.last: Reading | None = None
        self._service = service
        self._text = text
        self._reference = reference
        self._every_s = every_s
        self._bounds = bounds
        self._warn = warn
        self._first: Numbers | None = None

    async def check(self) -> Reading:
        """Scores once, exports the figures and warns."""
        numbers = await score(self._service, self._text)
        self.last = reading = compare(numbers, self._reference, self._first, self._bounds)
        self._first = self._first or numbers
        metrics = self._service.metrics
        metrics.canary_perplexity.set(reading.perplexity)
        metrics.canary_has_drifted.set(bool(reading.warnings))
        metrics.canary_time.set_to_current_time()
        if reading.ratio is not None:
            metrics.canary_ratio.set(reading.ratio)
        if reading.kl is not None:
            metrics.canary_kl.set(reading.kl)
        for warning in reading.warnings:
            self._warn(f"canary: {warning}")
        return reading

    async def run(self) -> None:
        """For as long as the server runs. A score that fails is a warning: the next may succeed."""
        while True:
            await asyncio.sleep(self._every_s)
            await self._until_idle()
            try:
                await self.check()
            except Exception as error:
                self._warn(f"canary: the text could not be scored: {error}")

    async def _until_idle(self) -> None:
        """A server that is never idle is scored all the same, one interval later."""
        waited, step = 0.0, min(0.5, self._every_s)
        while self._service.traffic.num_sequences and waited < self._every_s:
            await asyncio.sleep(step)
            waited += step
