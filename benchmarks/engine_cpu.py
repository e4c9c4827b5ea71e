"""The engine on the CPU against llama.cpp: tokens a second of one request, with the same weights on both sides.

    nice -n -15 python benchmarks/engine_cpu.py --llama-python PATH [--threads 2 1] [--prompt 128] [--output 128]
                                                [--rounds 7] [--model demo] [--write]

PATH is the interpreter of an environment with llama-cpp-python, built for this machine (CMAKE_ARGS=-DGGML_NATIVE=ON).
MODEL is quantized data-free (`nvfp4-w4a16`); that checkpoint runs in the engine, all of it: scheduling, sampling, text.
llama.cpp runs the same codes and scales as NVFP4 GGUF, and the 16-bit weights as its own Q4_0, with embedding and head
in BF16 as ours are; `q4_0 own head` is as its quantizer does it by itself, where the head too has fewer bits. Its rows
are of whichever of its two ways of attention is faster. It rounds the inputs of packed products to 8 bits, and ours do
not.

All are loaded before anything is timed; then they take turns, in an order drawn by lot, a round after another. A round
is one prompt and its greedy output. Figures are medians: of all rounds' prompts, and of all rounds' tokens; ratios are
those of rounds, each with its own neighbours, the median again.
"""

import argparse
import itertools
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from record import record

from blockscale import api
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.conversion.gguf.write import write_gguf
from blockscale.engine.engine import Engine
from blockscale.engine.load import load_engine
from blockscale.engine.options import EngineOptions
from blockscale.engine.sampling import Sampling

CHILD = Path(__file__).with_name("engine_cpu_child.py")
OURS = "blockscale nvfp4"
SEED = 7


@dataclass(frozen=True)
class Round:
    """Seconds of the prompt with its first token, and of each token after it; the tokens."""

    prefill_s: float
    token_s: tuple[float, ...]
    tokens: tuple[int, ...]

    @property
    def decode_s(self) -> float:
        return statistics.median(self.token_s)


Run = Callable[[Sequence[int], int], Round]


def run_engine(engine: Engine, prompt: Sequence[int], num_tokens: int) -> Round:
    begin = time.perf_counter()
    engine.submit(prompt, Sampling(max_tokens=num_tokens, ignore_eos=True))
    times: list[float] = []
    tokens: list[int] = []
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                raise SystemExit(f"the engine failed: {event.error}")
            tokens += event.token_ids
        times.append(time.perf_counter())
    seconds = [b - a for a, b in itertools.pairwise(times)]
    return Round(times[0] - begin, tuple(seconds), tuple(tokens))


class LlamaCpp:
    """A child process that holds one model."""

    def __init__(self, python: str, model: Path, threads: int, context: int) -> None:
        command = [python, str(CHILD), "serve", str(model), str(threads), str(context)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts = self._answer()

    def run(self, prompt: Sequence[int], num_tokens: int, *, is_flash: bool) -> Round:
        stdin: IO[str] | None = self.process.stdin
        assert stdin is not None
        stdin.write(json.dumps({"prompt": list(prompt), "num_tokens": num_tokens, "flash": is_flash}) + "\n")
        stdin.flush()
        found = self._answer()
        return Round(found["prefill_s"], tuple(found["token_s"]), tuple(found["tokens"]))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"llama.cpp ended with code {self.process.wait()}")
        return dict(json.loads(line))


def make_files(model: str, python: str, folder: Path) -> dict[str, Path]:
    checkpoint, source = folder / "nvfp4", folder / "source.gguf"
    api.quantize(model, checkpoint, "nvfp4-w4a16")
    nvfp4 = write_gguf(open_checkpoint(checkpoint), folder / "nvfp4.gguf").path
    write_gguf(open_checkpoint(api.locate(model)), source)
    files = {"checkpoint": checkpoint, "llama.cpp nvfp4": nvfp4}
    for name, head in (("llama.cpp q4_0", "bf16"), ("llama.cpp q4_0 own head", "own")):
        files[name] = folder / f"q4_0-{head}.gguf"
        subprocess.run([python, str(CHILD), "quantize", str(source), str(files[name]), head], check=True)
    source.unlink()
    return files


def take_turns(contenders: dict[str, Run], prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, list[Round]]:
    """The first prompt's rounds are not kept."""
    draw = random.Random(SEED)
    rounds: dict[str, list[Round]] = {name: [] for name in contenders}
    for number, prompt in enumerate(prompts):
        for name in draw.sample(sorted(contenders), len(contenders)):
            found = contenders[name](prompt, num_tokens)
            time.sleep(0.05)  # until its threads sleep
            if number > 0:
                rounds[name].append(found)
    return rounds


def figures(rounds: dict[str, list[Round]], num_prompt: int, file_bytes: dict[str, int]) -> list[dict[str, Any]]:
    ours, rows = rounds[OURS], []
    for name, theirs in rounds.items():
        row: dict[str, Any] = {
            "engine": name,
            "file_bytes": file_bytes[name],
            "activation_bits": 32 if name == OURS else 8,
            "decode_tokens_per_s": 1 / statistics.median(s for one in theirs for s in one.token_s),
            "prefill_tokens_per_s": num_prompt / statistics.median(one.prefill_s for one in theirs),
        }
        if name != OURS:
            pairs = list(zip(ours, theirs, strict=True))
            row["decode_ratio"] = statistics.median(b.decode_s / a.decode_s for a, b in pairs)
            row["prefill_ratio"] = statistics.median(b.prefill_s / a.prefill_s for a, b in pairs)
            row["same_tokens"] = statistics.fmean(_agreement(a.tokens, b.tokens) for a, b in pairs)
        rows.append(row)
    return rows


def _agreement(a: Sequence[int], b: Sequence[int]) -> float:
    """Share of the output before the first token that differs."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a)) / len(a)


def measure(args: argparse.Namespace, files: dict[str, Path], threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    context = args.prompt + args.output + 16
    options = EngineOptions(use_prefix_cache=False, max_context=context, max_running=1)
    engine, _ = load_engine(files["checkpoint"], device="cpu", options=options)
    draw = random.Random(SEED)
    prompts = [draw.choices(range(engine.model.vocab_size), k=args.prompt) for _ in range(args.rounds + 1)]
    contenders: dict[str, Run] = {OURS: lambda prompt, num: run_engine(engine, prompt, num)}
    peers = {
        name: LlamaCpp(args.llama_python, path, threads, context)
        for name, path in files.items()
        if name != "checkpoint"
    }
    facts = next(iter(peers.values())).facts
    for name, peer in peers.items():
        ways = {is_flash: peer.run(prompts[0], args.output, is_flash=is_flash) for is_flash in (False, True)}
        is_best = min(ways, key=lambda is_flash: ways[is_flash].decode_s)
        contenders[name] = lambda prompt, num, peer=peer, best=is_best: peer.run(prompt, num, is_flash=best)
    rounds = take_turns(contenders, prompts, args.output)
    for peer in peers.values():
        peer.close()
    engine.check_integrity()
    sizes = {name: path.stat().st_size for name, path in files.items() if name != "checkpoint"}
    sizes[OURS] = sum(path.stat().st_size for path in files["checkpoint"].glob("*.safetensors"))
    rows = figures(rounds, args.prompt, sizes)
    for row in rows:
        ratio = f"{row['decode_ratio']:5.2f}x {row['prefill_ratio']:5.2f}x" if "decode_ratio" in row else ""
        speeds = f"{row['decode_tokens_per_s']:8.1f} tok/s decode {row['prefill_tokens_per_s']:8.1f} prefill"
        print(f"{threads} threads  {row['engine']:23s} {speeds}  {ratio}", flush=True)
    return {"threads": threads, "llama_cpp": facts, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-python", required=True)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = make_files(args.model, args.llama_python, Path(folder))
        found = [measure(args, files, threads) for threads in args.threads]
    if args.write:
        load = {"model": args.model, "prompt_tokens": args.prompt, "output_tokens": args.output, "rounds": args.rounds}
        print(record("engine_cpu", {**load, "runs": found}))


if __name__ == "__main__":
    main()
