"""Geometry of a plan's plots: numbers in, coordinates out. The template draws them as inline SVG.

All coordinates are in the plot's own units (the SVG viewBox).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 720.0, 76.0, 24.0, 12.0, 46.0
HEIGHT = 340.0
BAR, GAP = 26.0, 24.0
MAX_COLOURS = 8


@dataclass(frozen=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True)
class Mark:
    """A point with its interval in y, and what is said of it; in the figures' own units until it is placed."""

    x: float
    y: float
    low: float
    high: float
    text: str
    is_marked: bool = False


@dataclass(frozen=True)
class Line:
    """Points of one configuration. `path` joins them; `band` is the area of their intervals."""

    name: str
    marks: tuple[Mark, ...]
    path: str
    band: str


@dataclass(frozen=True)
class Plot:
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    width: float = WIDTH
    height: float = HEIGHT
    left: float = LEFT
    right: float = WIDTH - RIGHT
    bottom: float = HEIGHT - BOTTOM


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... that cover [low, high], the outer ones included."""
    first, last = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1
    steps = [m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 5)]
    start = max(i for i, step in enumerate(steps) if step <= low * (1 + 1e-9))
    end = min(i for i, step in enumerate(steps) if step >= high * (1 - 1e-9))
    return steps[start : max(end, start + 1) + 1]


def log_plot(series: Sequence[tuple[str, Sequence[Mark]]], figure: Callable[[float], str]) -> Plot | None:
    """Both axes logarithmic. None if there is no positive point to draw."""
    data = [d for _, points in series for d in points]
    if not data or min(min(d.x, d.low) for d in data) <= 0:
        return None
    xs = log_ticks(min(d.x for d in data), max(d.x for d in data))
    ys = log_ticks(min(d.low for d in data), max(d.high for d in data))

    def x_at(x: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * math.log(x / xs[0]) / math.log(xs[-1] / xs[0]), 1)

    def y_at(y: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(y / ys[0]) / math.log(ys[-1] / ys[0]), 1)

    lines = []
    for name, points in series:
        marks = tuple(Mark(x_at(d.x), y_at(d.y), y_at(d.low), y_at(d.high), d.text, d.is_marked) for d in points)
        path = "M" + "L".join(f"{m.x} {m.y}" for m in marks)
        band = "M" + "L".join([f"{m.x} {m.high}" for m in marks] + [f"{m.x} {m.low}" for m in reversed(marks)]) + "z"
        lines.append(Line(name, marks, path, band))
    x_ticks = tuple(Tick(x_at(x), figure(x)) for x in xs)
    y_ticks = tuple(Tick(y_at(y), figure(y)) for y in ys)
    return Plot(tuple(lines), x_ticks, y_ticks)


@dataclass(frozen=True)
class Piece:
    """`kind`: its colour, by its place among all names."""

    name: str
    kind: int
    x: float
    width: float
    text: str


@dataclass(frozen=True)
class Stack:
    """One bar. `total`: what stands behind it."""

    label: str
    y: float
    pieces: tuple[Piece, ...]
    end: float
    total: str


@dataclass(frozen=True)
class Stacks:
    """`kinds`: name and colour of every piece. `limits`: x of a line across each bar, if there is one."""

    stacks: tuple[Stack, ...]
    kinds: tuple[tuple[str, int], ...]
    height: float
    limits: tuple[float | None, ...]
    width: float = WIDTH
    bar: float = BAR


def stacks(
    bars: Sequence[tuple[str, Sequence[tuple[str, float]], float | None]],
    figure: Callable[[float], str],
    grey: str = "",
) -> Stacks | None:
    """Horizontal stacked bars: (label, [(name, size)], where a limit stands). None if there is nothing to draw.

    grey  the name of a piece that matters less
    """
    names = tuple(dict.fromkeys(name for _, pieces, _ in bars for name, size in pieces if size > 0))
    longest = max((max(sum(size for _, size in pieces), limit or 0.0) for _, pieces, limit in bars), default=0.0)
    if not names or not 0 < longest < math.inf:
        return None
    kinds = {name: MAX_COLOURS - 1 if name == grey else min(i, MAX_COLOURS - 1) for i, name in enumerate(names)}
    room = WIDTH - 110.0  # the figures stand behind the bars
    drawn, limits, y = [], [], 22.0
    for label, pieces, limit in bars:
        x, own = 0.0, []
        for name, size in pieces:
            if size > 0:
                width = room * size / longest
                kind = kinds[name]
                own.append(Piece(name, kind, round(x, 1), round(width, 1), f"{name}: {figure(size)}"))
                x += width
        drawn.append(Stack(label, y, tuple(own), round(x, 1), figure(sum(size for _, size in pieces))))
        limits.append(None if limit is None else round(room * limit / longest, 1))
        y += BAR + GAP
    return Stacks(tuple(drawn), tuple(kinds.items()), y, tuple(limits))
