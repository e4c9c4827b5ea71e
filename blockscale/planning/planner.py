"""`plan`, the verb. Lies here and not in `api`, which needs torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from blockscale.errors import CheckFailed, UsageError
from blockscale.planning.answer.best_layout import best_layout
from blockscale.planning.answer.choice import (
    Choice,
    Wanted,
    check_cache,
    check_engine,
    check_format,
    check_gpus,
    compared_gpu,
    default_layout,
    deploy,
    filled,
    parse_wanted,
    weights_in,
)
from blockscale.planning.answer.language import language as words
from blockscale.planning.answer.plan import Targets, check_workload, make_plan
from blockscale.planning.answer.result import Notice, PlanResult, SearchResult
from blockscale.planning.answer.search import Space, search
from blockscale.planning.calibration.calibrations import Calibrations, measured_layout
from blockscale.planning.hardware.catalogue import Gpu, buyable, find_gpu
from blockscale.planning.hardware.machine import catalogue_entry, this_machine
from blockscale.planning.hardware.power_limit import with_power_limit
from blockscale.planning.models.model import Model, find_model
from blockscale.planning.money.assumptions import Assumptions, limited, load_assumptions
from blockscale.planning.speed.diffusion import STEPS, ImageRequest, parse_resolution
from blockscale.planning.speed.layout import parse_layout
from blockscale.planning.speed.predict import Workload


def plan(
    model: str | Path,
    gpu: str | None = None,
    *,
    gpus: int | None = None,
    format: str | None = None,
    kv_cache: str | None = None,
    layout: str | None = None,
    engine: str | None = None,
    engine_version: str | None = None,
    input: int = 1024,
    output: int = 1024,
    concurrency: int | None = None,
    rate: float | None = None,
    ttft_ms: float | None = None,
    itl_ms: float | None = None,
    sure: bool = False,
    objective: str = "cost",
    compare: Sequence[str] = (),
    calibrate: Sequence[str | Path] = (),
    calibration_file: str | Path | None = None,
    assumptions: str | Path | None = None,
    country: str | None = None,
    power_limit: float | None = None,
    steps: int | None = None,
    resolution: str | None = None,
    report: str | Path | None = None,
    language: str = "en",
) -> PlanResult:
    """What a model takes on GPUs, and what it gives there: memory, latency, throughput, energy, cost.

    model        a preset, a config.json, a model folder or a hub id
    gpu          a name of the catalogue or a .toml file; None: this machine's, or with targets any that can be bought
    gpus         how many; 1 if neither this nor `layout` says it
    format       of the layers' weights; None: as the model is stored
    kv_cache     bf16, fp8 or nvfp4; None: bf16, and of a search fp8 where the GPU has it
    layout       tp8, tp4pp2, tep8, dep8, tp2dp4 ...; None: of `gpus` the one that serves the load best
    engine       and `engine_version`: which calibration holds; without one, predictions are the same for every engine
    concurrency  requests in flight, or `rate`: requests a second; neither: as many as fit
    ttft_ms      a target, as `itl_ms`; without `gpu` or `layout`, what meets them is searched for
    sure         targets hold at the unfavourable end of the 80 % intervals, too
    objective    of a search: the least cost, energy or gpus
    compare      other configurations, as `fp8@h200` or `fp8@8xh200:tp8`
    calibrate    an engine's own benchmark files, to fit the predictions to; the fit is kept in `calibration_file` or
                 in the user's own, and used from then on
    assumptions  a YAML file that sets what energy and cost assume; `country`: whose prices and taxes
    power_limit  watts of a GPU's board at most, where that is less than its TDP
    steps        of a diffusion transformer, for one image, and `resolution` in pixels: 1024 or 1024x768
    report       where to write an HTML page, in `language`

    What does not fit is an answer, not an error: `.fits`, `.missing_bytes`, `.nearest`. CheckFailed where a search
    finds nothing that meets the targets; UsageError for what makes no sense.
    """
    words(language)
    found = find_model(model)
    workload, targets = Workload(input, output, concurrency, rate), Targets(ttft_ms, itl_ms, sure)
    asked = Asked(found, workload, targets, engine, _image(found, steps, resolution))
    check_workload(found, asked.workload)
    if format is not None:
        check_format(format)
    cache = None if kv_cache is None else check_cache(kv_cache)
    if engine is not None:
        check_engine(engine)
    check_gpus(gpus)
    fixed = None if layout is None else parse_layout(layout)
    own = find_gpu(gpu) if gpu is not None else None if asked.targets.are_set else _own_gpu()
    described = tuple(one.key for one in (own, *map(compared_gpu, compare)) if one is not None)
    money = limited(load_assumptions(assumptions, country, described), power_limit)
    own = None if own is None else _at_limit(own, money)
    is_search = asked.targets.are_set and (fixed is None or own is None)
    if calibrate and own is None:
        raise UsageError("--calibrate needs to know the GPU of the runs", hint="give --gpu")
    known = Calibrations(engine, engine_version, None if calibration_file is None else Path(calibration_file))
    if calibrate and own is not None:
        fmt = format or found.stored_format
        weights = weights_in(found, fmt).num_bytes
        usual = default_layout(found.architecture, own, gpus or 1, weights)
        measured = filled(fixed or measured_layout(calibrate) or usual, gpus, found.architecture)
        known.add(calibrate, deploy(found, Choice(own, measured, fmt, cache or "bf16")))
        fixed = fixed if is_search else measured
    if is_search:
        space = Space(
            gpus=tuple(_at_limit(one, money) for one in buyable()) if own is None else (own,),
            num_gpus=gpus if fixed is None or fixed.replicas == 1 else filled(fixed, gpus, found.architecture).num_gpus,
            formats=() if format is None else (format,),
            cache=cache,
            layouts=() if fixed is None else (replace(fixed, replicas=1),),
        )
        result = _searched(asked, space, objective, known, money)
    else:
        assert own is not None
        wanted = Wanted(own, format or found.stored_format, cache or "bf16", gpus, fixed)
        result = _planned(asked, *_resolved(asked, wanted, known, money), known, money)
    others = []
    for text in compare:
        wanted = parse_wanted(text, result.choice, fixed)
        wanted = replace(wanted, gpu=_at_limit(wanted.gpu, money))
        others.append(_planned(asked, *_resolved(asked, wanted, known, money), known, money))
    result = replace(result, compared=tuple(others))
    if report is not None:
        from blockscale.planning.report.page import write_plan

        write_plan(result, report, language)
    return result


@dataclass(frozen=True)
class Asked:
    """What does not change between configurations."""

    model: Model
    workload: Workload
    targets: Targets
    engine: str | None
    image: ImageRequest | None


def _image(model: Model, steps: int | None, resolution: str | None) -> ImageRequest | None:
    if steps is None and resolution is None:
        return None
    if model.architecture.vocabulary:
        raise UsageError(f"{model.name} generates tokens, not images", hint="leave --steps and --resolution out")
    width, height = (1024, 1024) if resolution is None else parse_resolution(resolution)
    return ImageRequest(width, height, STEPS if steps is None else steps)


def _at_limit(gpu: Gpu, money: Assumptions) -> Gpu:
    return with_power_limit(gpu, money.gpu_power_limit_watts, money.gpu_idle_share, money.memory_power_share)


def _resolved(
    asked: Asked, wanted: Wanted, known: Calibrations, money: Assumptions
) -> tuple[Choice, tuple[Notice, ...]]:
    """With the layout that is asked for, or that serves best."""
    model = asked.model
    if wanted.layout is not None:
        layout = filled(wanted.layout, wanted.num_gpus, model.architecture)
        return Choice(wanted.gpu, layout, wanted.format, wanted.cache), ()
    layout, said = best_layout(model, wanted, asked.workload, asked.targets, known.priors_for, money)
    return Choice(wanted.gpu, layout, wanted.format, wanted.cache), said


def _planned(
    asked: Asked, choice: Choice, said: tuple[Notice, ...], known: Calibrations, money: Assumptions
) -> PlanResult:
    d = deploy(asked.model, choice)
    result = make_plan(
        asked.model,
        choice,
        asked.workload,
        targets=asked.targets,
        engine=asked.engine,
        priors=known.priors_for(d),
        assumptions=money,
        image=asked.image,
    )
    fitted = tuple(
        Notice("notice.calibration", {"text": text})
        for text in known.notices_for(d, _a_replica(result), result.workload)
    )
    return replace(result, notices=(*said, *result.notices, *fitted))


def _a_replica(result: PlanResult) -> float | None:
    return None if result.sequences is None else result.sequences / result.choice.layout.replicas


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


def _searched(asked: Asked, space: Space, objective: str, known: Calibrations, money: Assumptions) -> PlanResult:
    model, workload = asked.model, asked.workload
    found = search(model, workload, asked.targets, space, known.priors_for, money, objective=objective)
    if not found.found:
        raise CheckFailed(
            f"none of {found.tried} configurations of {model.name} meets the targets", hint=_miss(found, space.num_gpus)
        )
    best = found.found[0]
    if workload.rate is None and workload.concurrency is None:  # the batch that was found to meet the targets
        batch = max(1, round(best.batch * best.choice.layout.replicas))
        asked = replace(asked, workload=replace(workload, concurrency=batch))
    said = []
    if space.cache is None and best.choice.cache != "bf16":
        said.append(Notice("notice.cache", {"cache": best.choice.cache}))
    if found.unranked:
        said.append(
            Notice(f"notice.unranked_{found.objective}", {"n": len(found.unranked), "gpus": ", ".join(found.unranked)})
        )
    return replace(_planned(asked, best.choice, tuple(said), known, money), search=found)


def _miss(found: SearchResult, num_gpus: int | None) -> str:
    if found.enough is not None:
        return f"{num_gpus} GPUs are too few for this load; the fewest that are enough: {found.enough.choice.name}"
    if found.is_met_once:
        return "single requests meet them, but no number of GPUs that was tried meets them at this load"
    if found.nearest_miss is None:
        return "no configuration holds the model: allow more GPUs or fewer bits"
    choice, factor = found.nearest_miss
    return f"{choice.name} comes closest, and misses by a factor of {factor:.2f}: raise --ttft-ms or --itl-ms"
