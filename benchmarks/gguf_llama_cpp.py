"""The same checkpoint in blockscale and, as GGUF, in llama.cpp: perplexity over the same windows, both on the CPU.

    python benchmarks/gguf_llama_cpp.py --llama-python PATH --model NAME MODEL ... --text FILE [--recipes ...]

PATH is the interpreter of an environment with llama-cpp-python. Each MODEL is quantized data-free, written as GGUF and
scored twice: by blockscale with weights only (fp32 activations) and by llama.cpp, which rounds the inputs of packed
products to 8 bits in blocks of 32 and those of BF16 products to BF16. `ratio_emulated` is what blockscale itself finds
with inputs rounded so. Texts are read from 30 % on, 4096 tokens in 512-token windows. Writes
benchmarks/results/gguf_llama_cpp.json.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from record import record
from torch import Tensor

from blockscale import api
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.conversion.gguf.write import GgufSummary, write_gguf
from blockscale.evaluation.divergence import score_tokens
from blockscale.evaluation.windows import TokenWindows, token_windows
from blockscale.host.linear import KeptLinear, PackedLinear
from blockscale.host.model import HostedModel, load_model, load_tokenizer
from blockscale.texts import read_text

WINDOW, START, MAX_TOKENS = 512, 0.3, 4096
RECIPES = ("source", "nvfp4-w4a16", "mxfp4", "fp8")
PROMPT = "The capital of France is"
CHILD = Path(__file__).with_name("gguf_llama_cpp_child.py")


def round_q8_0(x: Tensor) -> Tensor:
    """[..., K] as GGML's Q8_0 holds it: 8-bit integers in blocks of 32 whose scale is rounded to fp16 afterwards."""
    blocks = x.unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(scale > 0, blocks / scale, 0.0).round()
    return (codes * scale.half().float()).flatten(-2)


def round_inputs(hosted: HostedModel, packed: set[str]) -> None:
    """Hooks that round every linear's input as llama.cpp does: to Q8_0 for `packed` modules, to BF16 for the others."""

    def hook(rounding: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        return lambda module, args: (rounding(args[0]), *args[1:])

    for name, module in hosted.model.named_modules():
        if isinstance(module, PackedLinear | KeptLinear):
            module.register_forward_pre_hook(hook(round_q8_0 if name in packed else lambda x: x.bfloat16().float()))


def packed_modules(hosted: HostedModel, written: GgufSummary) -> set[str]:
    """Modules whose codes the file holds; Gemma's down projection is the one that is decoded."""
    is_gemma = written.architecture.startswith("gemma") and "NVFP4" in written.num_weights
    return {
        name
        for name, module in hosted.model.named_modules()
        if isinstance(module, PackedLinear)
        and module.linear.weight.format.name in ("nvfp4", "mxfp4")
        and not (is_gemma and name.endswith("down_proj"))
    }


def mean_nll(hosted: HostedModel, windows: TokenWindows) -> float:
    """Nats a token."""
    total = 0.0
    for window in windows.windows:
        logits = hosted.logits(window.ids[None])[0, -window.num_scored - 1 : -1]
        total += score_tokens(logits, window.ids[-window.num_scored :]).nll.sum().item()
    return total / windows.num_tokens


def ask_llama_cpp(python: str, model: Path, windows: TokenWindows, text: str) -> dict[str, object]:
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


def measure(name: str, model: str, recipe: str, args: argparse.Namespace, folder: Path) -> dict[str, object]:
    checkpoint = api.locate(model)
    if recipe != "source":
        checkpoint = folder / recipe
        api.quantize(model, checkpoint, recipe)
    written = write_gguf(open_checkpoint(checkpoint), folder / f"{recipe}.gguf")
    encode = load_tokenizer(checkpoint).encode
    text = read_text(args.text).content
    windows = token_windows(text, encode, window=WINDOW, start=START, max_tokens=MAX_TOKENS)
    hosted = load_model(checkpoint, emulate_activations=False)
    own = mean_nll(hosted, windows)
    round_inputs(hosted, packed_modules(hosted, written))
    emulated = mean_nll(hosted, windows)
    piece = text[:20_000]
    theirs = ask_llama_cpp(args.llama_python, written.path, windows, piece)
    nll = torch.tensor(theirs["nll"], dtype=torch.float64)
    ratio = (nll.mean() - own).exp().item()
    return {
        "model": name,
        "recipe": recipe,
        "text": Path(args.text).stem,
        "tokens": windows.num_tokens,
        "architecture": written.architecture,
        "weights": written.num_weights,
        "file_bytes": written.num_bytes,
        "perplexity_blockscale": torch.tensor(own).exp().item(),
        "perplexity_llama_cpp": nll.mean().exp().item(),
        "ratio": ratio,
        "ratio_emulated": torch.tensor(emulated - own).exp().item(),
        "same_tokens": theirs["tokens"] == list(encode(piece)),
        "continuation": theirs["continuation"],
        "llama_cpp_python": theirs["version"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-python", required=True)
    parser.add_argument("--model", nargs=2, action="append", required=True, metavar=("NAME", "MODEL"))
    parser.add_argument("--text", required=True)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    for name, model in args.model:
        for recipe in args.recipes:
            with tempfile.TemporaryDirectory() as folder:
                row = measure(name, model, recipe, args, Path(folder))
            rows.append(row)
            record("gguf_llama_cpp", rows)
            print(
                f"{name:14s} {recipe:12s} {row['perplexity_blockscale']:9.4f} {row['perplexity_llama_cpp']:9.4f} "
                f"ratio {row['ratio']:.5f} (emulated {row['ratio_emulated']:.5f}), tokens "
                f"{'same' if row['same_tokens'] else 'DIFFER'}: {row['continuation']!r}",
                flush=True,
            )


if __name__ == "__main__":
    main()
