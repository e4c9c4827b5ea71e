"""Texts in given shares: `en.txt:0.5 pt.txt:0.5`."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blockscale.errors import UsageError

Source = str | Path | tuple[str | Path, float]


@dataclass(frozen=True)
class Part:
    """A text's name or path, and its share of the tokens (the shares of a mix sum to 1)."""

    source: str | Path
    share: float


def parse_mix(sources: Sequence[Source]) -> tuple[Part, ...]:
    """Texts with their weights made shares. A weight stands behind a string after a colon, or beside it in a tuple; a
    string that is the path of something that exists has none.

    Texts without a weight share equally what the others' weights leave of 1. UsageError for weights that are not
    finite and above 0, and where nothing is left.
    """
    if isinstance(sources, str | Path):
        raise UsageError(f"the texts are given as one name, {sources}", hint="give a list")
    parsed = [_parse(source) for source in sources]
    given = sum(weight for _, weight in parsed if weight is not None)
    if not math.isfinite(given):
        raise UsageError("the weights of the texts are too large to be added", hint="give shares, such as 0.5")
    num_open = sum(weight is None for _, weight in parsed)
    if not num_open:
        return tuple(Part(source, weight / given) for source, weight in parsed if weight is not None)
    rest = 1 - given
    if rest < 1e-9:
        first = next(source for source, weight in parsed if weight is None)
        raise UsageError(
            f"the weights of the other texts sum to {given:g} and leave nothing for {first}",
            hint="give every text a weight, or none",
        )
    return tuple(Part(source, rest / num_open if weight is None else weight) for source, weight in parsed)


def _parse(source: Source) -> tuple[str | Path, float | None]:
    if isinstance(source, tuple):
        if len(source) != 2:
            raise UsageError(f"{source!r} is not a text and its weight", hint="give (path, weight)")
        return source[0], _weight(source[0], source[1])
    head, colon, tail = source.rpartition(":") if isinstance(source, str) else ("", "", "")
    if not (head and colon) or os.path.exists(source):
        return source, None
    try:
        number = float(tail)
    except ValueError:
        return source, None
    return head, _weight(head, number)


def _weight(source: str | Path, weight: object) -> float:
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not (math.isfinite(weight) and weight > 0):  # type: ignore[arg-type, operator]
        raise UsageError(f"the weight of text {source} is {weight}", hint="give a number above 0, such as 0.5")
    return float(weight)  # type: ignore[arg-type]
