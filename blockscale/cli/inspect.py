"""Show what a checkpoint holds, and which engines load it.

Prints each fused group with its format, size and scales (repeated layers as one row), what stays in 16 bits and why,
the KV cache, totals, and the engines. Only headers, configs and the scales that stand alone are read.

examples:
  blockscale inspect llama-nvfp4
  blockscale inspect llama-nvfp4 --scales --report contents.html
"""

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockscale.inspection.inventory import Inspection

NAME = "inspect"
HELP = "show what a checkpoint holds, and which engines load it"

_LAYER_TITLES = (
    *("layer", "layers", "format", "input", "shape", "size", "bits"),
    *("global scale", "input scale", "block scales"),
)
_KEPT_TITLES = ("other tensor", "tensors", "format", "shape", "size", "why")
_TOTAL_TITLES = ("format", "tensors", "parameters", "size", "bits", "share")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="CKPT", help="a folder, a .gguf file, a hub id, or demo")
    parser.add_argument("--scales", action="store_true", help="read and count every block scale")
    parser.add_argument("--all", action="store_true", help="a row for every layer and tensor")
    parser.add_argument("--report", metavar="OUT.html", help="write one self-contained page")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> None:
    from blockscale.cli.output import notice, print_json, progress_bar
    from blockscale.inspection.inspect import inspect  # not through api, which imports torch

    with progress_bar() if args.scales else nullcontext() as progress:
        inspection = inspect(args.model, scales=args.scales, report=args.report, progress=progress)
    for message in inspection.notices:
        notice(message)
    if args.json:
        print_json(inspection.to_dict(), one_item_a_line=True)
    else:
        print_inspection(inspection, every=args.all)


def print_inspection(inspection: "Inspection", *, every: bool = False) -> None:
    """`every`: a row for each layer and kept tensor."""
    from blockscale.cli.output import printable
    from blockscale.inspection import rows
    from blockscale.pages import DASH, number, size

    print(printable(f"{inspection.path}: {rows.origin_text(inspection)}"))
    layers = rows.layer_rows(inspection, every=every)
    if layers:
        figures = [
            (
                row.name,
                f"{row.num_layers:,}",
                row.format,
                row.activation,
                row.shape,
                size(row.num_bytes),
                number(row.bits_per_parameter),
                row.global_scale,
                row.input_scale,
                rows.census_text(row.block_scales),
            )
            for row in layers
        ]
        _print_columns([_LAYER_TITLES, *figures])
        if any({row.global_scale, row.input_scale} != {DASH} for row in layers):
            print("scales are shown as multipliers, whichever way the file stores them")
    kept = rows.kept_rows(inspection, every=every)
    if kept:
        cells = [
            (row.name, f"{row.num_tensors:,}", row.format, row.shape, size(row.num_bytes), row.reason) for row in kept
        ]
        _print_columns([_KEPT_TITLES, *cells], num_left=1)
    _print_totals(inspection)
    print(f"\nKV cache: {printable(rows.cache_text(inspection))}\n")
    _print_engines(inspection)
    if inspection.faults:
        print(f"\n{rows.fault_text(inspection)}")


def _print_totals(inspection: "Inspection") -> None:
    from blockscale.inspection.inventory import bits_per_parameter
    from blockscale.pages import count, number, percentage, size

    cells = [
        (
            total.format,
            f"{total.num_tensors:,}",
            count(total.num_parameters),
            size(total.num_bytes),
            number(bits_per_parameter(total.num_bytes, total.num_parameters)),
            percentage(total.num_bytes / inspection.num_bytes if inspection.num_bytes else None),
        )
        for total in inspection.by_format
    ]
    bits = number(inspection.bits_per_parameter)
    whole = ("all", "", count(inspection.num_parameters), size(inspection.num_bytes), bits, "")
    _print_columns([_TOTAL_TITLES, *cells, whole])
    if inspection.quantized_bits_per_parameter is not None:
        print(f"{number(inspection.quantized_bits_per_parameter)} bits a parameter in quantized layers")


def _print_engines(inspection: "Inspection") -> None:
    from blockscale.cli.output import printable
    from blockscale.inspection.rows import reason_text, verdict_text

    for verdict in inspection.engines:
        says = f"{verdict.engine:<13}{verdict_text(verdict):<23}{printable(reason_text(verdict))}"
        print(says.rstrip())
    checked = ", ".join(f"{verdict.engine} {verdict.checked}" for verdict in inspection.engines)
    print(f"as checked with {checked}")


def _print_columns(table: Sequence[Sequence[str]], num_left: int = 0) -> None:
    """A blank line and a table, without columns that say nothing. The last `num_left` columns are aligned left."""
    from blockscale.cli.output import print_table, printable
    from blockscale.pages import DASH

    titles, *cells = ([printable(cell) for cell in row] for row in table)
    shown = [i for i in range(len(titles)) if any(row[i] != DASH for row in cells)]
    print()
    print_table([titles[i] for i in shown], [[row[i] for i in shown] for row in cells], num_left=num_left)
