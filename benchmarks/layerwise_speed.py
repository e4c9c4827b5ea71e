"""Seconds a decoder layer, and peak memory, of a layer-wise recipe: on a model, or on random layers of a large shape.

    python benchmarks/layerwise_speed.py --model demo --calibration FILE ...
    python benchmarks/layerwise_speed.py --shape 4096 14336 32 8 --layers 3 --device cuda --calibration FILE ...

`--shape`: hidden size, intermediate size, query heads, key/value heads. The first layer also pays for start-up, so the
median of the others is what counts. Writes benchmarks/results/layerwise_speed_NAME.json.
"""

import argparse
import itertools
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from record import record

from blockscale import api


def random_model(folder: Path, shape: list[int], layers: int, tokenizer: Path, device: str) -> Path:
    """A Llama of random bf16 weights, with the tokenizer of another model."""
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

    hidden, intermediate, heads, kv_heads = shape
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=AutoConfig.from_pretrained(tokenizer).vocab_size,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    return folder


def peak_bytes(device: str) -> int:
    """Of the device's memory, or of this process."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated(device)
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="demo")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--shape", nargs=4, type=int)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--recipe", default="nvfp4-best")
    parser.add_argument("--calibration", nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    before = peak_bytes("cpu")
    with tempfile.TemporaryDirectory() as folder:
        model = api.locate(args.model)
        if args.shape:
            model = random_model(Path(folder) / "model", args.shape, args.layers, model, args.device)
        start = time.monotonic()
        times = [start]

        def progress(stage: str, done: int, total: int) -> None:
            if stage == "quantizing layers":
                times.append(time.monotonic())
                print(f"layer {done} of {total}: {times[-1] - times[-2]:.1f} s", flush=True)

        out = Path(folder) / "out"
        options = {"calibration": args.calibration, "max_calibration_tokens": args.tokens, "device": args.device}
        api.quantize(model, out, args.recipe, progress=progress, **options)
        seconds = time.monotonic() - start
    layers = [b - a for a, b in itertools.pairwise(times)]
    figures = {
        "recipe": args.recipe,
        "shape": args.shape or args.model,
        "calibration_tokens": args.tokens,
        "seconds": round(seconds, 1),
        "seconds_by_layer": [round(s, 1) for s in layers],
        "median_seconds_a_layer": round(statistics.median(layers[1:]), 1),
        "peak_bytes": peak_bytes(args.device),
        "peak_bytes_before": before,
    }
    record(f"layerwise_speed_{args.name}", figures)
    print(figures)


if __name__ == "__main__":
    main()
