"""What is asked of the engine while it is timed, and when each answer's tokens came."""

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from blockscale.engine.request import Event, FinishReason
from blockscale.engine.sampling import Sampling
from blockscale.errors import BlockscaleError, UsageError

MAX_REQUESTS = 100_000


class Server(Protocol):
    """As much of the engine as is timed."""

    @property
    def has_work(self) -> bool: ...

    def submit(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str | None = None) -> str: ...

    def step(self) -> Iterable[Event]: ...


@dataclass(frozen=True)
class Workload:
    """Equal requests of random tokens, that no two share.

    concurrency  so many are in work at any time; a new one comes when one is done
    rate         or: requests a second that come by chance, one independent of the other (a Poisson process)
    """

    num_requests: int
    input_tokens: int
    output_tokens: int
    concurrency: int | None = None
    rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise UsageError("a load has either a concurrency or a rate", hint="give one of them")
        concurrency = 1 if self.concurrency is None else self.concurrency
        rate = 1.0 if self.rate is None else self.rate
        least = min(self.num_requests, self.input_tokens, self.output_tokens, concurrency)
        if least < 1 or self.num_requests > MAX_REQUESTS or not 0 < rate < float("inf"):
            raise UsageError(
                f"no load: {self.num_requests} requests of {self.input_tokens} and {self.output_tokens} tokens, "
                f"concurrency {self.concurrency}, rate {self.rate}",
                hint=f"all of them are above 0, and up to {MAX_REQUESTS} requests",
            )

    @property
    def name(self) -> str:
        return f"{self.concurrency} at once" if self.concurrency is not None else f"{self.rate:g} a second"

    def prompts(self, vocab_size: int) -> list[list[int]]:
        draw = random.Random(self.seed)
        return [draw.choices(range(vocab_size), k=self.input_tokens) for _ in range(self.num_requests)]

    def arrivals(self) -> list[float]:
        """Seconds from the start at which requests come; all 0 where the engine's pace decides."""
        if self.rate is None:
            return [0.0] * self.num_requests
        draw, at = random.Random(self.seed + 1), 0.0
        times = []
        for _ in range(self.num_requests):
            at += draw.expovariate(self.rate)
            times.append(at)
        return times


@dataclass
class Timeline:
    """One request, in seconds of one clock.

    due     when it came: waiting for the engine counts, even where the engine was too busy to take it
    tokens  when each token of the output was there
    """

    due: float
    tokens: list[float] = field(default_factory=list)
    error: BlockscaleError | None = None

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.due

    @property
    def gaps(self) -> list[float]:
        """Between a token and the next."""
        return [b - a for a, b in pairwise(self.tokens)]


@dataclass(frozen=True)
class DecodeStep:
    """A step that did nothing but decode: it brought tokens to all that ran, and the step before to the same ones.

    context  tokens in the cache of each of `sequences`, on average
    """

    seconds: float
    sequences: int
    context: float


@dataclass(frozen=True)
class Run:
    """What happened: `timelines` in the order of arrival, `seconds` from the start to the last token.

    steps  of the engine that brought tokens: how many requests each brought tokens to
    """

    timelines: Sequence[Timeline]
    seconds: float
    steps: Sequence[int]
    decodes: Sequence[DecodeStep] = ()


def drive(
    engine: Server,
    workload: Workload,
    vocab_size: int,
    *,
    now: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Run:
    """Runs the whole workload through the engine, which has nothing else to do.

    now, sleep  the clock, in seconds
    """
    sampling = Sampling(max_tokens=workload.output_tokens, ignore_eos=True)
    begin = now()
    arrivals = deque(zip(workload.prompts(vocab_size), workload.arrivals(), strict=True))
    timelines: dict[str, Timeline] = {}
    running: set[str] = set()
    steps: list[int] = []
    decodes: list[DecodeStep] = []
    before: frozenset[str] = frozenset()
    while arrivals or running:
        while arrivals and _is_due(workload, len(running), begin + arrivals[0][1], now()):
            prompt, at = arrivals.popleft()
            due = now() if workload.rate is None else begin + at
            request = engine.submit(prompt, sampling, f"bench-{len(timelines)}")
            timelines[request] = Timeline(due)
            running.add(request)
        if not running:
            sleep(max(0.0, begin + arrivals[0][1] - now()))
            continue
        started = now()
        events = list(engine.step())
        ended = now()
        served = frozenset(e.request_id for e in events if e.token_ids)
        if served:
            steps.append(len(served))
        if served and served == before == running:
            context = workload.input_tokens + sum(len(timelines[r].tokens) for r in served) / len(served)
            decodes.append(DecodeStep(ended - started, len(served), context))
        before = served
        for event in events:
            timeline = timelines[event.request_id]
            timeline.tokens += [ended] * len(event.token_ids)
            if event.finish_reason is not None:
                running.discard(event.request_id)
                timeline.error = event.error
                if event.finish_reason is FinishReason.ABORT and event.error is None:
                    timeline.error = BlockscaleError("the request was aborted")
    return Run(list(timelines.values()), now() - begin, steps, decodes)


def _is_due(workload: Workload, num_running: int, at: float, time_now: float) -> bool:
    if workload.concurrency is not None:
        return num_running < workload.concurrency
    return at <= time_now
