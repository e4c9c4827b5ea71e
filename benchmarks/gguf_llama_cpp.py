"""The same checkpoint in blockscale and, as GGUF, in llama.cpp: perplexity over the same windows, both on the CPU.

    python benchmarks/gguf_llama_cpp.py --llama-python PATH --model NAME MODEL ... --text FILE [--recipes ...]

PATH is the interpreter of an environment with llama-cpp-python. Each MODEL is quantized data-free, written as GGUF and
scored twice: by blockscale with weights only (fp32 activations) and by llama.cpp, which rounds the inputs of packed
products to 8 bits in blocks of 32 and those of BF16 products to BF16. What the 8 bits cost is in the difference between
`ratio` and `ratio_decoded`, of a file that holds the same weights in BF16. Ratios are of perplexities, with 95 %
intervals over windows. Texts are read from 30 % on, 4096 tokens in 256-token windows. Writes
benchmarks/results/gguf_llama_cpp.json.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import record
from torch import Tensor

from blockscale import api
from blockscale.algorithms.divergence import score_tokens
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.conversion.gguf.write import write_gguf
from blockscale.evaluation.statistics import exp_interval, mean_intervals
from blockscale.evaluation.windows import TokenWindows, token_windows
from blockscale.host.model import HostedModel, load_model, load_tokenizer
from blockscale.texts import read_text

WINDOW, START, MAX_TOKENS = 256, 0.3, 4096
RECIPES = ("nvfp4-w4a16", "mxfp4", "source", "fp8")
PIECE = 20_000  # characters whose tokens are compared
PROMPT = "The capital of France is"
CHILD = Path(__file__).with_name("gguf_llama_cpp_child.py")


def own_nll(hosted: HostedModel, windows: TokenWindows) -> Tensor:
    """Nats of each scored token, float64."""
    parts = []
    for window in windows.windows:
        logits = hosted.logits(window.ids[None])[0, -window.num_scored - 1 : -1]
        parts.append(score_tokens(logits, window.ids[-window.num_scored :]).nll)
    return torch.cat(parts)


def ratio_interval(candidate: Tensor, reference: Tensor, windows: TokenWindows) -> list[float]:
    """Of perplexities: value, low and high."""
    sizes = [window.num_scored for window in windows.windows]
    sums = np.array([[part.sum().item() for part in (candidate - reference).split(sizes)]])
    found = exp_interval(mean_intervals(sums, np.array(sizes, dtype=np.float64))[0])
    return [found.value, found.low, found.high]


def ask_llama_cpp(python: str, model: Path, windows: TokenWindows, text: str) -> dict[str, Any]:
    job = {
        "model": str(model),
        "text": text,
        "prompt": PROMPT,
        "windows": [window.ids.tolist() for window in windows.windows],
        "num_scored": [window.num_scored for window in windows.windows],
    }
    path = model.with_suffix(".json")
    path.write_text(json.dumps(job), encoding="utf-8")
    run = subprocess.run([python, str(CHILD), str(path)], capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"llama.cpp failed:\n{run.stderr}")
    return dict(json.loads(run.stdout))


def measure(name: str, model: str, recipe: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    checkpoint = api.locate(model)
    if recipe != "source":
        checkpoint = folder / recipe
        api.quantize(model, checkpoint, recipe)
    written = write_gguf(open_checkpoint(checkpoint), folder / f"{recipe}.gguf")
    encode = load_tokenizer(checkpoint).encode
    text = read_text(args.text).content
    windows = token_windows(text, encode, window=WINDOW, start=START, max_tokens=MAX_TOKENS)
    hosted = load_model(checkpoint, emulate_activations=False)
    own = own_nll(hosted, windows)
    del hosted
    piece = text[:PIECE]
    theirs = ask_llama_cpp(args.llama_python, written.path, windows, piece)
    nll = torch.tensor(theirs["nll"], dtype=torch.float64)
    row: dict[str, Any] = {
        "model": name,
        "recipe": recipe,
        "text": Path(args.text).stem,
        "tokens": windows.num_tokens,
        "architecture": written.architecture,
        "weights": written.num_weights,
        "file_bytes": written.num_bytes,
        "perplexity_blockscale": own.mean().exp().item(),
        "perplexity_llama_cpp": nll.mean().exp().item(),
        "ratio": ratio_interval(nll, own, windows),
        "same_tokens": theirs["tokens"] == list(encode(piece)),
        "continuation": theirs["continuation"],
        "llama_cpp_python": theirs["version"],
    }
    if {"NVFP4", "MXFP4"} & set(written.num_weights):
        api.convert(checkpoint, folder / "decoded", "bf16")
        decoded = write_gguf(open_checkpoint(folder / "decoded"), folder / "decoded.gguf")
        wide = ask_llama_cpp(args.llama_python, decoded.path, windows, piece)
        row["ratio_decoded"] = ratio_interval(torch.tensor(wide["nll"], dtype=torch.float64), own, windows)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-python", required=True)
    parser.add_argument("--model", nargs=2, action="append", required=True, metavar=("NAME", "MODEL"))
    parser.add_argument("--text", required=True)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, model in args.model:
        for recipe in args.recipes:
            with tempfile.TemporaryDirectory() as folder:
                row = measure(name, model, recipe, args, Path(folder))
            rows.append(row)
            record("gguf_llama_cpp", rows)
            shown = {key: [round(x, 5) for x in row[key]] for key in row if key.startswith("ratio")}
            tokens = "same tokens" if row["same_tokens"] else "OTHER TOKENS"
            print(f"{name:14s} {recipe:12s} {shown} {tokens}: {row['continuation']!r}", flush=True)


if __name__ == "__main__":
    main()
