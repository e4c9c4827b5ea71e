"""The integer program against every pick there is. Needs nothing."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockscale.quantization.search.solve import cheapest, minimise, total

TOLERANCE = 2e-6  # of the largest value: HiGHS' gaps, relative and absolute

entry = st.integers(0, 1000)
row = st.lists(st.tuples(entry, entry), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(table=st.lists(row, min_size=1, max_size=6), share=st.floats(-0.1, 1.1))
def test_nothing_is_better(table: list[list[tuple[int, int]]], share: float) -> None:
    values, costs = ([[pair[i] for pair in row] for row in table] for i in (0, 1))
    least, most = sum(map(min, costs)), sum(map(max, costs))
    limit = least + share * (most - least)
    picks = minimise(values, costs, limit)
    all_picks = product(*(range(len(row)) for row in costs))
    allowed = [total(values, p) for p in all_picks if total(costs, p) <= limit]
    if not allowed:
        assert picks is None
        return
    assert picks is not None
    assert total(costs, picks) <= limit
    assert total(values, picks) <= min(allowed) + TOLERANCE * max(1, max(map(max, values)))


def test_a_limit_that_is_met_exactly() -> None:
    """Sizes of real models: a byte less, and it is another mixture."""
    costs = [[5_000_000_001, 9_000_000_000, 16_000_000_000]] * 4
    values = [[8.0, 1.0, 0.0], [4.0, 1.0, 0.0], [2.0, 0.5, 0.0], [1.0, 0.5, 0.0]]
    limit = 2 * 5_000_000_001 + 2 * 9_000_000_000
    assert minimise(values, costs, limit) == (1, 1, 0, 0)
    assert total(costs, minimise(values, costs, limit - 1) or ()) <= limit - 1
    assert minimise(values, costs, 4 * 5_000_000_001 - 1) is None


def test_the_best_of_each_where_there_is_room() -> None:
    assert minimise([[3, 1, 1]], [[1, 9, 5]], 10) == (2,)
    assert cheapest([[1, 1]], [[2, 1]]) == (1,)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_units_do_not_matter(scale: float) -> None:
    values = [[5 * scale, 1 * scale], [3 * scale, 2 * scale]]
    assert minimise(values, [[1, 2], [1, 2]], 3) == (1, 0)
