"""How fast activations, weights and KV caches are quantized, against a plain copy timed in the same run.

    python benchmarks/kernels_quantize.py [--rows 8192] [--columns 8192] [--only TEXT] [--record]

Each kernel runs in a CUDA graph over tensors that together exceed the L2 cache several times; medians of 12 replays.
The share is bytes read and written a second (codes and scales are 0.5625 bytes an element) over those of `copy_` of
the same bf16 tensors. `--record` writes results/kernels_quantize.json.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from record import record
from torch import Tensor

from blockscale.kernels.paged_cache import KVFormat, allocate
from blockscale.kernels.triton.hadamard_quantize import hadamard_quantize
from blockscale.kernels.triton.kv_quantize import quantize_kv
from blockscale.kernels.triton.norm_quantize import rms_norm_quantize
from blockscale.kernels.triton.quantize import quantize, quantize_dynamic
from blockscale.kernels.triton.silu_quantize import Gate, silu_mul_quantize
from blockscale.kernels.triton.weight_sweep import quantize_weight_sweep

NVFP4_BYTES = 0.5625  # an element, with its share of the block scale
NUM_COPIES = 4  # of each operand, so that none stays in the L2 cache
SMALL_ROWS, SMALL_COLUMNS = (1, 16, 256), 4096


@dataclass(frozen=True)
class Row:
    """`bytes_moved` in one call; `share` of the copy's bytes a second."""

    name: str
    microseconds: float
    bytes_moved: float
    share: float


def microseconds(calls: list[Callable[[], object]], repeats: int = 3, replays: int = 12) -> float:
    """Of one call, in a graph of all of them `repeats` times over; the median."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and fills torch's memory pool
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (repeats * len(calls)))
    return statistics.median(times)


def cases(xs: list[Tensor]) -> dict[str, tuple[float, Callable[[Tensor, Tensor], object]]]:
    """Name -> (bytes an element of x, call on x and another tensor like it)."""
    columns = xs[0].shape[1]
    scale = torch.tensor(5.0 / 2688, device="cuda")
    weight = torch.ones(columns, dtype=xs[0].dtype, device="cuda")
    out = NVFP4_BYTES

    def gated(x: Tensor, activation: Gate, is_interleaved: bool) -> object:
        both = x.view(-1, 2 * columns)
        gate, up = (both[:, ::2], both[:, 1::2]) if is_interleaved else both.chunk(2, dim=1)
        return silu_mul_quantize(gate, up, scale, activation=activation)

    result: dict[str, tuple[float, Callable[[Tensor, Tensor], object]]] = {
        "quantize": (2 + out, lambda x, y: quantize(x, scale)),
        "quantize, swizzled scales": (2 + out, lambda x, y: quantize(x, scale, swizzled=True)),
        "quantize, strided rows": ((2 + out) * (1 - 64 / columns), lambda x, y: quantize(x[:, :-64], scale)),
        "quantize, four over six": (2 + out, lambda x, y: quantize(x, scale, four_over_six=True)),
        "quantize, dynamic scale": (4 + out, lambda x, y: quantize_dynamic(x)),
        "norm": (2 + out, lambda x, y: rms_norm_quantize(x, weight, scale)),
        "norm with residual": (6 + out, lambda x, y: rms_norm_quantize(x, weight, scale, residual=y)),
        "silu * up": (2 + out / 2, lambda x, y: gated(x, Gate.SILU, False)),
        "clamped swiglu, interleaved": (2 + out / 2, lambda x, y: gated(x, Gate.CLAMPED, True)),
        "hadamard 16": (2 + out, lambda x, y: hadamard_quantize(x, scale, 16)),
        "hadamard 128": (2 + out, lambda x, y: hadamard_quantize(x, scale, 128)),
        "weight sweep": (2 + out, lambda x, y: quantize_weight_sweep(x, scale)),
    }
    heads, head_dim, page_size = 8, 128, 16
    num_tokens = xs[0].numel() // (heads * head_dim)
    slots = torch.randperm(num_tokens, device="cuda")
    for fmt, bytes_out in ((KVFormat.FP8, 1.0), (KVFormat.NVFP4, out)):
        cache = allocate(
            fmt, -(-num_tokens // page_size), page_size, heads, head_dim, k_scale=0.02, v_scale=0.02, device="cuda"
        )

        def write(x: Tensor, y: Tensor, cache=cache) -> None:
            quantize_kv(cache, x.view(-1, heads, head_dim), y.view(-1, heads, head_dim), slots)

        result[f"kv cache, {fmt.value}"] = (2 * (2 + bytes_out), write)
    return result


def measure(rows: int, columns: int, only: str) -> list[Row]:
    xs = [torch.randn(rows, columns, device="cuda").bfloat16() for _ in range(NUM_COPIES)]
    pairs = list(zip(xs, xs[1:] + xs[:1], strict=True))
    targets = [torch.empty_like(x) for x in xs]
    copy_us = microseconds([lambda x=x, t=t: t.copy_(x) for x, t in zip(xs, targets, strict=True)])
    del targets
    copy_rate = 4 * xs[0].numel() / copy_us
    table = [Row("copy", copy_us, 4.0 * xs[0].numel(), 1.0)]
    chosen = {name: case for name, case in cases(xs).items() if only in name}
    for name, (element_bytes, call) in chosen.items():
        us = microseconds([lambda x=x, y=y, call=call: call(x, y) for x, y in pairs])
        moved = element_bytes * xs[0].numel()
        table.append(Row(name, us, moved, moved / us / copy_rate))
    return table


def measure_small() -> dict[str, dict[int, float]]:
    """Microseconds of the launches of a decode step, back to back, by the number of rows."""
    scale = torch.tensor(5.0 / 2688, device="cuda")
    weight = torch.ones(SMALL_COLUMNS, dtype=torch.bfloat16, device="cuda")
    calls: dict[str, Callable[[Tensor], object]] = {
        "quantize": lambda x: quantize(x, scale),
        "quantize, dynamic scale": quantize_dynamic,
        "norm": lambda x: rms_norm_quantize(x, weight, scale),
    }
    found: dict[str, dict[int, float]] = {name: {} for name in calls}
    for rows in SMALL_ROWS:
        x = torch.randn(rows, SMALL_COLUMNS, device="cuda").bfloat16()
        for name, call in calls.items():
            found[name][rows] = microseconds([lambda x=x, call=call: call(x)], repeats=32)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--columns", type=int, default=8192)
    parser.add_argument("--only", default="", metavar="TEXT", help="kernels whose name contains TEXT")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    table = measure(arguments.rows, arguments.columns, arguments.only)
    small = measure_small() if not arguments.only else {}
    print(f"{'bf16 ' + str([arguments.rows, arguments.columns]):30} {'us':>8} {'TB/s':>6} {'of copy':>8}")
    for row in table:
        rate = row.bytes_moved / row.microseconds / 1e6
        print(f"{row.name:30} {row.microseconds:8.1f} {rate:6.2f} {row.share:8.1%}")
    for name, by_rows in small.items():
        print(f"{name}, [M, {SMALL_COLUMNS}]: " + ", ".join(f"M = {m} {us:.2f} us" for m, us in by_rows.items()))
    if arguments.record:
        record("kernels_quantize", {"table": [asdict(row) for row in table], "small": small})


if __name__ == "__main__":
    main()
