"""Finds what meets a latency target at the least cost or energy, over GPUs, counts, formats and layouts."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from blockscale.errors import UsageError
from blockscale.planning.answer.choice import Choice, deploy
from blockscale.planning.answer.plan import Targets
from blockscale.planning.answer.result import Found, SearchResult
from blockscale.planning.hardware.catalogue import Gpu, buyable
from blockscale.planning.models.architecture import Architecture
from blockscale.planning.models.model import Model
from blockscale.planning.money.assumptions import Assumptions
from blockscale.planning.money.bill import bill
from blockscale.planning.speed.layout import Layout, check_layout
from blockscale.planning.speed.memory import plan_memory
from blockscale.planning.speed.native import is_native
from blockscale.planning.speed.predict import MAX_SEQUENCES, Prediction, Priors, Workload, predict
from blockscale.planning.speed.roofline import Deployment

OBJECTIVES = ("cost", "energy", "gpus")
MAX_GPUS_PER_REPLICA = 32  # beyond it none of the published measurements lies
MAX_REPLICAS = 4096  # where a rate cannot be served by any number
LAYOUTS_KEPT = 3  # of each GPU and format


@dataclass(frozen=True)
class Space:
    """What may be chosen; empty: anything. `num_gpus`: exactly so many.

    cache    None: fp8 where the GPU multiplies it, else bf16
    """

    gpus: tuple[Gpu, ...] = ()
    num_gpus: int | None = None
    formats: tuple[str, ...] = ()
    cache: str | None = None
    layouts: tuple[Layout, ...] = ()


def candidates(model: Model, space: Space) -> Iterator[Choice]:
    """One replica of every configuration, in the catalogue's order. GPUs that cannot be bought yet only if named."""
    for gpu in space.gpus or buyable():
        for fmt in space.formats or _formats(model, gpu):
            for layout in space.layouts or replica_layouts(model.architecture, gpu):
                choice = Choice(gpu, layout, fmt, space.cache or ("fp8" if is_native(gpu, "fp8") else "bf16"))
                try:
                    check_layout(layout, model.architecture)
                except UsageError:
                    continue
                yield choice


def _formats(model: Model, gpu: Gpu) -> tuple[str, ...]:
    """As published, and what the GPU multiplies natively; 4 bits everywhere, since they save memory."""
    has_own = is_native(gpu, "mxfp4") and not is_native(gpu, "nvfp4")
    has_fp8 = is_native(gpu, "fp8") and not model.stored_format.startswith("fp8")
    wanted = [model.stored_format, *(["fp8"] if has_fp8 else []), "mxfp4" if has_own else "nvfp4"]
    return tuple(dict.fromkeys(wanted))


def replica_layouts(architecture: Architecture, gpu: Gpu) -> Iterator[Layout]:
    """Within the reach of the fast link; stages only beyond it."""
    sizes = [n for n in (1, 2, 4, 8, 16, 32) if n <= MAX_GPUS_PER_REPLICA]
    has_experts = any(block.is_moe for block in architecture.blocks)
    for n in sizes:
        reach = n <= max(gpu.link_domain, 1)
        if n <= 8 and (reach or n <= 4):  # a few cards without a link talk over PCIe
            yield Layout(tensor=n)
        if has_experts and reach and n > 1:
            yield Layout(attention_data=n, is_expert=True)
        if n > 8 and n // 8 <= architecture.num_layers and not reach:
            yield Layout(tensor=8, pipeline=n // 8)
        if n > 1 and gpu.link_domain == 1:
            yield Layout(pipeline=n)


def search(
    model: Model,
    workload: Workload,
    targets: Targets,
    space: Space,
    priors_for: Callable[[Deployment], Priors],
    assumptions: Assumptions,
    *,
    objective: str = "cost",
) -> SearchResult:
    """Deterministic. Each configuration gets the largest batch that meets the targets, and then as many replicas as the
    workload's rate or concurrency needs (one where neither is given). Where the GPUs that are asked for are too few, it
    counts upward."""
    if objective not in OBJECTIVES:
        raise UsageError(f"unknown objective '{objective}'", hint="cost, energy or gpus")
    if not model.architecture.vocabulary:
        raise UsageError(
            f"{model.name} generates no tokens",
            hint="leave the targets out: memory and time of an image can be planned",
        )
    able: dict[tuple[str, str], list[tuple[float, Choice, int]]] = {}
    tried, miss = 0, None
    for choice in candidates(model, space):
        tried += 1
        d = deploy(model, choice)
        priors = priors_for(d)
        batch, factor = _largest_batch(d, workload, targets, priors)
        if batch is None:
            if factor is not None and (miss is None or factor < miss[1]):
                miss = (choice, factor)
            continue
        speed = predict(d, replace(workload, concurrency=batch, rate=None), priors).tokens_per_s_per_gpu.value
        able.setdefault((choice.gpu.key, choice.format), []).append((speed, choice, batch))

    def sized(num_gpus: int | None) -> list[Found]:
        found = []
        for layouts in able.values():  # of each GPU and format, the layouts that serve most
            even = [item for item in layouts if num_gpus is None or num_gpus % item[1].layout.num_gpus == 0]
            for speed, choice, batch in sorted(even, key=lambda item: -item[0])[:LAYOUTS_KEPT]:
                d = deploy(model, choice)
                one = _with_replicas(d, choice, workload, targets, batch, speed, priors_for(d), num_gpus, assumptions)
                if one is not None:
                    found.append(one)
        return found

    found = sized(space.num_gpus)
    more = sized(None) if space.num_gpus is not None and able and not found else []
    enough = min(more, key=lambda f: (f.num_gpus, f.itl_ms.value, f.choice.name), default=None)
    known = [f for f in found if f.figure(objective) is not None]
    unranked = tuple(dict.fromkeys(f.choice.gpu.name for f in found if known and f.figure(objective) is None))
    ranked = sorted(known or found, key=lambda f: _rank(f, objective))
    marked = tuple(replace(f, is_best=_is_undominated(f, ranked, objective)) for f in ranked)
    return SearchResult(marked, tried, objective, None if able else miss, enough, unranked, bool(able))


def _largest_batch(
    d: Deployment, workload: Workload, targets: Targets, priors: Priors
) -> tuple[int | None, float | None]:
    """(sequences of one replica, None), or (None, by what factor one sequence alone misses; None where none fits)."""
    memory = plan_memory(d, workload.input_tokens + workload.output_tokens)
    if not memory.fits:
        return None, None
    most = min(memory.max_sequences, MAX_SEQUENCES * d.layout.attention_data)

    def excess(sequences: int) -> float:
        return excess_over(targets, predict(d, replace(workload, concurrency=sequences, rate=None), priors))

    if excess(1) > 1:
        return None, excess(1)
    low, high = 1, most  # latency grows with the batch
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if excess(middle) <= 1 else (low, middle - 1)
    return low, None


def excess_over(targets: Targets, p: Prediction, *, is_high: bool = False) -> float:
    """By what factor the worse of the latencies exceeds its target; 1 or less meets both.

    is_high  at the unfavourable end, as for sure targets always
    """
    pairs = ((p.ttft_s, targets.ttft_ms), (p.itl_s, targets.itl_ms))
    is_high = is_high or targets.are_sure
    return max(
        (
            1e3 * (estimate.high if is_high else estimate.value) / limit
            for estimate, limit in pairs
            if limit is not None
        ),
        default=0.0,
    )


def _with_replicas(
    d: Deployment,
    choice: Choice,
    workload: Workload,
    targets: Targets,
    batch: int,
    speed: float,
    priors: Priors,
    num_gpus: int | None,
    assumptions: Assumptions,
) -> Found | None:
    """On so many GPUs, or with as many replicas as the workload needs; `speed`: tokens a second and GPU, from which the
    count starts."""
    own = choice.layout

    def at(replicas: int) -> tuple[Deployment, Prediction]:
        wider = replace(d, layout=replace(own, replicas=replicas))
        asked = workload
        if workload.rate is None and workload.concurrency is None:
            asked = replace(workload, concurrency=batch * replicas)
        return wider, predict(wider, asked, priors)

    def is_enough(replicas: int) -> bool:
        _, p = at(replicas)
        is_served = p.waiting < 1 if p.utilization is None else not p.is_overloaded  # at a rate, the wait is in TTFT
        return is_served and excess_over(targets, p) <= 1

    if num_gpus is not None:
        if num_gpus % own.num_gpus or not is_enough(num_gpus // own.num_gpus):
            return None
        replicas = num_gpus // own.num_gpus
    elif workload.rate is None and workload.concurrency is None:
        replicas = 1
    else:
        replicas = max(1, math.ceil(_least_replicas(workload, batch, speed * own.num_gpus)))
        while not is_enough(replicas):
            replicas += max(1, replicas // 16)
            if replicas > MAX_REPLICAS:
                return None
        while replicas > 1 and is_enough(replicas - 1):
            replicas -= 1
    wider, p = at(replicas)
    money = bill(wider, p, assumptions)
    return Found(
        replace(choice, layout=wider.layout),
        p.sequences,
        p.itl_s.scaled(1e3),
        p.ttft_s.scaled(1e3),
        p.tokens_per_s_per_gpu.scaled(wider.layout.num_gpus),
        excess_over(targets, p, is_high=True) <= 1,
        None if money.cost is None else money.cost.per_million_tokens,
        money.joules_per_output_token,
    )


def _least_replicas(workload: Workload, batch: int, tokens_per_s: float) -> float:
    """Without queues and chance."""
    if workload.rate is not None:
        return workload.rate * workload.output_tokens / tokens_per_s
    return (workload.concurrency or batch) / batch


def _figure(found: Found, objective: str) -> float:
    value = found.figure(objective)
    return math.inf if value is None else value


def _rank(found: Found, objective: str) -> tuple[float, int, float, str]:
    return _figure(found, objective), found.num_gpus, found.itl_ms.value, found.choice.name


def _is_undominated(one: Found, all_found: Sequence[Found], objective: str) -> bool:
    """Whether it is on the Pareto front of objective and ITL."""

    def figures(f: Found) -> tuple[float, float]:
        return _figure(f, objective), f.itl_ms.value

    mine = figures(one)
    return not any(
        all(a <= b for a, b in zip(figures(other), mine, strict=True)) and figures(other) != mine for other in all_found
    )
