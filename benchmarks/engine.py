"""The engine on one GPU: decode against the read bandwidth, NVFP4 against bf16, joules, capacity, the host's time.

    python benchmarks/engine.py [--only NAME ...] [--write]
    python benchmarks/engine.py --random tiny --device cpu --input 48 --output 24 --concurrency 4     (to try it)

Random weights in the shapes of Llama 3.1 8B and 70B; what a kernel takes depends on shapes alone. Parts:

    8b-nvfp4, 8b-bf16   one request and 64 at once, of 1024 tokens in and 1000 out: a step's time, its bytes over the
                        read bandwidth measured first (floor), tokens a second, joules a token
    8b-nvfp4-fp8        64 at once with an FP8 cache
    8b-host             64 at once with steps that run ahead and steps that wait, and what a step takes where many are
                        queued, so that the GPU never waits: what the host takes that is not hidden
    8b-greedy           outputs of 16 requests at once and one by one: where they differ first, by how much the two
                        likeliest tokens differed there, and how much log-probabilities of equal texts differ
    70b-nvfp4           one request
    70b-capacity        sequences of 2048 tokens that fit beside the weights with an FP8 cache, against the planner's
                        figure; then one decode step of all of them, on all pages

The requests of a load are submitted together; "decode" figures are of the steps that gave each of them a token. A row
is printed, and with --write recorded in results/engine.json, as soon as it is known.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from record import record

from blockscale import api
from blockscale.engine.bench.energy import energy_meter
from blockscale.engine.bench.floor import decode_bytes
from blockscale.engine.bench.random_model import draw_weights, random_config, write_hollow
from blockscale.engine.engine import Engine
from blockscale.engine.flight import launch
from blockscale.engine.load import load_for_bench
from blockscale.engine.memory import choose_num_pages
from blockscale.engine.options import EngineOptions
from blockscale.engine.request import Event, Request
from blockscale.engine.runner import Runner
from blockscale.engine.sampler import Row, sample
from blockscale.engine.sampling import Sampling
from blockscale.engine.scheduler import Work
from blockscale.errors import BlockscaleError
from blockscale.kernels.bench.clock import read_bandwidth
from blockscale.models.decoder import Decoder
from blockscale.planning.models.model import find_model

WARM_STEPS, QUEUED_STEPS = 16, 40
HOST_TOKENS = 200
NUM_GREEDY, GREEDY_TOKENS = 16, 64
CAPACITY_TOKENS = 2048


@dataclass(frozen=True)
class Loaded:
    """floor_bytes  (sequences, tokens of each) -> bytes that a decode step cannot do without reading"""

    model: Decoder
    floor_bytes: Callable[[float, float], float]
    facts: dict[str, Any]


@dataclass(frozen=True)
class Steady:
    """One load. Steps are those that gave each request a token; seconds of each."""

    step_s: list[float]
    contexts: list[float]
    total_s: float
    joules: float | None
    num_tokens: int


def load(name: str, weights: str, kv_cache: str, device: torch.device) -> Loaded:
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="blockscale-bench-") as folder:
        write_hollow(Path(folder), random_config(name), weights)
        found = find_model(Path(folder))
        stored = found.weights
        assert stored is not None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        model = load_for_bench(Path(folder), kv_cache, device)
    assert isinstance(model, Decoder)
    facts: dict[str, Any] = {"model": name, "weights": weights, "kv_cache": kv_cache, "weight_bytes": stored.num_bytes}
    if device.type == "cuda":
        facts["peak_over_checkpoint"] = (torch.cuda.max_memory_allocated(device) - before) / stored.num_bytes
    draw_weights(model)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    facts["load_s"] = time.perf_counter() - begin
    return Loaded(model, partial(decode_bytes, found.architecture, stored, kv_cache), facts)


@contextmanager
def engine_of(model: Decoder, context: int, num_running: int, **changes: Any) -> Iterator[Engine]:
    gc.collect()  # another engine's cache
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    options = EngineOptions(
        max_running=num_running,
        max_step_tokens=max(2048, num_running),
        max_context=context,
        use_prefix_cache=False,
        seed=0,
    )
    engine = Engine(model, replace(options, **changes))
    try:
        yield engine
    finally:
        engine.check_integrity()
        engine.close()


def prompts(model: Decoder, num: int, length: int, seed: int = 1) -> list[list[int]]:
    draw = Random(seed)
    return [draw.choices(range(model.vocab_size), k=length) for _ in range(num)]


def stepped(engine: Engine) -> list[Event]:
    events = engine.step()
    for event in events:
        if event.error is not None:
            raise event.error
    return events


def decode_all(engine: Engine, texts: Sequence[Sequence[int]], num_tokens: int) -> Steady:
    """All at once, to the end."""
    sampling = Sampling(max_tokens=num_tokens, ignore_eos=True)
    for tokens in texts:
        engine.submit(tokens, sampling)
    joules = energy_meter(engine.model.device)
    step_s: list[float] = []
    contexts: list[float] = []
    count, decoded, before = 0, 0, 0.0
    begin = last = time.perf_counter()
    while engine.has_work:
        events = stepped(engine)
        now = time.perf_counter()
        given = sum(len(event.token_ids) for event in events)
        count += given
        if given == len(texts):
            decoded += 1
            if decoded == WARM_STEPS and joules is not None:
                before = joules()
            if decoded > WARM_STEPS:
                step_s.append(now - last)
                contexts.append(count / len(texts) + len(texts[0]))
        last = now
    total = time.perf_counter() - begin
    spent = None if joules is None else joules() - before
    return Steady(step_s, contexts, total, spent, count)


def load_row(loaded: Loaded, bandwidth: float, num: int, args: argparse.Namespace) -> dict[str, Any]:
    model = loaded.model
    with engine_of(model, args.input + args.output, num) as engine:
        decode_all(engine, prompts(model, num, args.input, seed=2), min(args.output, 2 * WARM_STEPS))  # graphs, kernels
        found = decode_all(engine, prompts(model, num, args.input), args.output)
        why_without = engine.stats().why_without_graphs
    step_s = statistics.median(found.step_s)
    speeds = [loaded.floor_bytes(num, c) / s for c, s in zip(found.contexts, found.step_s, strict=True)]
    tokens = num * len(found.step_s)
    return {
        **loaded.facts,
        "part": "decode",
        "sequences": num,
        "input_tokens": args.input,
        "output_tokens": args.output,
        "step_ms": 1e3 * step_s,
        "decode_tokens_per_s": tokens / sum(found.step_s),
        "share_of_floor": statistics.median(speeds) / bandwidth,
        "tokens_per_s": found.num_tokens / found.total_s,
        "joules_per_token": None if found.joules is None else found.joules / tokens,
        "why_without_graphs": why_without,
    }


def host_row(loaded: Loaded, num: int, args: argparse.Namespace) -> dict[str, Any]:
    ahead, waiting = (host_ms(loaded.model, num, args, is_ahead=is_ahead) for is_ahead in (True, False))
    busy = busy_ms(loaded.model, num, args.input + HOST_TOKENS // 2)
    row: dict[str, Any] = {**loaded.facts, "part": "host", "sequences": num}
    row |= {"step_ms": ahead, "waiting_step_ms": waiting, "kernels_ms": busy}
    if busy is not None:
        row |= {"host_ms": waiting - busy, "not_hidden": ahead / busy - 1}
    return row


def host_ms(model: Decoder, num: int, args: argparse.Namespace, *, is_ahead: bool) -> float:
    """Milliseconds of a step, where steps run ahead and where they do not."""
    num_tokens = min(args.output, HOST_TOKENS)
    with engine_of(model, args.input + num_tokens, num, run_ahead=is_ahead) as engine:
        decode_all(engine, prompts(model, num, args.input, seed=2), min(num_tokens, 2 * WARM_STEPS))
        found = decode_all(engine, prompts(model, num, args.input), num_tokens)
    return 1e3 * statistics.median(found.step_s)


def busy_ms(model: Decoder, num: int, length: int) -> float | None:
    """Milliseconds of a step of `num` sequences of that length, many of them queued: the GPU never waits for the host.

    None without a GPU.
    """
    if model.device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    runner, works = decoding(model, num, length)
    flight = None
    for _ in range(WARM_STEPS):
        flight = launch(runner, works, flight)
    torch.cuda.synchronize(model.device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(QUEUED_STEPS):
        flight = launch(runner, works, flight)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / QUEUED_STEPS


def decoding(model: Decoder, num: int, length: int, num_pages: int | None = None) -> tuple[Runner, list[Work]]:
    """Sequences of `length` tokens, each about to get another, on pages that nobody has written."""
    page_size = EngineOptions().page_size
    pages_each = -(-length // page_size)
    runner = Runner(model, num_pages or num * pages_each, page_size)
    works = []
    for i in range(num):
        request = Request(str(i), i, [1] * length, length - 1, Sampling(), 0, length + 1, frozenset())
        request.add_pages(list(range(i * pages_each, (i + 1) * pages_each)))
        works.append(Work(request, length - 1, length))
    return runner, works


def greedy_row(loaded: Loaded, args: argparse.Namespace) -> dict[str, Any]:
    model, num = loaded.model, min(NUM_GREEDY, args.concurrency)
    num_tokens = min(GREEDY_TOKENS, args.output)
    texts = prompts(model, num, args.input)
    with engine_of(model, args.input + num_tokens, num) as engine:
        alone = [outputs(engine, [text], num_tokens, logprobs=2)[0] for text in texts]
        together = outputs(engine, texts, num_tokens, logprobs=2)
        ahead = outputs(engine, texts, num_tokens, logprobs=None)
    noise, gaps = 0.0, []
    for one, other in zip(alone, together, strict=True):
        for a, b in zip(one, other, strict=True):
            if a.token_id != b.token_id:
                gaps.append(a.top[0][1] - a.top[1][1])
                break
            noise = max(noise, abs(a.logprob - b.logprob))
    same = [[p.token_id for p in one] for one in together] == [[p.token_id for p in one] for one in ahead]
    return {
        **loaded.facts,
        "part": "greedy",
        "sequences": num,
        "output_tokens": num_tokens,
        "differing": len(gaps),
        "largest_gap_nats": max(gaps, default=0.0),
        "largest_noise_nats": noise,
        "run_ahead_is_equal": same,
    }


def outputs(engine: Engine, texts: Sequence[Sequence[int]], num_tokens: int, logprobs: int | None) -> list[list[Any]]:
    """Of each text the tokens, with their log-probabilities where asked for."""
    sampling = Sampling(max_tokens=num_tokens, ignore_eos=True, logprobs=logprobs)
    found: dict[str, list[Any]] = {engine.submit(text, sampling): [] for text in texts}
    while engine.has_work:
        for event in stepped(engine):
            found[event.request_id] += event.logprobs or [_Token(token) for token in event.token_ids]
    return list(found.values())


@dataclass(frozen=True)
class _Token:
    token_id: int


def capacity_row(loaded: Loaded, name: str, args: argparse.Namespace) -> dict[str, Any]:
    model = loaded.model
    length = CAPACITY_TOKENS if args.random is None else args.input
    options = EngineOptions(max_running=1024, max_step_tokens=2048, max_context=length)
    pages_each = -(-length // options.page_size)
    num_pages = choose_num_pages(model, options)
    num = min(num_pages // pages_each, options.max_running)
    runner, works = decoding(model, num, length, num_pages)
    with torch.inference_mode():
        seconds = []
        for _ in range(4):
            begin = time.perf_counter()
            logits = model.logits(runner.run(works))
            sample(logits, [Row(Sampling(), i) for i in range(num)]).tokens.tolist()
            seconds.append(time.perf_counter() - begin)
    row: dict[str, Any] = {**loaded.facts, "part": "capacity", "tokens_each": length, "sequences": num}
    row["decode_tokens_per_s"] = num / min(seconds)
    if args.random is None:
        how = {"gpu": args.gpu, "gpus": 1, "engine": "blockscale", "input": length // 2, "output": length // 2}
        row["planned_sequences"] = api.plan(name, format="nvfp4", kv_cache="fp8", **how).max_sequences
        try:
            wide = api.plan(name, format="bf16", kv_cache="bf16", **how)
            row["bf16_fits"] = wide.fits
        except BlockscaleError as e:
            row["bf16_fits"] = str(e)
    return row


def rows(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    small, large = (args.random or name for name in ("llama-3.1-8b", "llama-3.1-70b"))
    bandwidth = read_bandwidth(device)
    yield {"part": "read bandwidth", "bytes_per_s": bandwidth}

    def is_wanted(*names: str) -> bool:
        return not args.only or bool(set(names) & set(args.only))

    if is_wanted("8b-nvfp4", "8b-host", "8b-greedy"):
        loaded = load(small, "nvfp4", "bf16", device)
        if is_wanted("8b-nvfp4"):
            for num in (1, args.concurrency):
                yield load_row(loaded, bandwidth, num, args)
        if is_wanted("8b-host"):
            yield host_row(loaded, args.concurrency, args)
        if is_wanted("8b-greedy"):
            yield greedy_row(loaded, args)
        del loaded
    if is_wanted("8b-nvfp4-fp8"):
        loaded = load(small, "nvfp4", "fp8", device)
        yield load_row(loaded, bandwidth, args.concurrency, args)
        del loaded
    if is_wanted("8b-bf16"):
        loaded = load(small, "bf16", "bf16", device)
        for num in (1, args.concurrency):
            yield load_row(loaded, bandwidth, num, args)
        del loaded
    if is_wanted("70b-nvfp4", "70b-capacity"):
        loaded = load(large, "nvfp4", "fp8", device)
        if is_wanted("70b-nvfp4"):
            yield load_row(loaded, bandwidth, 1, args)
        if is_wanted("70b-capacity"):
            yield capacity_row(loaded, large, args)


def shown(row: dict[str, Any]) -> str:
    def text(value: object) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return "  ".join(f"{key} {text(value)}" for key, value in row.items() if value is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("8b-nvfp4", "8b-nvfp4-fp8", "8b-bf16", "8b-host", "8b-greedy", "70b-nvfp4", "70b-capacity")
    parser.add_argument("--only", nargs="+", choices=names)
    parser.add_argument("--random", help="this shape for both models")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpu", default="h200", help="the planner's name of the GPU")
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument("--output", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    begin = time.perf_counter()
    known: list[dict[str, Any]] = []
    for row in rows(args, torch.device(args.device)):
        known.append(row)
        print(f"[{time.perf_counter() - begin:5.0f} s] {shown(row)}", flush=True)
        if args.write:
            record("engine", known)
        gc.collect()
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
