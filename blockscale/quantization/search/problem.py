"""A search in numbers: what each option costs, and the picks that answer a budget."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from blockscale.checkpoint.output import layout_bytes
from blockscale.checkpoint.source import Source
from blockscale.errors import UsageError
from blockscale.quantization.pipeline import output_layout
from blockscale.quantization.plan import Plan, kv_modules
from blockscale.quantization.recipe import Recipe
from blockscale.quantization.search.budget import Budget
from blockscale.quantization.search.deployment import Site, find_site
from blockscale.quantization.search.groups import KEPT, KV_GROUP, Group
from blockscale.quantization.search.rules import check_recipe, mixed_recipe
from blockscale.quantization.search.sensitivity import Sensitivity
from blockscale.quantization.search.solve import Table, cheapest, minimise, total

Picks = tuple[int, ...]
_TRIES = 12
_MEASURES = 6
_SLACK_BYTES = 64


@dataclass(frozen=True)
class Problem:
    """Groups to decide about, under a budget. `site` is known where the budget needs a GPU.

    rest_bytes  of the files beside what groups have: kept tensors, and what their headers are short of
    """

    source: Source
    recipe: Recipe
    groups: tuple[Group, ...]
    budget: Budget
    rest_bytes: float
    site: Site | None
    bits: Table = field(repr=False)
    num_bytes: Table = field(repr=False)

    @property
    def num_parameters(self) -> int:
        return sum(group.num_parameters for group in self.groups)

    def average_bits(self, picks: Sequence[int]) -> float:
        return total(self.bits, picks) / self.num_parameters

    def about_bytes(self, picks: Sequence[int]) -> float:
        """Of files and cache, a few bytes of header off."""
        return self.rest_bytes + total(self.num_bytes, picks)

    def chosen(self, picks: Sequence[int]) -> dict[str, str]:
        """Option by group; those that stay as they are, are left out."""
        pairs = ((group.name, group.options[pick].name) for group, pick in zip(self.groups, picks, strict=True))
        return {name: option for name, option in pairs if option != KEPT}

    def mixture(self, picks: Sequence[int]) -> Recipe:
        name = f"mixed-{self.average_bits(picks):.2f}"
        return mixed_recipe(self.source, self.recipe, self.groups, picks, name)

    def exact_bytes(self, picks: Sequence[int]) -> int:
        """Of the weight files that the picks make, and of the cache at the budget's context."""
        mixture = self.mixture(picks)
        plan = check_recipe(self.source, mixture, self.groups, picks)
        cache = sum(g.options[p].num_bytes for g, p in zip(self.groups, picks, strict=True) if g.name == KV_GROUP)
        return _file_bytes(self.source, plan, mixture) + cache

    def is_nothing(self, picks: Sequence[int]) -> bool:
        """Whether every linear stays in 16 bits."""
        return not any(name != KV_GROUP for name in self.chosen(picks))


def make_problem(source: Source, recipe: Recipe, plan: Plan, groups: Sequence[Group], budget: Budget) -> Problem:
    """UsageError for a budget that nothing meets, with what could be met."""
    bits = [[option.bits for option in group.options] for group in groups]
    sizes = [[float(option.num_bytes + option.header_bytes) for option in group.options] for group in groups]
    stored = sum(row[0] for group, row in zip(groups, sizes, strict=True) if group.name != KV_GROUP)
    rest = _file_bytes(source, plan, recipe) - stored
    site = find_site(source, plan, groups, budget) if budget.is_predicted else None
    problem = Problem(source, recipe, tuple(groups), budget, rest, site, bits, sizes)
    least, most = (cheapest(sign, sizes) for sign in (sizes, [[-size for size in row] for row in sizes]))
    figure = _figures(problem)
    if figure is not None and figure(least) > budget.limit:
        raise _infeasible(budget, figure(least), figure(most))
    return problem


def _figures(problem: Problem) -> Callable[[Sequence[int]], float] | None:
    """What picks cost in the budget's own unit; None where only measuring tells."""
    budget = problem.budget
    if budget.max_kl is not None:
        return None
    if budget.bits is not None:
        return problem.average_bits
    if budget.num_bytes is not None:
        return lambda picks: problem.about_bytes(picks) if problem.is_nothing(picks) else problem.exact_bytes(picks)
    site = problem.site
    assert site is not None
    return lambda picks: site.figure(problem.groups, picks)


def _infeasible(budget: Budget, least: float, most: float) -> UsageError:
    if math.isinf(least):
        return UsageError(
            f"{budget.name} {budget.limit:g}: the model does not fit {budget.gpus} x {budget.gpu} in any mixture",
            hint="more --gpus, a shorter --context or less --concurrency",
        )
    top = "what memory holds" if math.isinf(most) else budget.said(most)
    return UsageError(
        f"no mixture has {budget.said(budget.limit)}: the least is {budget.said(least)}",
        hint=f"give {budget.name} from {budget.said(least)} up to {top}",
    )


def solve_budget(
    problem: Problem, scores: Table, sensitivity: Sensitivity, measured: Callable[[Mapping[str, str]], float]
) -> Picks:
    """The picks of least predicted divergence within the budget, or of fewest bytes within a divergence.

    `measured`: the divergence of a choice, asked only where it is the budget. UsageError where nothing can
    be quantized.
    """
    budget = problem.budget
    if budget.bits is not None:
        picks = minimise(scores, problem.bits, budget.bits * problem.num_parameters)
    elif budget.num_bytes is not None:
        picks = _within_bytes(problem, scores, budget.num_bytes)
    elif budget.max_kl is not None:
        picks = _within_kl(problem, scores, sensitivity, measured)
    else:
        picks = _within_prediction(problem, scores)
    assert picks is not None  # the cheapest was found to be within the budget
    if problem.is_nothing(picks):
        if budget.max_kl is not None:
            raise _unreachable(problem, scores, measured)
        raise UsageError(
            f"{budget.name} {budget.said(budget.limit)} leaves room for every linear in 16 bits: nothing to quantize",
            hint="give a smaller budget",
        )
    return picks


def _within_bytes(problem: Problem, scores: Table, limit: int) -> Picks | None:
    """Header lengths are known once offsets are: some slack for them, and what is over is taken off again."""
    room = limit - problem.rest_bytes + _SLACK_BYTES
    for _ in range(_TRIES):
        picks = minimise(scores, problem.num_bytes, room)
        if picks is None:
            break
        size = problem.about_bytes(picks) if problem.is_nothing(picks) else problem.exact_bytes(picks)
        excess = size - limit
        if excess <= 0:
            return picks
        room -= excess
    return cheapest(problem.num_bytes, scores)


def _within_kl(
    problem: Problem, scores: Table, sensitivity: Sensitivity, measured: Callable[[Mapping[str, str]], float]
) -> Picks:
    """Fewest bytes whose predicted divergence is within the limit; where the measured one is not, by bisection."""
    limit = problem.budget.limit
    low, high, aim = 0.0, limit, limit
    best: Picks | None = None
    for _ in range(_MEASURES):
        picks = minimise(problem.num_bytes, scores, sensitivity.score_of(aim))
        is_within = picks is not None and measured(problem.chosen(picks)) <= limit
        if is_within:
            best, low = picks, aim  # more is allowed each time
        else:
            high = aim
        if low == limit:
            break
        aim = (low + high) / 2
    return best or cheapest(scores, problem.num_bytes)  # the most accurate: its caller says whether that is anything


def _unreachable(problem: Problem, scores: Table, measured: Callable[[Mapping[str, str]], float]) -> UsageError:
    """Names what the least and the most that can be quantized would lose."""
    assert problem.budget.max_kl is not None
    whole = cheapest(problem.num_bytes, scores)
    singles = [
        row[i]
        for g, row in zip(problem.groups, scores, strict=True)
        if g.members
        for i in range(len(row))
        if row[i] > 0
    ]
    least = min(singles, default=0.0)
    return UsageError(
        f"--max-kl {problem.budget.max_kl:g}: no linear could be quantized within it",
        hint=f"one group in its mildest format loses about {least:.2g} nats, all in their smallest "
        f"{measured(problem.chosen(whole)):.4g}",
    )


def _within_prediction(problem: Problem, scores: Table) -> Picks | None:
    """See `deployment`: the integer program takes the predictor's differences, and its limit follows the predictor."""
    site, limit = problem.site, problem.budget.limit
    assert site is not None
    costs, base = site.costs(problem.groups)
    low, high = 0.0, sum(max(row) for row in costs)
    best, best_score = None, math.inf
    for attempt in range(_TRIES):
        room = min(max(limit - base, 0.0), high) if attempt == 0 else (low + high) / 2
        picks = minimise(scores, costs, room)
        if picks is not None and site.figure(problem.groups, picks) <= limit:
            if total(scores, picks) < best_score:
                best, best_score = picks, total(scores, picks)
            low = room
        else:
            high = room
        if high - low <= 1e-6 * max(high, 1e-12):
            break
    return best if best is not None else cheapest(costs, scores)


def _file_bytes(source: Source, plan: Plan, recipe: Recipe) -> int:
    return layout_bytes(output_layout(plan, recipe, kv_modules(source) if recipe.kv_cache else ()))
