"""A text, as calibration and evaluation take it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """`name` is the file's stem, or an own text's or data set's name; `notices`: what was left out of it, and why."""

    name: str
    content: str
    notices: tuple[str, ...] = ()
