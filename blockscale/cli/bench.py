"""Time kernels on this machine, beside torch's own products and other libraries' kernels where they are installed.

Weights are read from memory and not from a cache; on a GPU calls are captured in a CUDA graph; figures are medians.
The share is that of the read bandwidth, which is measured in the same run.

examples:
  blockscale bench kernels --model llama-3.1-8b --m 1 8 64 1024
  blockscale bench kernels --shape 8192,8192 --shape 57344,8192 --json
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockscale.kernels.bench.linear import Row

NAME = "bench"
HELP = "time kernels on this machine, against torch and other libraries"
DEFAULT_MODEL = "llama-3.1-8b"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("kernels",), help="kernels: the linear layers over 4-bit weights")
    parser.add_argument(
        "--shape", action="append", default=[], metavar="N,K", help="outputs and inputs of a linear; may be repeated"
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help=f"a preset, folder or config.json: its layers' shapes (default: {DEFAULT_MODEL})",
    )
    parser.add_argument(
        "--m", type=int, nargs="+", metavar="M", help="rows of activations (GPU: 1 8 16 64 128 1024; CPU: 1 8)"
    )
    parser.add_argument(
        "--format", default="nvfp4", metavar="F", help="of the weights: nvfp4 or mxfp4 (default: nvfp4)"
    )
    parser.add_argument("--device", metavar="D", help="cuda, cuda:1 or cpu (default: the GPU, where there is one)")
    parser.add_argument("--table", metavar="OUT.json", help="keep the times as a table that kernels are chosen by")
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON")


def run(args: argparse.Namespace) -> None:
    from blockscale import api
    from blockscale.cli.output import print_json, progress_bar

    with progress_bar() as progress:
        rows = api.bench_kernels(
            [_shape(text) for text in args.shape],
            model=args.model or (None if args.shape else DEFAULT_MODEL),
            m=args.m,
            format=args.format,
            device=args.device,
            table=None if args.table is None else Path(args.table),
            command=shlex.join(["blockscale", *sys.argv[1:]]),
            progress=progress,
        )
    if args.json:
        print_json([row.to_dict() for row in rows])
    else:
        print_rows(rows)


def _shape(text: str) -> tuple[int, int]:
    from blockscale.errors import UsageError

    try:
        n, k = map(int, text.lower().replace("x", ",").split(","))
    except ValueError:
        raise UsageError(f"--shape {text}: not a shape", hint="outputs and inputs, like 8192,4096") from None
    return n, k


def print_rows(rows: "Sequence[Row]") -> None:
    from blockscale.cli.output import print_table, printable

    headers = ("shape [N,K]", "M", "us", "against 16 bits", "TB/s", "TFLOP/s", "of read", "error", "kernel")
    cells = []
    for row in rows:
        shape, name = f"{row.n}x{row.k}", f"{row.op}: {row.kernel}" + (" *" if row.is_chosen else "")
        if row.us is None:
            cells.append((shape, str(row.m), *["-"] * 6, printable(f"{name}: {row.failure}")))
            continue
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
        figures = (f"{row.tb_per_s:.3f}", f"{row.tflop_per_s:.2f}", f"{row.read_share:.0%}", f"{row.error:.1e}")
        cells.append((shape, str(row.m), f"{row.us:.1f}", ratio, *figures, name))
    print_table(headers, cells, num_left=1)
    print("* what the op takes at that shape")
