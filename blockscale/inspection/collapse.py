"""Rows that differ only in numbers of their names, as one: `layers.{0..31}.mlp.experts.{0..255}.down_proj`."""

import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")
Numbers = tuple[int, ...]

_NUMBER = re.compile(r"(?:(?<=\.)|(?<=^))(0|[1-9]\d{0,8})(?=\.|$)")  # a whole part of a dotted name
_MIN_STEPS = 4  # from here on, `{1..7..2}` is shorter than `{1,3,5,7}`


@dataclass(frozen=True)
class Row(Generic[Item]):
    """`name` stands for all items, in their order."""

    name: str
    items: tuple[Item, ...]


def collapse(
    items: Iterable[Item], name_of: Callable[[Item], str], key_of: Callable[[Item], Hashable]
) -> list[Row[Item]]:
    """Items of equal keys whose names' numbers fill a grid become one row. No row stands for a name that is not there.

    Rows come in the order of their first items.
    """
    position: dict[int, int] = {}
    buckets: dict[tuple[Hashable, ...], dict[Numbers, Item]] = {}
    for i, item in enumerate(items):
        position[id(item)] = i
        parts = _NUMBER.split(name_of(item))  # text, number, text, number, ..., text
        bucket = buckets.setdefault((key_of(item), *parts[::2]), {})
        bucket[tuple(map(int, parts[1::2]))] = item
    rows = []
    for (_, *texts), bucket in buckets.items():
        for grid in _grids(list(bucket)):
            found = [bucket[numbers] for numbers in itertools.product(*grid)]
            found.sort(key=lambda item: position[id(item)])
            name = str(texts[0]) + "".join(f"{braced(n)}{text}" for n, text in zip(grid, texts[1:], strict=True))
            rows.append(Row(name, tuple(found)))
    return sorted(rows, key=lambda row: position[id(row.items[0])])


def _grids(rows: Sequence[Numbers]) -> list[tuple[Numbers, ...]]:
    """Splits a set of tuples into full products of sets of numbers."""
    if not rows[0]:
        return [()]
    by_first: dict[int, list[Numbers]] = {}
    for first, *rest in rows:
        by_first.setdefault(first, []).append(tuple(rest))
    alike: dict[tuple[tuple[Numbers, ...], ...], list[int]] = {}
    for first, rests in by_first.items():
        alike.setdefault(tuple(_grids(rests)), []).append(first)
    return [(tuple(sorted(firsts)), *tail) for tails, firsts in alike.items() for tail in tails]


def braced(numbers: Numbers) -> str:
    """`3`, `{0..31}`, `{1..7..2}` (every second) or `{0,3..5}`; `numbers` ascend."""
    if len(numbers) == 1:
        return str(numbers[0])
    step = numbers[1] - numbers[0]
    if step > 1 and len(numbers) >= _MIN_STEPS and list(numbers) == list(range(numbers[0], numbers[-1] + 1, step)):
        return f"{{{numbers[0]}..{numbers[-1]}..{step}}}"
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    shown = [f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return "{" + ",".join(shown) + "}"
