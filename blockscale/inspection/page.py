"""An inspection as one HTML page."""

from pathlib import Path

from blockscale.inspection import rows
from blockscale.inspection.inventory import FormatTotal, Inspection, bits_per_parameter
from blockscale.pages import percentage, render_page, write_page

MAX_ROWS = 400  # more make a page that browsers choke on; the JSON has all
NUM_COLOURS = 8


def render_inspection(inspection: Inspection) -> str:
    layers, kept = rows.layer_rows(inspection), rows.kept_rows(inspection)
    return render_page(
        "inspection/inspect.html.j2",
        {"census": rows.census_text, "verdict": rows.verdict_text, "reason": rows.reason_text},
        inspection=inspection,
        origin=rows.origin_text(inspection),
        cache=rows.cache_text(inspection),
        faults=rows.fault_text(inspection),
        shares=shares(inspection),
        layers=layers[:MAX_ROWS],
        num_layer_rows=len(layers),
        kept=kept[:MAX_ROWS],
        num_kept_rows=len(kept),
        bits=bits_per_parameter,
        num_colours=NUM_COLOURS,
    )


def shares(inspection: Inspection) -> list[tuple[FormatTotal, float, float, str]]:
    """Each format with the start and width of its part of a bar of 100, and its share as text."""
    parts, start = [], 0.0
    for total in inspection.by_format:
        share = total.num_bytes / inspection.num_bytes if inspection.num_bytes else 0.0
        parts.append((total, start, 100 * share, percentage(share)))
        start += 100 * share
    return parts


def write_inspection(inspection: Inspection, path: str | Path) -> None:
    """Writes the page; the file appears whole or not at all."""
    write_page(render_inspection(inspection), path)
