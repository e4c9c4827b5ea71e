"""Repeated names as one row, which stands for them and for no other."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockscale.inspection.collapse import braced, collapse


def names_of(pattern: str) -> set[str]:
    """Every name that a row stands for, read back from what is shown."""
    parts = re.split(r"(\{[^}]*\})", pattern)
    choices = [numbers_of(part) if part.startswith("{") else [part] for part in parts]
    return {"".join(choice) for choice in itertools.product(*choices)}


def numbers_of(braces: str) -> list[str]:
    found: list[int] = []
    for part in braces[1:-1].split(","):
        first, *rest = (int(n) for n in part.split(".."))
        last, step = (rest[0] if rest else first), (rest[1] if len(rest) > 1 else 1)
        found += range(first, last + 1, step)
    return [str(n) for n in found]


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        ((3,), "3"),
        ((0, 1), "{0,1}"),
        ((0, 1, 2), "{0..2}"),
        ((1, 3, 5, 7), "{1..7..2}"),
        ((1, 3, 5), "{1,3,5}"),
        ((0, 1, 2, 5, 7, 8), "{0..2,5,7,8}"),
        (tuple(range(61)), "{0..60}"),
    ],
)
def test_numbers_in_braces(numbers: tuple[int, ...], shown: str) -> None:
    assert braced(numbers) == shown


def collapsed(names: list[str], key: str = "") -> list[str]:
    return [row.name for row in collapse(names, lambda name: name, lambda name: key and key in name)]


def test_layers_and_experts() -> None:
    names = [f"model.layers.{i}.mlp.experts.{e}.up_proj" for i in range(3, 6) for e in range(4)]
    assert collapsed(names) == ["model.layers.{3..5}.mlp.experts.{0..3}.up_proj"]


def test_a_missing_expert_is_not_claimed() -> None:
    names = [f"layers.{i}.experts.{e}.w1" for i in range(3) for e in range(4) if (i, e) != (1, 2)]
    assert collapsed(names) == ["layers.{0,2}.experts.{0..3}.w1", "layers.1.experts.{0,1,3}.w1"]


def test_what_differs_stays_apart_and_in_order() -> None:
    names = ["head", "layers.0.odd", "layers.0.up", "layers.1.up", "layers.1.odd", "layers.2.up"]
    assert collapsed(names, "odd") == ["head", "layers.{0,1}.odd", "layers.{0..2}.up"]


@pytest.mark.parametrize("name", ["a.007.b", "a7.b", "a.7b.c", "7", "", "a..b", "{0..3}.a", "a.99999999999.b"])
def test_numbers_are_whole_parts_of_names(name: str) -> None:
    assert collapsed([name]) == [name]


PART = st.sampled_from(["a", "b", "0", "1", "2", "3", "7", "07", "x1"])


@given(st.lists(st.lists(PART, min_size=1, max_size=4).map(".".join), unique=True, min_size=1, max_size=60))
def test_rows_stand_for_every_name_once(names: list[str]) -> None:
    rows = collapse(names, lambda name: name, lambda name: None)
    assert sorted(name for row in rows for name in row.items) == sorted(names)
    assert all(names_of(row.name) == set(row.items) for row in rows)
    assert [row.items[0] for row in rows] == sorted((row.items[0] for row in rows), key=names.index)
