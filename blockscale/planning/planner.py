"""`plan`, the verb. Lies here and not in `api`, which needs torch."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from blockscale.errors import CheckFailed, UsageError
from blockscale.planning.choice import (
    Choice,
    check_cache,
    check_engine,
    check_format,
    parse_choice,
    resolve_layout,
    weights_in,
)
from blockscale.planning.hardware import Gpu, find_gpu
from blockscale.planning.layout import parse_layout
from blockscale.planning.machine import catalogue_entry, this_machine
from blockscale.planning.model import Model, find_model
from blockscale.planning.plan import Targets, check_workload, make_plan
from blockscale.planning.predict import Priors, Workload, default_priors
from blockscale.planning.result import PlanResult, SearchResult
from blockscale.planning.search import Space, search


def plan(
    model: str | Path,
    gpu: str | None = None,
    *,
    gpus: int | None = None,
    format: str | None = None,
    kv_cache: str | None = None,
    layout: str | None = None,
    engine: str | None = None,
    input: int = 1024,
    output: int = 1024,
    concurrency: int | None = None,
    rate: float | None = None,
    ttft_ms: float | None = None,
    itl_ms: float | None = None,
    objective: str = "cost",
    compare: Sequence[str] = (),
    report: str | Path | None = None,
    language: str = "en",
) -> PlanResult:
    """What a model takes on GPUs, and what it gives there: memory, latency, throughput, energy, cost.

    model        a preset, a config.json, a model folder or a hub id
    gpu          a name of the catalogue or a .toml file; None: this machine's, or with targets any that can be bought
    gpus         how many; 1 if neither this nor `layout` says it
    format       of the layers' weights; None: as the model is stored
    kv_cache     bf16, fp8 or nvfp4; None: bf16
    layout       tp8, tp4pp2, tep8, dep8, tp2dp4 ...
    concurrency  requests in flight, or `rate`: requests a second; neither: as many as fit
    ttft_ms, itl_ms  targets. Without `layout`, what meets them at the least `objective` (cost, energy or gpus) is searched
    compare      other configurations, as `fp8@h200` or `fp8@8xh200:tp8`
    report       where to write an HTML page, in `language`

    What does not fit is an answer, not an error: `.fits`, `.missing_bytes`, `.nearest`. CheckFailed where a search finds
    nothing that meets the targets; UsageError for what makes no sense.
    """
    found = find_model(model)
    workload = Workload(input, output, concurrency, rate)
    targets = Targets(ttft_ms, itl_ms)
    check_workload(found, workload)
    if format is not None:
        check_format(format)
    cache = check_cache(kv_cache or "bf16")
    if engine is not None:
        check_engine(engine)
    priors = default_priors()
    if targets.are_set and (layout is None or gpu is None):
        result = _searched(found, gpu, gpus, format, cache, layout, workload, targets, objective, engine, priors)
    else:
        own = _own_gpu() if gpu is None else find_gpu(gpu)
        fmt = format or found.stored_format
        size = weights_in(found, fmt).num_bytes
        choice = Choice(own, resolve_layout(found.architecture, own, layout, gpus, size), fmt, cache)
        result = make_plan(found, choice, workload, targets=targets, engine=engine, priors=priors)
    others = [parse_choice(text, found, result.choice) for text in compare]
    result = replace(
        result,
        compared=tuple(
            make_plan(found, other, workload, targets=targets, engine=engine, priors=priors) for other in others
        ),
    )
    if report is not None:
        from blockscale.planning.report import write_plan

        write_plan(result, report, language)
    return result


def _own_gpu() -> Gpu:
    machine = this_machine()
    if not machine.devices:
        raise UsageError(f"no --gpu is given, and {machine.reason}", hint="--gpu NAME, or targets to search for one")
    found = catalogue_entry(machine.devices[0])
    if found is None:
        raise UsageError(
            f"{machine.devices[0].name} is not in the catalogue", hint="describe it in a file: --gpu FILE.toml"
        )
    return replace(found, memory_bytes=machine.devices[0].memory_bytes)


def _searched(
    model: Model,
    gpu: str | None,
    gpus: int | None,
    format: str | None,
    cache: str,
    layout: str | None,
    workload: Workload,
    targets: Targets,
    objective: str,
    engine: str | None,
    priors: Priors,
) -> PlanResult:
    space = Space(
        gpus=() if gpu is None else (find_gpu(gpu),),
        num_gpus=gpus,
        formats=() if format is None else (format,),
        cache=cache,
        layouts=() if layout is None else (parse_layout(layout),),
    )
    found = search(model, workload, targets, space, priors, objective=objective)
    if not found.found:
        raise CheckFailed(f"none of {found.tried} configurations of {model.name} meets the targets", hint=_miss(found))
    best = found.found[0]
    asked = workload
    if workload.rate is None and workload.concurrency is None:  # the batch that was found to meet the targets
        asked = replace(workload, concurrency=max(1, round(best.batch * best.choice.layout.replicas)))
    result = make_plan(model, best.choice, asked, targets=targets, engine=engine, priors=priors)
    return replace(result, search=found)


def _miss(found: SearchResult) -> str:
    if found.nearest_miss is None:
        return "no configuration holds the model: allow more GPUs or fewer bits"
    choice, factor = found.nearest_miss
    if factor <= 1:
        return f"{choice.name} meets them for one request, but not at this load"
    return f"{choice.name} comes closest, and misses by a factor of {factor:.2f}: raise --ttft-ms or --itl-ms"
