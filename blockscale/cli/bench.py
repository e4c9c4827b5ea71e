"""Time kernels, or the engine, on this machine.

kernels: linear layers over 4-bit weights, beside torch's own products and other libraries' kernels where they are
installed. Weights are read from memory and not from a cache; on a GPU calls are captured in a CUDA graph; figures are
medians. engine: a checkpoint, or an architecture with random weights, one request at a time or under load.
Shares are those of the read bandwidth, which is measured in the same run.

examples:
  blockscale bench kernels --model llama-3.1-8b --m 1 8 64 1024
  blockscale bench kernels --shape 8192,8192 --shape 57344,8192 --json
  blockscale bench engine model-nvfp4 --concurrency 1 16 64
  blockscale bench engine --random llama-3.1-8b --kv-cache fp8 --rate 4 --json
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockscale.engine.bench.figures import Row as EngineRow
    from blockscale.kernels.bench.linear import Row

NAME = "bench"
HELP = "time kernels or the engine on this machine"
DEFAULT_MODEL = "llama-3.1-8b"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    _add_kernels(what.add_parser("kernels", help="the linear layers over 4-bit weights"))
    _add_engine(what.add_parser("engine", help="whole requests: first token, gaps, tokens a second, energy"))


def _add_kernels(parser: argparse.ArgumentParser) -> None:
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


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="CKPT", nargs="?", help="a checkpoint of any dialect, or a 16-bit model")
    parser.add_argument(
        "--random",
        metavar="NAME",
        help="instead: random weights in the shape of llama-3.1-8b, llama-3.1-70b, qwen3-30b-a3b or tiny",
    )
    parser.add_argument("--format", metavar="F", help="of random weights: nvfp4 (default) or bf16")
    parser.add_argument("--kv-cache", default="bf16", metavar="F", help="bf16 (default), fp8 or nvfp4")
    parser.add_argument("--input", type=int, default=1024, metavar="N", help="tokens of a prompt (1024)")
    parser.add_argument("--output", type=int, default=128, metavar="N", help="tokens of an output (128)")
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[], metavar="N", help="so many requests at once (1)"
    )
    parser.add_argument("--rate", type=float, nargs="+", default=[], metavar="R", help="requests a second, by chance")
    parser.add_argument("--requests", type=int, metavar="N", help="of each load (two for each at once, at least 4)")
    parser.add_argument("--num-draft", type=int, default=0, metavar="N", help="tokens proposed from the text (0)")
    parser.add_argument("--device", metavar="D", help="cuda, cuda:1 or cpu (default: the GPU, where there is one)")
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="GPUs that the model is divided among (1)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of prompts and arrivals (0)")
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON")


def run(args: argparse.Namespace) -> None:
    if args.what == "engine":
        _run_engine(args)
    else:
        _run_kernels(args)


def _run_kernels(args: argparse.Namespace) -> None:
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


def _run_engine(args: argparse.Namespace) -> None:
    from blockscale import api
    from blockscale.cli.output import print_json, progress_bar, quiet_libraries
    from blockscale.errors import UsageError

    if args.format and not args.random:
        raise UsageError("--format is for random weights", hint="a checkpoint is timed as it is stored")
    quiet_libraries()
    with progress_bar() as progress:
        rows = api.bench_engine(
            args.model,
            random=args.random,
            weights=args.format or "nvfp4",
            kv_cache=args.kv_cache,
            input_tokens=args.input,
            output_tokens=args.output,
            concurrency=args.concurrency or ([] if args.rate else [1]),
            rates=args.rate,
            num_requests=args.requests,
            num_draft=args.num_draft,
            device=args.device,
            tensor_parallel=args.tensor_parallel,
            seed=args.seed,
            progress=progress,
        )
    if args.json:
        print_json([row.to_dict() for row in rows])
    else:
        print_engine_rows(rows)


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


def print_engine_rows(rows: "Sequence[EngineRow]") -> None:
    from blockscale.cli.output import print_table, printable

    first = rows[0]
    model = f"{first.model}: {first.weights} weights, {first.kv_cache} cache, on {first.device}"
    print(printable(f"{model}; {first.input_tokens} tokens in, {first.output_tokens} out"))
    headers = (
        "load",
        "requests",
        "TTFT ms",
        "p99",
        "ITL ms",
        "p99",
        "tokens/s",
        "step ms",
        "GB/s",
        "of read",
        "J/token",
    )
    cells = []
    for row in rows:
        failed = f" ({row.num_failed} failed)" if row.num_failed else ""
        itl = ("-", "-") if row.itl_ms is None else (f"{row.itl_ms.p50:.2f}", f"{row.itl_ms.p99:.2f}")
        cells.append(
            (
                row.load,
                f"{row.num_requests}{failed}",
                f"{row.ttft_ms.p50:.1f}",
                f"{row.ttft_ms.p99:.1f}",
                *itl,
                f"{row.tokens_per_s:.1f}",
                "-" if row.step_ms is None else f"{row.step_ms:.2f}",
                "-" if row.gb_per_s is None else f"{row.gb_per_s:.1f}",
                "-" if row.read_share is None else f"{row.read_share:.0%}",
                "-" if row.joules_per_token is None else f"{row.joules_per_token:.3f}",
            )
        )
    print_table(headers, cells)
