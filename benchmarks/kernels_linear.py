"""The linears on the shapes of Llama 8B and 70B: share of the read bandwidth, and against torch's bf16 product.

    python benchmarks/kernels_linear.py [--m 1,8,16,32,64,128,512,1024,4096] [--shape N,K ...] [--write]

Needs a GPU. Every time is that of a CUDA graph of back-to-back launches over more copies of the weight than any cache
holds, so that launch, ramp and drain are in it; the median of several replays. The ceiling is a kernel that only
reads, measured in the same run. Our kernels begin while the one ahead of them ends and fetch weights meanwhile
(programmatic dependent launch), as they do behind any kernel of a model; "ordinary launch" rows are the same kernel
without that. humming and Marlin have rows where they are installed. --write records results/kernels_linear.json.
"""

import argparse
import sys
from dataclasses import replace
from functools import partial

import torch
from record import record

from blockscale.formats.spec import NVFP4
from blockscale.kernels.bench.clock import median_us, num_copies, read_bandwidth
from blockscale.kernels.bench.linear import Row, bench_linears, random_weight
from blockscale.kernels.cuda.linear_small import linear
from blockscale.kernels.layouts import to_fragments

SHAPES = ((57344, 8192), (8192, 28672), (28672, 4096), (8192, 8192), (4096, 14336), (4096, 4096))
SMALL_M = 32


def ordinary_us(n: int, k: int, m: int, device: torch.device) -> float:
    """Microseconds of the small-M kernel in a chain of ordinary launches."""
    weight = to_fragments(random_weight(n, k, NVFP4, torch.bfloat16, device))
    copies = [
        replace(weight, packed=weight.packed.clone(), block_scale=weight.block_scale.clone())
        for _ in range(num_copies(weight.num_bytes))
    ]
    x = torch.randn(m, k, device=device).bfloat16()
    return median_us([partial(linear, x, copy, is_programmatic=False) for copy in copies], device)


def line(n: int, k: int, m: int, kernel: str, us: float, ratio: float | None, share: float) -> str:
    against = f"{ratio:5.2f}x" if ratio is not None else "      "
    return f"[{n}, {k}]".ljust(15) + f"{m:5d}  {kernel:28s} {us:9.2f} us {against} {100 * share:5.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--m", default="1,8,16,32,64,128,512,1024,4096")
    parser.add_argument("--shape", action="append", default=[], help="N,K; may be repeated")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("kernels_linear: needs a GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    ms = [int(m) for m in arguments.m.split(",")]
    shapes = [tuple(map(int, shape.split(","))) for shape in arguments.shape] or list(SHAPES)
    bandwidth = read_bandwidth(device)
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s")
    figures = []
    for n, k in shapes:
        rows: list[Row] = bench_linears([(n, k)], ms, device)
        torch_us = {row.m: row.us for row in rows if row.kernel == "torch bfloat16" and row.us}
        for row in sorted(rows, key=lambda row: row.m):
            figures.append(row.to_dict())
            if row.us is None:
                print(f"[{n}, {k}] {row.m} {row.kernel}: {row.failure}")
            else:
                print(line(n, k, row.m, row.kernel, row.us, row.ratio, n * k * 0.5625 / bandwidth / row.us * 1e6))
        for m in (m for m in ms if m <= SMALL_M):
            us = ordinary_us(n, k, m, device)
            share = n * k * 0.5625 / bandwidth / us * 1e6
            ratio = torch_us[m] / us if m in torch_us else None
            name = "ordinary launch"
            figures.append({"kernel": name, "n": n, "k": k, "m": m, "us": us, "ratio": ratio, "share": share})
            print(line(n, k, m, name, us, ratio, share))
    if arguments.write:
        print(record("kernels_linear", {"read_bandwidth": bandwidth, "rows": figures}))


if __name__ == "__main__":
    main()
