"""The integer program: one option for each group, the least sum of values under a limit on the sum of costs.

    min sum v[g, o] x[g, o]   subject to   sum c[g, o] x[g, o] <= limit,   sum over o of x[g, o] = 1,   x binary

A multiple-choice knapsack, solved by HiGHS through scipy's `milp`.
"""

import math
from collections.abc import Sequence

import numpy as np

from blockscale.errors import RecipeError

Table = Sequence[Sequence[float]]  # a row of options for each group

_GAP = 1e-6  # how far from the optimum an answer may be proven to lie, as a share of it
_SECONDS = 30.0
_TRIES = 6


def total(table: Table, picks: Sequence[int]) -> float:
    """The sum of what is picked, without rounding on the way."""
    return math.fsum(row[pick] for row, pick in zip(table, picks, strict=True))


def cheapest(costs: Table, values: Table) -> tuple[int, ...]:
    """The option of least cost in each group; of equals, the one of least value."""
    pairs = (list(zip(c, v, strict=True)) for c, v in zip(costs, values, strict=True))
    return tuple(min(range(len(row)), key=row.__getitem__) for row in pairs)


def minimise(values: Table, costs: Table, limit: float) -> tuple[int, ...] | None:
    """The pick of each group; None where even the cheapest costs more than `limit`.

    The limit holds exactly, whatever the solver's tolerance is. RecipeError if the solver finds nothing in its time.
    """
    least = cheapest(costs, values)
    if total(costs, least) > limit:
        return None
    free = cheapest(values, costs)
    if total(costs, free) <= limit:
        return free
    bound = limit
    for _ in range(_TRIES):
        picks = _solve(values, costs, bound)
        excess = total(costs, picks) - limit
        if excess <= 0:
            return picks
        bound -= 2 * excess  # tolerances are relative: a few bytes of many
    return least


def _solve(values: Table, costs: Table, limit: float) -> tuple[int, ...]:
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    sizes = [len(row) for row in costs]
    owner = np.repeat(np.arange(len(sizes)), sizes)  # [options] the group of each
    # each group's least is a constant, and what is left is brought near 1
    value, _ = _above_least(values)
    cost, base = _above_least(costs)
    scale = max(cost.max(), 1e-300)
    ones = csr_array((np.ones(len(owner)), (owner, np.arange(len(owner)))), shape=(len(sizes), len(owner)))
    found = milp(
        value / max(value.max(), 1e-300),
        integrality=np.ones(len(owner)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(ones, 1, 1),
            LinearConstraint(csr_array((cost / scale)[None, :]), -np.inf, (limit - base) / scale),
        ],
        options={"mip_rel_gap": _GAP, "time_limit": _SECONDS},
    )
    if found.x is None:
        raise RecipeError(f"the solver found no mixture: {found.message}", hint="try another budget")
    picks, start = [], 0
    for size in sizes:
        picks.append(int(np.argmax(found.x[start : start + size])))
        start += size
    return tuple(picks)


def _above_least(table: Table) -> tuple[np.ndarray, float]:
    """Every entry less its row's least, in one row, and the sum of those leasts."""
    least = [min(row) for row in table]
    flat = np.array([entry - low for row, low in zip(table, least, strict=True) for entry in row], dtype=np.float64)
    return flat, math.fsum(least)
