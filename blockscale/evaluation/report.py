"""A report as one HTML page that needs nothing else: no script, no font and no picture from anywhere."""

import math
import os
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from blockscale.errors import OutputError
from blockscale.evaluation.charts import Bars, bars, layer_points
from blockscale.evaluation.reading import reading
from blockscale.evaluation.result import Interval, LayerError, Report

MAX_LAYER_ROWS = 400  # more make a page that browsers choke on; the JSON has all
# Marks of the kinds of layer, as SVG paths around (0, 0): told apart without colour too.
MARKS = (
    "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0z",
    "M-3.2 -3.2h6.4v6.4h-6.4z",
    "M0 -4l4 7h-8z",
    "M0 -4.5l4.5 4.5l-4.5 4.5l-4.5 -4.5z",
    "M0 4l4 -7h-8z",
    "M-4 -1.3h2.7v-2.7h2.6v2.7h2.7v2.6h-2.7v2.7h-2.6v-2.7h-2.7z",
    "M-4.5 -2h9v4h-9z",
    "M-2 -4.5h4v9h-4z",
)


def number(x: float | None, digits: int = 4) -> str:
    """`digits` significant ones; a dash for what was not measured."""
    if x is None:
        return "–"
    if not math.isfinite(x):
        return "not finite"
    return f"{x:#.{digits}g}".rstrip(".") if abs(x) < 10**digits else f"{x:,.0f}"


def decibels(x: float) -> str:
    return "exact" if x == math.inf else "not finite" if not math.isfinite(x) else f"{x:.2f}"


def percentage(x: float | None) -> str:
    return "–" if x is None else f"{100 * x:.2f} %" if math.isfinite(x) else "not finite"


def limits(interval: Interval | None, digits: int = 4, scale: float = 1.0) -> str:
    """`9.8 to 10.4`, or nothing where no interval is known."""
    if interval is None or not (math.isfinite(interval.low) and math.isfinite(interval.high)):
        return ""
    return f"{number(interval.low * scale, digits)} to {number(interval.high * scale, digits)}"


def size(num_bytes: int | None) -> str:
    """Decimal units, as disks and model cards have them."""
    if num_bytes is None:
        return "–"
    value, unit = float(num_bytes), "B"
    for bigger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, bigger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"


def shown_layers(layers: Sequence[LayerError]) -> list[LayerError]:
    """All layers in their order, or the worst ones first where a page cannot hold all."""
    if len(layers) <= MAX_LAYER_ROWS:
        return list(layers)
    return sorted(layers, key=lambda layer: layer.sqnr_db)[:MAX_LAYER_ROWS]


def perplexity_bars(report: Report) -> Bars | None:
    groups = []
    for text in report.texts:
        members = [("candidate", text.perplexity)]
        if text.reference_perplexity is not None:
            members.insert(0, ("reference", text.reference_perplexity))
        groups.append((text.name, members))
    return bars(groups, number)


def render_report(report: Report) -> str:
    """The page. Every name in it is escaped, whatever a model or a file is called."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(number=number, decibels=decibels, percentage=percentage, limits=limits, size=size)
    template = resources.files("blockscale.evaluation").joinpath("report.html.j2").read_text(encoding="utf-8")
    ratios = [(t.name, [("candidate", t.perplexity_ratio)]) for t in report.texts if t.perplexity_ratio is not None]
    divergences = [(t.name, [("candidate", t.kl_mean)]) for t in report.texts if t.kl_mean is not None]
    return environment.from_string(template).render(
        report=report,
        reading=reading(report),
        perplexities=perplexity_bars(report),
        ratios=bars(ratios, number, baseline=1.0),
        divergences=bars(divergences, lambda x: number(x, 3)),
        layer_plot=layer_points(report.layers),
        layers=shown_layers(report.layers),
        marks=MARKS,
    )


def write_report(report: Report, path: str | Path) -> None:
    """Writes the page; the file appears whole or not at all."""
    path = Path(path)
    page = render_report(report)
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(page)
        os.chmod(temporary, 0o644)  # mkstemp's own mode would keep others from reading it
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise OutputError(f"cannot write the report {path}: {error.strerror or error}") from error
