"""The figures of a timed run."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from blockscale.engine.bench.workload import Run, Workload
from blockscale.errors import BlockscaleError


@dataclass(frozen=True)
class Spread:
    """Mean, median, and what one in ten and one in a hundred exceeds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Row:
    """One load.

    load              what was asked, in words
    ttft_ms           from a request's arrival to its first token
    itl_ms            from a token of a request to its next; None with one token a request. Prompts of others that are
                      computed between two tokens are in it
    tokens_per_s      of all outputs, from the first arrival to the last token
    sequences         requests that a step brought tokens to, on average
    step_ms           median of the steps that did nothing but decode; None where there were none
    gb_per_s          bytes that such a step must read (weights once, caches), in 10^9 a second of its time
    read_share        of that in the read bandwidth measured in the same run
    joules_per_token  of the outputs, prompts included; None where the GPU's counter cannot be read
    num_failed        requests that ended with an error; they are in no other figure
    """

    model: str
    weights: str
    kv_cache: str
    device: str
    load: str
    input_tokens: int
    output_tokens: int
    num_requests: int
    num_failed: int
    ttft_ms: Spread
    itl_ms: Spread | None
    tokens_per_s: float
    sequences: float
    step_ms: float | None
    gb_per_s: float | None
    read_share: float | None
    joules_per_token: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Subject:
    """What was timed: `model` in `weights` format on `device`, which reads `bandwidth` bytes a second.

    decode_bytes  (sequences, tokens in the cache of each) -> bytes that a step reads
    """

    model: str
    weights: str
    kv_cache: str
    device: str
    bandwidth: float
    decode_bytes: Callable[[float, float], float]


def row(subject: Subject, workload: Workload, run: Run, joules: float | None) -> Row:
    """BlockscaleError, the first request's, where none came to its end."""
    done = [t for t in run.timelines if t.error is None and t.tokens]
    if not done:
        raise next((t.error for t in run.timelines if t.error is not None), BlockscaleError("no request gave a token"))
    gaps = [gap for timeline in done for gap in timeline.gaps]
    num_tokens = sum(len(timeline.tokens) for timeline in done)
    sequences = statistics.fmean(run.steps)
    step_s = statistics.median(step.seconds for step in run.decodes) if run.decodes else None
    speeds = [subject.decode_bytes(step.sequences, step.context) / step.seconds for step in run.decodes]
    speed = statistics.median(speeds) if speeds else None
    return Row(
        subject.model,
        subject.weights,
        subject.kv_cache,
        subject.device,
        workload.name,
        workload.input_tokens,
        workload.output_tokens,
        workload.num_requests,
        len(run.timelines) - len(done),
        spread([1e3 * timeline.ttft for timeline in done]),
        spread([1e3 * gap for gap in gaps]) if gaps else None,
        num_tokens / run.seconds,
        sequences,
        None if step_s is None else 1e3 * step_s,
        None if speed is None else speed / 1e9,
        None if speed is None else speed / subject.bandwidth,
        None if joules is None else joules / num_tokens,
    )


def spread(values: Sequence[float]) -> Spread:
    """Ranks are the nearest: each such figure is one that was measured."""
    ordered = sorted(values)

    def rank(percent: int) -> float:
        return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]

    return Spread(statistics.fmean(values), rank(50), rank(90), rank(99))
