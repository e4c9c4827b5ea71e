"""Joins memory, speed, energy and cost of one configuration into one answer."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from blockscale.errors import UsageError
from blockscale.planning.answer.choice import CACHES, Choice, deploy, weights_in
from blockscale.planning.answer.result import Bound, CurvePoint, Notice, PartRow, PlanResult, Target
from blockscale.planning.models.model import Model
from blockscale.planning.money.assumptions import Assumptions, load_assumptions, records_for
from blockscale.planning.money.bill import Bill, bill
from blockscale.planning.money.energy import is_rack
from blockscale.planning.speed.diffusion import ImageRequest, predict_image
from blockscale.planning.speed.layout import Layout, check_layout
from blockscale.planning.speed.memory import MemoryPlan, kv_bytes_per_token, plan_memory
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
    """Latencies that must not be exceeded; None: any will do."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def __post_init__(self) -> None:
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
    money = Bill() if prediction is None else bill(d, prediction, workload, a)
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
        max_sequences=memory.max_sequences * choice.layout.replicas,
        limit=_limit(d, memory, prediction),
        sequences=None if prediction is None else prediction.sequences * choice.layout.replicas,
        waiting=None if prediction is None else prediction.waiting,
        utilization=None if prediction is None else prediction.utilization,
        ttft_ms=None if prediction is None else prediction.ttft_s.scaled(1e3),
        itl_ms=None if prediction is None else prediction.itl_s.scaled(1e3),
        output_tokens_per_s_per_gpu=None if prediction is None else prediction.tokens_per_s_per_gpu,
        bound=None if prediction is None else bounds(prediction.serving.step)[0].name,
        decode_bounds=() if prediction is None else bounds(prediction.serving.step),
        prefill_bounds=() if prediction is None else bounds(prediction.serving.prefill),
        curve=() if prediction is None else tuple(curve(d, workload, priors, memory)),
        targets=_reached(targets or Targets(), prediction),
        bill=money,
        assumptions=records_for(a, (choice.gpu.key,)),
        country=a.country,
        priors=priors.source,
        notices=tuple(_notices(d, choice, prediction, money, a)),
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
        return tuple(Target(name, limit, False, False) for name, limit in wanted if limit is not None)
    found: dict[str, Estimate] = {"TTFT": prediction.ttft_s, "ITL": prediction.itl_s}
    is_served = prediction.utilization is None or prediction.utilization < 1
    return tuple(
        Target(
            name,
            limit,
            is_served and 1e3 * found[name].value <= limit,
            is_served and 1e3 * found[name].high <= limit,
        )
        for name, limit in wanted
        if limit is not None
    )


def _notices(
    d: Deployment, choice: Choice, prediction: Prediction | None, money: Bill, a: Assumptions
) -> Iterator[Notice]:
    if not d.architecture.vocabulary:
        yield Notice("notice.no_tokens", {"model": d.architecture.name})
    if prediction is not None and money.power is None:
        yield Notice("notice.no_power", {"gpu": d.gpu.name})
    elif prediction is not None and money.cost is None:
        yield Notice(f"notice.no_price_{a.acquisition}", {"gpu": d.gpu.name, "key": d.gpu.key})
    if is_rack(d.gpu) and d.layout.num_gpus % d.gpu.system_gpus and money.power is not None:
        values = {"unit": d.gpu.system_name, "gpus": str(d.gpu.system_gpus), "used": str(d.layout.num_gpus)}
        yield Notice("notice.sold_whole", values)
    if money.why_no_racks:
        yield Notice("notice.no_racks", {"why": money.why_no_racks})
    gpu, joined = d.gpu, choice.layout.gpus_per_replica
    if a.gpu_power_limit_watts is not None:
        yield Notice("notice.power_limit", {"watts": f"{a.gpu_power_limit_watts:g}"})
    if gpu.is_roadmap:
        yield Notice("notice.roadmap", {"gpu": gpu.name, "status": gpu.status})
    elif gpu.confidence.startswith("low"):
        yield Notice("notice.unconfirmed", {"gpu": gpu.name, "notes": gpu.notes})
    if joined > gpu.link_domain:
        values = {"layout": choice.layout.name, "gpu": gpu.name, "joined": str(joined), "reach": str(gpu.link_domain)}
        yield Notice("notice.beyond_link" if gpu.link_domain > 1 else "notice.no_link", values)


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
