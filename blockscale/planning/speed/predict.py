"""What a deployment will do under a workload: latency and throughput with an 80 % interval, and what bounds them."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from blockscale.errors import UsageError
from blockscale.planning.speed.memory import MemoryPlan, plan_memory
from blockscale.planning.speed.roofline import Deployment, Efficiency, Serving, serve

MAX_SEQUENCES = 1024  # that engines decode together by default, per copy of attention


@dataclass(frozen=True)
class Estimate:
    """A prediction and its 80 % interval."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> "Estimate":
        return Estimate(self.value * factor, self.low * factor, self.high * factor)

    def inverse(self) -> "Estimate":
        return Estimate(1 / self.value, 1 / self.high, 1 / self.low)


@dataclass(frozen=True)
class Spread:
    """Half the width of the 80 % interval, as a natural logarithm."""

    itl: float
    ttft: float


@dataclass(frozen=True)
class Workload:
    """Tokens of a request on average, and how many come: `concurrency` in flight, or `rate` a second, over all
    replicas."""

    input_tokens: int
    output_tokens: int
    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("input", self.input_tokens), ("output", self.output_tokens)):
            if value < 1:
                raise UsageError(f"--{name} {value}: a request has at least one token", hint="give a positive number")
        if self.concurrency is not None and self.concurrency < 1:
            raise UsageError(f"--concurrency {self.concurrency}: at least one request", hint="give a positive number")
        if self.rate is not None and not (self.rate > 0 and math.isfinite(self.rate)):
            raise UsageError(f"--rate {self.rate}: requests a second", hint="give a positive number")
        if self.concurrency is not None and self.rate is not None:
            raise UsageError("--concurrency and --rate are two workloads", hint="give one of them")


@dataclass(frozen=True)
class Reach:
    """What the runs behind a calibration spanned, each as (least, most): requests in flight a replica, tokens."""

    sequences: tuple[float, float]
    input_tokens: tuple[float, float]
    output_tokens: tuple[float, float]

    def beyond(self, sequences: float, workload: Workload) -> str:
        """What lies further than a factor of two outside, in words; empty: nothing."""
        asked = (
            ("requests a replica", sequences, self.sequences),
            ("prompt tokens", workload.input_tokens, self.input_tokens),
            ("output tokens", workload.output_tokens, self.output_tokens),
        )
        return ", ".join(
            f"{value:,.0f} {name} against {low:,.0f} to {high:,.0f}"
            for name, value, (low, high) in asked
            if not low / _FAR <= value <= high * _FAR
        )


_FAR = 2.0


@dataclass(frozen=True)
class Priors:
    """Efficiencies, and how far measurements lie from what they predict. `source`: what they were fitted to.

    reach    of a calibration: outside it, `outside` is the spread
    """

    efficiency: Efficiency
    spread: Spread
    source: str = "published measurements"
    reach: Reach | None = None
    outside: Spread | None = None

    def spread_at(self, sequences: float, workload: Workload) -> Spread:
        """Of a prediction for so many sequences a replica."""
        if self.reach is None or self.outside is None or not self.reach.beyond(sequences, workload):
            return self.spread
        return self.outside


@dataclass(frozen=True)
class Prediction:
    """One replica, unless a name says otherwise.

    sequences     decoded together
    waiting       requests that are in flight beyond those that memory and engine admit, over all replicas
    tokens_per_s_per_gpu   that come out: at a rate what is asked for, as far as it can be served
    capacity_per_gpu       at a rate: what could come out at most
    utilization   of the capacity; from 1 on the queue grows without end (at a rate only)
    """

    memory: MemoryPlan
    sequences: float
    waiting: float
    itl_s: Estimate
    ttft_s: Estimate
    tokens_per_s_per_gpu: Estimate
    serving: Serving
    utilization: float | None
    capacity_per_gpu: Estimate | None = None

    @property
    def is_overloaded(self) -> bool:
        """Whether more is asked for than can be served."""
        return self.utilization is not None and self.utilization >= 1


@cache
def default_priors() -> Priors:
    """The package's own."""
    content = _efficiencies()
    spread: Mapping[str, float] = content["spread"]
    return Priors(Efficiency(**content["efficiency"]), Spread(spread["itl"], spread["ttft"]))


@cache
def calibrated_spread() -> Spread:
    """The least that is left after a calibration."""
    spread: Mapping[str, float] = _efficiencies()["spread"]
    return Spread(spread["calibrated_itl"], spread["calibrated_ttft"])


def _efficiencies() -> dict[str, Any]:
    text = resources.files("blockscale.planning.speed").joinpath("efficiency.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def measured_gpus() -> tuple[str, ...]:
    """Keys of the GPUs that the package's efficiencies were fitted to."""
    return tuple(_efficiencies()["sample"]["gpus"])


def predict(d: Deployment, workload: Workload, priors: Priors | None = None) -> Prediction:
    """UsageError if not one sequence fits."""
    priors = priors or default_priors()
    memory = plan_memory(d, workload.input_tokens + workload.output_tokens)
    if not memory.fits:
        raise UsageError(
            f"{d.architecture.name} does not fit {d.layout.name} of {d.gpu.name}: {-_lack(memory) / 1e9:.1f} GB are "
            "missing on each GPU",
            hint="more GPUs, fewer bits, a shorter context or a smaller KV cache",
        )
    most = min(memory.max_sequences, MAX_SEQUENCES * d.layout.attention_data)
    if workload.rate is not None:
        return _at_rate(d, workload, priors, memory, most)
    wanted = math.inf if workload.concurrency is None else workload.concurrency / d.layout.replicas
    sequences = min(max(wanted, 1.0), most)
    serving = serve(d, priors.efficiency, sequences, workload.input_tokens, workload.output_tokens)
    waiting = 0.0 if math.isinf(wanted) else max(wanted - sequences, 0.0)
    # a closed loop: each waiting request starts when one in front of it ends
    queue_s = waiting / sequences * serving.itl_s * workload.output_tokens
    found = _prediction(d, workload, memory, serving, priors, waiting * d.layout.replicas, queue_s, None)
    if wanted >= 1:
        return found
    # fewer requests than replicas: some stand still
    return replace(found, tokens_per_s_per_gpu=found.tokens_per_s_per_gpu.scaled(wanted))


def _lack(memory: MemoryPlan) -> float:
    return memory.free_bytes - memory.sequence_bytes


def _at_rate(d: Deployment, workload: Workload, priors: Priors, memory: MemoryPlan, most: int) -> Prediction:
    """An open loop: the batch is what Little's law makes of rate and latency, found by iteration.

    The wait for a place is that of a queue with `most` servers and exponential times (Allen and Cunneen's form of
    Erlang C), which is what long requests in large batches come close to.
    """
    assert workload.rate is not None
    rate = workload.rate / d.layout.replicas
    at_most = serve(d, priors.efficiency, most, workload.input_tokens, workload.output_tokens)
    longest = at_most.ttft_s + at_most.itl_s * workload.output_tokens
    utilization = rate * longest / most
    low, high = 1.0, float(most)
    for _ in range(60):  # residence grows with the batch, so the difference has one zero
        middle = (low + high) / 2
        serving = serve(d, priors.efficiency, middle, workload.input_tokens, workload.output_tokens)
        residence = serving.prefill.seconds + serving.itl_s * workload.output_tokens
        low, high = (middle, high) if rate * residence > middle else (low, middle)
    serving = serve(d, priors.efficiency, high, workload.input_tokens, workload.output_tokens)
    limit = _prediction(d, workload, memory, at_most, priors, math.inf, math.inf, utilization)
    # a place is taken from the arrival on, not only while it decodes
    capacity = limit.tokens_per_s_per_gpu.scaled(at_most.itl_s * workload.output_tokens / longest)
    asked = workload.rate * workload.output_tokens / d.layout.num_gpus
    made = Estimate(*(min(asked, each) for each in (capacity.value, capacity.low, capacity.high)))
    if utilization >= 1:
        return replace(limit, tokens_per_s_per_gpu=made, capacity_per_gpu=capacity)
    wait = longest / most * utilization ** (math.sqrt(2 * (most + 1)) - 1) / (1 - utilization)
    found = _prediction(d, workload, memory, serving, priors, rate * wait * d.layout.replicas, wait, utilization)
    return replace(found, tokens_per_s_per_gpu=made, capacity_per_gpu=capacity)


def _prediction(
    d: Deployment,
    workload: Workload,
    memory: MemoryPlan,
    serving: Serving,
    priors: Priors,
    waiting: float,
    queue_s: float,
    utilization: float | None,
) -> Prediction:
    quick, slow = (
        serve(end, priors.efficiency, serving.sequences, workload.input_tokens, workload.output_tokens)
        if end is not d
        else serving
        for end in quickest_and_slowest(d)
    )
    spread = priors.spread_at(serving.sequences, workload)
    itl = around(serving.itl_s, spread.itl, quick.itl_s, slow.itl_s)
    ttft = around(serving.ttft_s, spread.ttft, quick.ttft_s, slow.ttft_s)
    return Prediction(
        memory,
        serving.sequences,
        waiting,
        itl,
        ttft.scaled((serving.ttft_s + queue_s) / serving.ttft_s),
        itl.inverse().scaled(serving.sequences / d.layout.gpus_per_replica),
        serving,
        utilization,
    )


def quickest_and_slowest(d: Deployment) -> tuple[Deployment, Deployment]:
    """On the GPU with the most, and with the least, of what sources give it; itself where they agree."""
    if not d.gpu.is_uncertain:
        return d, d
    quick, slow = d.gpu.ends
    return replace(d, gpu=quick), replace(d, gpu=slow)


def around(value: float, spread: float, quick: float, slow: float) -> Estimate:
    """The 80 % interval of a time. `quick` and `slow`: what it is at the ends of the GPU's own figures, whose error has
    nothing to do with the model's `spread`: logarithms add in square."""
    down, up = math.hypot(spread, math.log(value / quick)), math.hypot(spread, math.log(slow / value))
    return Estimate(value, value * math.exp(-down), value * math.exp(up))
