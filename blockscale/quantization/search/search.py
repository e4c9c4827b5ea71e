"""Search for a mixed recipe: groups, scores, integer program, and a measurement of what came out.

groups --budget possible?--> calibration --> scores of every option --> picks within the budget --> measured --> recipe
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from blockscale.checkpoint.locate import locate
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.checkpoint.source import open_source
from blockscale.checkpoint.target import check_absent
from blockscale.errors import UsageError
from blockscale.host.model import check_device, load_tokenizer
from blockscale.pages import write_page
from blockscale.quantization.calibrate import calibrate
from blockscale.quantization.calibration_data import read_calibration
from blockscale.quantization.layerwise import method as methods
from blockscale.quantization.pipeline import Progress, job_digest
from blockscale.quantization.plan import Plan, PlannedLinear, make_plan
from blockscale.quantization.recipe import KEEP, Recipe, load_recipe, rule_scheme, with_options
from blockscale.quantization.search.budget import Budget
from blockscale.quantization.search.divergence import Measure
from blockscale.quantization.search.front import check_front_path, find_front, write_front
from blockscale.quantization.search.groups import Group, cache_group, find_groups
from blockscale.quantization.search.mixture import Mixture, check_recipe_path
from blockscale.quantization.search.problem import Problem, make_problem, solve_budget
from blockscale.quantization.search.rules import check_recipe
from blockscale.quantization.search.sensitivity import METHODS, Sensitivity, find_sensitivity
from blockscale.quantization.search.solve import total
from blockscale.quantization.search.store import load_scores, save_scores, scores_digest
from blockscale.quantization.search.subject import open_subject
from blockscale.quantization.self_text import add_self_text
from blockscale.texts.mix import Source as TextSource

SCORED_TOKENS, MEASURED_TOKENS = 16_384, 8_192
_MEASURED_SHARE = 4  # every so many windows are held back


def search_recipe(
    model: str | Path,
    recipe: str | Path | Recipe = "nvfp4",
    *,
    budget: Budget,
    calibration: Sequence[TextSource],
    max_calibration_tokens: int | None = None,
    calibration_seed: int = 0,
    keep: Sequence[str] = (),
    kv_cache: str | None = None,
    dialect: str | None = None,
    device: str = "cpu",
    strict: bool = False,
    sensitivity: str = "calibrated",
    scores: str | Path | None = None,
    pareto: str | Path | None = None,
    save_recipe: str | Path | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> Mixture:
    """The mixture of `recipe`'s format, FP8 and 16 bits that loses least within a budget.

    sensitivity   how options are scored: "calibrated" gradients, "gradient" alone, or "kl", a measurement each
    scores        a .json file where scores are kept: another budget for the same job then finds them there
    pareto        an .svg or .html file, for the best mixtures of every size
    save_recipe   a .yaml file, for what was found
    out           the folder that will be written by it: an error now, and not after the long work, if it is there

    The model runs in 16 bits, all of it in memory where there is room, else a layer at a time. UsageError for a budget
    that nothing meets, with what could be met; other BlockscaleErrors as `quantize` has them.
    """
    if sensitivity not in METHODS:
        raise UsageError(f"unknown sensitivity '{sensitivity}'", hint=", ".join(METHODS))
    if not calibration:
        raise UsageError("a search needs calibration text", hint="add --calibration FILE, or --calibration self")
    check_device(device)
    if out is not None:
        check_absent(Path(out))
    if pareto is not None:
        check_front_path(pareto)
    if save_recipe is not None:
        check_recipe_path(save_recipe)
    chosen = with_options(load_recipe(recipe), tuple(keep), kv_cache, dialect)
    path = locate(model)
    source = open_source(path)
    plan = make_plan(source, chosen, strict=strict)
    cache = cache_group(source, chosen, budget.context)
    groups = (*find_groups(source, chosen, plan), *((cache,) if cache else ()))
    problem = make_problem(source, chosen, plan, groups, budget)
    tokenizer = load_tokenizer(path)
    data = read_calibration(calibration, tokenizer, source.config, max_calibration_tokens, calibration_seed, device)
    data = add_self_text(data, path, device=device, progress=progress)
    scored, measured = split_windows(data.windows)
    digest = scores_digest(job_digest(source, chosen, data.digest, device), groups, sensitivity)
    known = None if scores is None else load_scores(Path(scores), digest, groups)
    statistics = calibrate(
        open_checkpoint(path),
        data,
        _calibrated(plan, groups),
        with_kv=cache is not None,
        device=device,
        progress=progress,
    )
    subject = open_subject(path, plan, groups, statistics, data.windows, device)
    measure = Measure(subject, measured)
    found = known or find_sensitivity(subject, groups, scored, measure, sensitivity, progress)
    if known is None and scores is not None:
        save_scores(Path(scores), digest, found)
    notices = (*data.notices, *plan.notices, *statistics.notices, *_method_notice(chosen))
    mixture = _answer(problem, found, measure, notices)
    if save_recipe is not None:
        write_page(mixture.recipe.to_yaml(), save_recipe)
    if pareto is not None:
        write_front(mixture.front, pareto, path.name)
    return mixture


def _answer(problem: Problem, found: Sensitivity, measure: Measure, notices: tuple[str, ...]) -> Mixture:
    groups = problem.groups
    table = found.table(groups)
    picks = solve_budget(problem, table, found, measure.kl)
    mixture = problem.mixture(picks)
    check_recipe(problem.source, mixture, groups, picks)
    kl, size, bits = measure.kl(problem.chosen(picks)), problem.exact_bytes(picks), problem.average_bits(picks)
    figure = {"--bits": bits, "--bytes": float(size), "--max-kl": kl}.get(problem.budget.name)
    if figure is None:
        assert problem.site is not None
        figure = problem.site.figure(groups, picks)
    return Mixture(
        recipe=mixture,
        budget=problem.budget,
        formats={group.name: group.options[pick].name for group, pick in zip(groups, picks, strict=True)},
        bits=bits,
        num_bytes=size,
        figure=figure,
        predicted_kl=found.predicted(total(table, picks)),
        measured_kl=kl,
        sensitivity=found,
        front=find_front(problem, found, picks),
        notices=notices,
    )


def _method_notice(recipe: Recipe) -> tuple[str, ...]:
    if recipe.method is None:
        return ()
    gains = (
        f"scores and the measured divergence are those of rounding by scale '{recipe.scale}': what method "
        f"'{recipe.method}' gains comes on top"
    )
    method = methods.METHODS[recipe.method]
    if not (method.residual_channels or method.rank):
        return (gains,)
    return gains, f"what method '{recipe.method}' puts beside weights is counted in no budget of bits or bytes"


def split_windows(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Of [W, T]: those for gradients, and those held back to measure on. UsageError if there is one alone."""
    count, length = windows.shape
    if count < 2:
        raise UsageError(
            f"the calibration text has one window of {length} tokens, and a search holds some back",
            hint="give more text",
        )
    held = list(range(_MEASURED_SHARE // 2, count, _MEASURED_SHARE)) or [count - 1]
    rest = [i for i in range(count) if i not in set(held)]
    return windows[_thinned(rest, SCORED_TOKENS // length)], windows[_thinned(held, MEASURED_TOKENS // length)]


def _thinned(places: list[int], most: int) -> list[int]:
    """At most so many, evenly spaced, one at least."""
    count = min(len(places), max(1, most))
    return [places[i * len(places) // count] for i in range(count)]


def _calibrated(plan: Plan, groups: Sequence[Group]) -> Mapping[str, PlannedLinear]:
    """The linears as they are stored in an option that needs an input's scale, if there is one."""
    linears = dict(plan.linears)
    for group in groups:
        schemes = [rule_scheme(o.rule) for o in group.options if o.rule is not None and o.rule.weight != KEEP]
        scheme = next((scheme for scheme in schemes if scheme.needs_input_scale), None)
        if scheme is not None:
            linears |= {member: replace(plan.linears[member], scheme=scheme) for member in group.members}
    return linears
