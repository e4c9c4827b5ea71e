"""Joins memory, speed, energy and cost of one configuration into one answer."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from blockscale.errors import UsageError
from blockscale.planning.answer.choice import CACHES, Choice, deploy, weights_in
from blockscale.planning.answer.notices import remarks, situation
from blockscale.planning.answer.result import Bound, CurvePoint, PartRow, PlanResult, Target
from blockscale.planning.models.model import Model
from blockscale.planning.money.assumptions import Assumptions, load_assumptions, records_for
from blockscale.planning.money.bill import Bill, bill
from blockscale.planning.speed.diffusion import ImageRequest, predict_image
from blockscale.planning.speed.layout import Layout, check_layout
from blockscale.planning.speed.memory import MemoryPlan, kv_bytes_per_sequence, kv_bytes_per_token, plan_memory
from blockscale.planning.speed.native import format_uses
from blockscale.planning.speed.predict import (
    MAX_SEQUENCES,
    Estimate,
    Prediction,
    Priors,
    Workload,
    default_priors,
    predict,
)
from blockscale.planning.speed.roofline import Deployment, Step


@dataclass(frozen=True)
class Targets:
    """Latencies that must not be exceeded; None: any will do. `are_sure`: nor at the unfavourable end of the 80 %
    intervals."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    are_sure: bool = False

    def __post_init__(self) -> None:
        if self.are_sure and not self.are_set:
            raise UsageError("--sure without a target", hint="--ttft-ms or --itl-ms")
        for name, value in (("--ttft-ms", self.ttft_ms), ("--itl-ms", self.itl_ms)):
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"{name} {value}: milliseconds", hint="give a positive number")

    @property
    def are_set(self) -> bool:
        return self.ttft_ms is not None or self.itl_ms is not None


def make_plan(
    model: Model,
    choice: Choice,
    workload: Workload,
    *,
    targets: Targets | None = None,
    engine: str | None = None,
    priors: Priors | None = None,
    assumptions: Assumptions | None = None,
    image: ImageRequest | None = None,
) -> PlanResult:
    """Never fails because something does not fit: that is an answer. UsageError for what cannot be built."""
    priors, a = priors or default_priors(), assumptions or load_assumptions()
    check_workload(model, workload)
    d = deploy(model, choice)
    context = workload.input_tokens + workload.output_tokens
    memory = plan_memory(d, context)
    fits = has_room(model, memory)
    prediction = predict(d, workload, priors) if memory.fits else None
    money = Bill() if prediction is None else bill(d, prediction, a)
    points = () if prediction is None else tuple(curve(d, workload, priors, memory))
    notices = (
        *situation(d, choice, prediction, money, a),
        *remarks(d, prediction, money, a, priors, points[-1].tokens_per_s_per_gpu.value if points else 0.0),
    )
    request = None if model.architecture.vocabulary else image or ImageRequest()
    drawn = None if request is None or not fits else predict_image(d, request, priors)
    return PlanResult(
        model=model.name,
        num_parameters=model.architecture.num_parameters,
        active_parameters=model.architecture.active_parameters,
        origin=model.origin,
        choice=choice,
        engine=engine,
        workload=workload,
        fits=fits,
        missing_bytes=0.0 if fits else memory.sequence_bytes - memory.free_bytes,
        nearest=() if fits else tuple(nearest_that_fit(model, choice, context)),
        weights_bytes=d.weights.num_bytes,
        weights_are_exact=d.weights.is_exact,
        parts=tuple(PartRow(part.value, own.format, own.num_bytes) for part, own in d.weights.parts.items()),
        formats=format_uses(d),
        memory=memory,
        kv_bytes_per_token=kv_bytes_per_token(model.architecture, choice.cache),
        kv_bytes_per_sequence=kv_bytes_per_sequence(model.architecture, choice.cache),
        max_sequences=memory.max_sequences * choice.layout.replicas,
        limit=_limit(d, memory, prediction),
        sequences=None if prediction is None else _running(choice, workload, prediction),
        waiting=None if prediction is None else prediction.waiting,
        utilization=None if prediction is None else prediction.utilization,
        ttft_ms=None if prediction is None else prediction.ttft_s.scaled(1e3),
        itl_ms=None if prediction is None else prediction.itl_s.scaled(1e3),
        output_tokens_per_s_per_gpu=None if prediction is None else prediction.tokens_per_s_per_gpu,
        capacity_per_gpu=None if prediction is None else prediction.capacity_per_gpu,
        enough=None if prediction is None else _enough(choice, prediction),
        bound=None if prediction is None else bounds(prediction.serving.step)[0].name,
        decode_bounds=() if prediction is None else bounds(prediction.serving.step),
        prefill_bounds=() if prediction is None else bounds(prediction.serving.prefill),
        curve=points,
        targets=_reached(targets or Targets(), prediction),
        bill=money,
        assumptions=records_for(a, (choice.gpu.key,)),
        country=a.country,
        priors=priors.source,
        notices=notices,
        image_request=request,
        image=drawn,
        image_bounds=() if drawn is None else bounds(drawn.step),
    )


def has_room(model: Model, memory: MemoryPlan) -> bool:
    """For one sequence; a diffusion transformer has weights and steps, but none."""
    return memory.fits if model.architecture.vocabulary else memory.free_bytes >= 0


def check_workload(model: Model, workload: Workload) -> None:
    """UsageError for requests that are longer than the model can read."""
    context, longest = workload.input_tokens + workload.output_tokens, model.architecture.context
    if longest is not None and context > longest:
        raise UsageError(
            f"{workload.input_tokens} + {workload.output_tokens} tokens, and {model.name} reads {longest:,} at most",
            hint="lower --input or --output",
        )


def bounds(step: Step) -> tuple[Bound, ...]:
    """What a step's time goes to, largest first. Reading weights and arithmetic overlap: only the longer one counts
    into the step, and the other says how far away it is."""
    terms = {
        "weights": step.weights,
        "compute": step.compute,
        "KV cache": step.cache,
        "communication": step.communication,
        "overhead": step.overhead,
    }
    ranked = sorted(((name, s) for name, s in terms.items() if s > 0), key=lambda item: -item[1])
    largest = ranked[0][1]
    hidden = "compute" if step.weights >= step.compute else "weights"
    return tuple(
        Bound(name, seconds * 1e3, 0.0 if name == hidden else seconds / step.seconds, largest / seconds)
        for name, seconds in ranked
    )


def curve(d: Deployment, workload: Workload, priors: Priors, memory: MemoryPlan) -> Iterator[CurvePoint]:
    """From one sequence to as many as are admitted, doubling."""
    most = min(memory.max_sequences, MAX_SEQUENCES * d.layout.attention_data)
    one = replace(d, layout=replace(d.layout, replicas=1))
    sequences = 1
    while True:
        point = predict(one, replace(workload, concurrency=sequences, rate=None), priors)
        yield CurvePoint(sequences, point.itl_s.scaled(1e3), point.ttft_s.scaled(1e3), point.tokens_per_s_per_gpu)
        if sequences >= most:
            return
        sequences = min(2 * sequences, most)


def _limit(d: Deployment, memory: MemoryPlan, prediction: Prediction | None) -> str:
    if prediction is None or prediction.sequences >= memory.max_sequences:
        return "memory"
    return "engine" if prediction.sequences >= MAX_SEQUENCES * d.layout.attention_data else "requests"


def _reached(targets: Targets, prediction: Prediction | None) -> tuple[Target, ...]:
    wanted = (("TTFT", targets.ttft_ms), ("ITL", targets.itl_ms))
    if prediction is None:
        return tuple(Target(name, limit, False, False, targets.are_sure) for name, limit in wanted if limit is not None)
    found: dict[str, Estimate] = {"TTFT": prediction.ttft_s, "ITL": prediction.itl_s}
    is_served = not prediction.is_overloaded
    return tuple(
        Target(
            name,
            limit,
            is_served and 1e3 * found[name].value <= limit,
            is_served and 1e3 * found[name].high <= limit,
            targets.are_sure,
        )
        for name, limit in wanted
        if limit is not None
    )


def _running(choice: Choice, workload: Workload, prediction: Prediction) -> float:
    """Sequences decoded together, over all replicas."""
    most = math.inf if workload.concurrency is None else float(workload.concurrency)
    return min(prediction.sequences * choice.layout.replicas, most)


def _enough(choice: Choice, prediction: Prediction) -> Choice | None:
    """With as many replicas as serve a rate that these cannot."""
    if prediction.utilization is None or not prediction.is_overloaded:
        return None
    replicas = math.floor(prediction.utilization * choice.layout.replicas) + 1
    return replace(choice, layout=replace(choice.layout, replicas=replicas))


def nearest_that_fit(model: Model, choice: Choice, context: int) -> Iterator[Choice]:
    """The smallest changes that make it fit: fewer bits in the cache, fewer in the weights, more GPUs, or both."""

    def fits(other: Choice) -> bool:
        return has_room(model, plan_memory(deploy(model, other), context))

    size = weights_in(model, choice.format).num_bytes
    caches = (replace(choice, cache=cache) for cache in CACHES[CACHES.index(choice.cache) + 1 :])
    formats = [replace(choice, format=fmt) for fmt in ("fp8", "nvfp4") if weights_in(model, fmt).num_bytes < size]
    alone = next((other for other in formats if fits(other)), None)
    for found in (next(filter(fits, caches), None), alone, next(filter(fits, more_gpus(model, choice)), None)):
        if found is not None:
            yield found
    if alone is None and formats:
        both = next(filter(fits, more_gpus(model, formats[-1])), None)
        if both is not None:
            yield both


def more_gpus(model: Model, choice: Choice) -> Iterator[Choice]:
    """The same with replicas of more GPUs each, fewest first."""
    own = choice.layout
    layouts = []
    for factor in (2, 4, 8, 16, 32):
        if own.attention_data > 1:
            layouts.append(Layout(own.tensor, own.pipeline, own.attention_data * factor, own.is_expert))
        layouts.append(Layout(own.tensor * factor, own.pipeline, own.attention_data, own.is_expert))
        layouts.append(Layout(own.tensor, own.pipeline * factor, own.attention_data, own.is_expert))
    for layout in sorted(layouts, key=lambda layout: (layout.num_gpus, layout.pipeline)):
        try:
            check_layout(layout, model.architecture)
        except UsageError:
            continue
        if layout.tensor <= 8:
            yield replace(choice, layout=layout)
