"""`plan`, the verb. Lies here and not in `api`, which needs torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from blockscale.errors import CheckFailed, UsageError
from blockscale.planning.answer.choice import (
    Choice,
    check_cache,
    check_engine,
    check_format,
    deploy,
    parse_choice,
    resolve_layout,
    weights_in,
)
from blockscale.planning.answer.language import language as words
from blockscale.planning.answer.plan import Targets, check_workload, make_plan
from blockscale.planning.answer.result import Notice, PlanResult, SearchResult
from blockscale.planning.answer.search import Space, search
from blockscale.planning.calibration.calibrations import Calibrations
from blockscale.planning.hardware.catalogue import Gpu, buyable, find_gpu
from blockscale.planning.hardware.machine import catalogue_entry, this_machine
from blockscale.planning.hardware.power_limit import with_power_limit
from blockscale.planning.models.model import Model, find_model
from blockscale.planning.money.assumptions import Assumptions, limited, load_assumptions
from blockscale.planning.speed.diffusion import STEPS, ImageRequest, parse_resolution
from blockscale.planning.speed.layout import Layout, parse_layout
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
    kv_cache     bf16, fp8 or nvfp4; None: bf16
    layout       tp8, tp4pp2, tep8, dep8, tp2dp4 ...
    engine       and `engine_version`: which calibration holds; without one, predictions are the same for every engine
    concurrency  requests in flight, or `rate`: requests a second; neither: as many as fit
    ttft_ms      a target, as `itl_ms`; without `gpu` or `layout`, what meets them is searched for
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
    workload, targets = Workload(input, output, concurrency, rate), Targets(ttft_ms, itl_ms)
    asked = Asked(found, workload, targets, engine, _image(found, steps, resolution))
    check_workload(found, asked.workload)
    if format is not None:
        check_format(format)
    cache = check_cache(kv_cache or "bf16")
    if engine is not None:
        check_engine(engine)
    money = limited(load_assumptions(assumptions, country), power_limit)
    own = find_gpu(gpu) if gpu is not None else None if asked.targets.are_set else _own_gpu()
    own = None if own is None else _at_limit(own, money)
    is_search = asked.targets.are_set and (layout is None or own is None)
    choice = None
    if own is not None and not (is_search and not calibrate):
        fmt = format or found.stored_format
        choice = Choice(own, _layout(found, own, layout, gpus, fmt), fmt, cache)
    if calibrate and choice is None:
        raise UsageError("--calibrate needs to know the GPU of the runs", hint="give --gpu")
    known = Calibrations(engine, engine_version, None if calibration_file is None else Path(calibration_file))
    if calibrate and choice is not None:
        known.add(calibrate, deploy(found, choice))
    if is_search:
        space = Space(
            gpus=tuple(_at_limit(one, money) for one in buyable()) if own is None else (own,),
            num_gpus=gpus,
            formats=() if format is None else (format,),
            cache=cache,
            layouts=() if layout is None else (parse_layout(layout),),
        )
        result = _searched(asked, space, objective, known, money)
    else:
        assert choice is not None
        result = _planned(asked, choice, known, money)
    others = [parse_choice(text, found, result.choice) for text in compare]
    others = [replace(other, gpu=_at_limit(other.gpu, money)) for other in others]
    result = replace(result, compared=tuple(_planned(asked, other, known, money) for other in others))
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
    return with_power_limit(gpu, money.gpu_power_limit_watts, money.gpu_idle_share)


def _layout(model: Model, gpu: Gpu, layout: str | None, gpus: int | None, fmt: str) -> Layout:
    return resolve_layout(model.architecture, gpu, layout, gpus, weights_in(model, fmt).num_bytes)


def _planned(asked: Asked, choice: Choice, known: Calibrations, money: Assumptions) -> PlanResult:
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
    said = tuple(Notice("notice.calibration", {"text": text}) for text in known.notices_for(d))
    return replace(result, notices=(*result.notices, *said))


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
        raise CheckFailed(f"none of {found.tried} configurations of {model.name} meets the targets", hint=_miss(found))
    best = found.found[0]
    if workload.rate is None and workload.concurrency is None:  # the batch that was found to meet the targets
        batch = max(1, round(best.batch * best.choice.layout.replicas))
        asked = replace(asked, workload=replace(workload, concurrency=batch))
    return replace(_planned(asked, best.choice, known, money), search=found)


def _miss(found: SearchResult) -> str:
    if found.nearest_miss is None:
        return "no configuration holds the model: allow more GPUs or fewer bits"
    choice, factor = found.nearest_miss
    if factor <= 1:
        return f"{choice.name} meets them for one request, but not at this load"
    return f"{choice.name} comes closest, and misses by a factor of {factor:.2f}: raise --ttft-ms or --itl-ms"
