"""A report as one HTML page."""

import math
from collections.abc import Sequence
from pathlib import Path

from blockscale.evaluation.charts import Bars, bars, layer_points
from blockscale.evaluation.reading import reading
from blockscale.evaluation.result import Interval, LayerError, Report
from blockscale.pages import number, render_page, write_page

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


def decibels(x: float) -> str:
    return "exact" if x == math.inf else "not finite" if not math.isfinite(x) else f"{x:.2f}"


def limits(interval: Interval | None, digits: int = 4, scale: float = 1.0) -> str:
    """`9.8 to 10.4`, or nothing where no interval is known."""
    if interval is None or not (math.isfinite(interval.low) and math.isfinite(interval.high)):
        return ""
    return f"{number(interval.low * scale, digits)} to {number(interval.high * scale, digits)}"


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
    ratios = [(t.name, [("candidate", t.perplexity_ratio)]) for t in report.texts if t.perplexity_ratio is not None]
    divergences = [(t.name, [("candidate", t.kl_mean)]) for t in report.texts if t.kl_mean is not None]
    return render_page(
        "evaluation/report.html.j2",
        {"decibels": decibels, "limits": limits},
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
    write_page(render_report(report), path)
