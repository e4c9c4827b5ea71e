"""Geometry of the report's plots: numbers in, coordinates out. The template draws them as inline SVG.

All coordinates are in the plot's own units (the SVG viewBox); text sizes are the template's. What is not finite is
left out of a plot, since the tables beside it say so.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blockscale.evaluation.result import Interval, LayerError

WIDTH, LEFT, RIGHT = 720.0, 170.0, 90.0  # the plot, its labels, and the figures behind the bars
ROW, GAP, TOP, BOTTOM = 18.0, 12.0, 8.0, 30.0
LABEL_CHARS = 24
MAX_KINDS = 8  # distinct colours and shapes; further kinds of layer share the last


@dataclass(frozen=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True)
class Row:
    """One figure: a bar from `start`, the baseline, to `end`, or a dot at `end`, with whiskers for an interval."""

    series: str  # "candidate" or "reference"
    y: float
    start: float
    end: float
    low: float | None
    high: float | None
    text: str


@dataclass(frozen=True)
class Bars:
    height: float
    ticks: tuple[Tick, ...]
    labels: tuple[tuple[float, str, str], ...]  # y, shortened, full
    rows: tuple[Row, ...]
    baseline: float
    width: float = WIDTH
    left: float = LEFT


@dataclass(frozen=True)
class Point:
    """One kind of layer in one block: its mean, and the range over experts or other siblings."""

    kind: int
    x: float
    y: float
    low: float
    high: float
    text: str


@dataclass(frozen=True)
class Points:
    height: float
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    kinds: tuple[str, ...]
    points: tuple[Point, ...]
    width: float = WIDTH
    left: float = 48.0


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that cover [low, high], the outer ones included."""
    span = high - low or abs(high) or 1.0
    magnitude = 10.0 ** math.floor(math.log10(span / count))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if span / (m * magnitude) <= count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def shorten(text: str, limit: int = LABEL_CHARS) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def bars(
    groups: Sequence[tuple[str, Sequence[tuple[str, Interval]]]],
    figure: Callable[[float], str],
    baseline: float = 0.0,
) -> Bars | None:
    """Horizontal rows, a group a text. `groups`: (label, [(series, interval)]). None if there is nothing to draw."""
    finite = [
        (label, [(series, interval) for series, interval in members if math.isfinite(interval.value)])
        for label, members in groups
    ]
    finite = [(label, members) for label, members in finite if members]
    if not finite:
        return None
    ends = [x for _, members in finite for _, i in members for x in (i.value, i.low, i.high) if math.isfinite(x)]
    values = nice_ticks(min([baseline, *ends]), max([baseline, *ends]))
    scale = (WIDTH - LEFT - RIGHT) / (values[-1] - values[0])

    def at(x: float) -> float:
        return round(LEFT + (x - values[0]) * scale, 2)

    y = TOP
    labels, rows = [], []
    for label, members in finite:
        labels.append((y + ROW * len(members) / 2, shorten(label), label))
        for series, interval in members:
            has_range = math.isfinite(interval.low) and math.isfinite(interval.high)
            low, high = (at(interval.low), at(interval.high)) if has_range else (None, None)
            rows.append(Row(series, y, at(baseline), at(interval.value), low, high, figure(interval.value)))
            y += ROW
        y += GAP
    ticks = tuple(Tick(at(x), f"{x:.6g}") for x in values)
    return Bars(y + BOTTOM, ticks, tuple(labels), tuple(rows), at(baseline))


def block_of(name: str) -> int | None:
    """The first number in a layer's dotted name: 12 in `model.layers.12.mlp.up_proj`."""
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(match[1]) if match else None


def kind_of(name: str) -> str:
    """The last part of a layer's name that is neither a number nor `weight`."""
    parts = [part for part in name.split(".") if part != "weight" and not part.isdigit()]
    return parts[-1] if parts else name


def layer_points(layers: Sequence[LayerError]) -> Points | None:
    """SQNR against the block's number, a mark for each kind of layer. None if no layer has a finite one."""
    found: dict[tuple[int | None, str], list[float]] = defaultdict(list)
    for layer in layers:
        if math.isfinite(layer.sqnr_db):
            found[block_of(layer.name), kind_of(layer.name)].append(layer.sqnr_db)
    if not found:
        return None
    names = list(dict.fromkeys(kind for _, kind in found))
    kinds = names if len(names) <= MAX_KINDS else [*names[: MAX_KINDS - 1], "other"]
    blocks = [block for block, _ in found if block is not None]
    last = max(blocks, default=-1)
    outside = last + 1  # where layers outside the blocks (lm_head, say) stand
    has_outside = any(block is None for block, _ in found)
    decibels = [x for values in found.values() for x in values]
    y_values = nice_ticks(min(decibels), max(decibels))
    left, height, right = 48.0, 320.0, 12.0
    x_scale = (WIDTH - left - right - 20) / max(1, outside if has_outside else last)
    y_scale = (height - TOP - BOTTOM) / (y_values[-1] - y_values[0])

    def x_at(block: float) -> float:
        return round(left + 10 + block * x_scale, 2)

    def y_at(db: float) -> float:
        return round(height - BOTTOM - (db - y_values[0]) * y_scale, 2)

    points = []
    for (block, kind), values in found.items():
        place = "" if block is None else f" in block {block}"
        many = f", {len(values)} layers, {min(values):.1f} to {max(values):.1f}" if len(values) > 1 else ""
        mean = sum(values) / len(values)
        points.append(
            Point(
                kinds.index(kind) if kind in kinds else len(kinds) - 1,
                x_at(outside if block is None else block),
                y_at(mean),
                y_at(min(values)),
                y_at(max(values)),
                f"{kind}{place}: {mean:.1f} dB{many}",
            )
        )
    x_ticks = [Tick(x_at(x), f"{x:g}") for x in nice_ticks(0, max(last, 1), 8) if x <= last and x == int(x)]
    if has_outside:
        x_ticks = [tick for tick in x_ticks if tick.at < x_at(outside) - 30] + [Tick(x_at(outside), "outside")]
    y_ticks = tuple(Tick(y_at(y), f"{y:g}") for y in y_values)
    return Points(height, tuple(x_ticks), y_ticks, tuple(kinds), tuple(points), left=left)
