"""Decode attention over paged caches: microseconds, TB/s and the share of the read bandwidth, per format and batch.

    python benchmarks/kernels_attention.py [--context 32768] [--batches 1 8 64] [--heads 64] [--kv-heads 8]
                                           [--head-dim 128] [--page-size 16] [--formats 16-bit fp8 nvfp4] [--sweep]

Each time is the median of 10 replays of a CUDA graph of launches that walk over at least 300 MB of cache, so that no
launch finds its pages in L2. Bytes are those of the keys, values and block scales that the context holds. The ceiling
is a sum over 4 GiB, measured in the same run. `--sweep` tries every cut of the work instead of the default one.
"""

import argparse
import itertools
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from blockscale.kernels.device import describe
from blockscale.kernels.paged_cache import KVFormat, PagedCache, allocate
from blockscale.kernels.triton.attention_decode import DecodePlan, attention_decode, plan_decode

COLD_BYTES = 300 * 2**20


def filled_cache(fmt: KVFormat, num_pages: int, args: argparse.Namespace) -> PagedCache:
    """A cache of random bytes; block scales between 0.25 and 4, and 16-bit values below 2 in magnitude."""
    scale = 0.01
    cache = allocate(
        fmt, num_pages, args.page_size, args.kv_heads, args.head_dim, k_scale=scale, v_scale=scale, device="cuda"
    )
    for pages in (cache.k, cache.v):
        memory = pages.transpose(1, 2)  # as it lies
        if fmt is KVFormat.BITS16:
            for part in memory.split(4096):
                part.normal_()
        else:
            # E4M3 codes of magnitudes up to 240, or any two codes of e2m1
            mask = 0xF7 if fmt is KVFormat.FP8 else 0xFF
            for part in memory.view(torch.uint8).split(4096):
                part.random_(0, 256).bitwise_and_(mask)
    for scales in (cache.k_block_scale, cache.v_block_scale):
        if scales is not None:
            scales.transpose(1, 2).view(torch.uint8).random_(0x28, 0x48)
    return cache


def median_us(launches: list, replays: int = 10) -> float:
    """Microseconds of one launch: all of them in one graph, replayed."""
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for _ in range(replays + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(launches))
    return sorted(times[2:])[replays // 2]


def read_ceiling() -> float:
    """TB/s of the best of a few reductions over 4 GiB."""
    x = torch.ones(2**31, dtype=torch.bfloat16, device="cuda").view(torch.int32)
    return 2**32 / median_us([lambda: torch.amax(x.view(4096, -1), 1)] * 2) / 1e6


def measure(cache: PagedCache, batch: int, args: argparse.Namespace, plan: DecodePlan | None) -> float:
    """Microseconds of a decode over `batch` contexts, on another part of the cache at every launch."""
    pages = args.context // args.page_size
    copies = cache.num_pages // (pages * batch)
    order = torch.randperm(cache.num_pages, device="cuda")[: copies * batch * pages]
    tables = order.to(torch.int32).view(copies, batch, pages)
    lengths = torch.full((batch,), args.context, dtype=torch.int32, device="cuda")
    q = torch.randn(batch, args.heads, args.head_dim, dtype=torch.bfloat16, device="cuda")
    launches = [lambda t=t: attention_decode(q, cache, t, lengths, plan=plan) for t in tables]
    return median_us(launches * max(1, 6 // len(launches)))


def plans(cache: PagedCache, batch: int, args: argparse.Namespace) -> list[DecodePlan]:
    """The default cut, or with --sweep its neighbours too."""
    default = plan_decode(cache, args.context, batch, args.heads // args.kv_heads, describe("cuda"))
    if not args.sweep:
        return [default]
    found = [default]
    for tokens, warps, stages in itertools.product((16, 32), (2, 4, 8), (2, 3)):
        if tokens <= args.page_size:
            found += [replace(default, tokens=tokens, warps=warps, stages=stages)]
    return list(dict.fromkeys(found))


def compile_one(fmt: KVFormat, plan: DecodePlan, args: argparse.Namespace) -> None:
    """Fills Triton's cache from a process of its own: compiling takes seconds a kernel, one after another."""
    small = argparse.Namespace(**{**vars(args), "context": args.page_size * 16})
    cache = filled_cache(fmt, 16, small)
    table = torch.arange(16, dtype=torch.int32, device="cuda").view(1, 16)
    q = torch.zeros(1, args.heads, args.head_dim, dtype=torch.bfloat16, device="cuda")
    attention_decode(q, cache, table, torch.full((1,), 16, dtype=torch.int32, device="cuda"), plan=plan)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--formats", nargs="+", default=[f.value for f in KVFormat])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--processes", type=int, default=8, help="that compile")
    parser.add_argument("--json", metavar="NAME", help="record the figures in benchmarks/results/NAME.json")
    args = parser.parse_args()

    ceiling = read_ceiling()
    print(f"{torch.cuda.get_device_name()}, read ceiling {ceiling:.2f} TB/s, context {args.context}, "
          f"{args.heads}/{args.kv_heads} heads of {args.head_dim}, pages of {args.page_size}")  # fmt: skip
    rows = []
    for fmt in (KVFormat(name) for name in args.formats):
        token_bytes = filled_cache(fmt, 1, args).bytes_per_token
        tokens = max(max(args.batches) * args.context, COLD_BYTES // token_bytes + args.context)
        cache = filled_cache(fmt, -(-tokens // args.page_size), args)
        wanted = [(batch, plan) for batch in args.batches for plan in plans(cache, batch, args)]
        kernels = {(p.tokens, p.warps, p.stages, p.splits > 1): p for _, p in wanted}
        with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
            jobs = {key: pool.submit(compile_one, fmt, plan, args) for key, plan in kernels.items()}
            broken = {key: job.exception() for key, job in jobs.items()}
        for batch, plan in wanted:
            error = broken[(plan.tokens, plan.warps, plan.stages, plan.splits > 1)]
            if error:
                print(fmt.value, batch, plan, type(error).__name__, str(error)[:80])
                continue
            us = measure(cache, batch, args, plan)
            speed = token_bytes * args.context * batch / us / 1e6
            rows.append({"format": fmt.value, "batch": batch, "plan": str(plan), "us": us, "tb_per_s": speed})
            rows[-1]["share"] = speed / ceiling
            print(f"{fmt.value:7} batch {batch:3} T{plan.tokens} W{plan.warps} stages {plan.stages} splits "
                  f"{plan.splits:3}: {us:8.1f} us  {speed:.2f} TB/s  {speed / ceiling:.0%}", flush=True)  # fmt: skip
        del cache
    if args.json:
        from record import record

        record(args.json, {"ceiling_tb_per_s": ceiling, "rows": rows})


if __name__ == "__main__":
    main()
