"""How fast a model folder is quantized, file to file, against reading and writing the same files.

    python benchmarks/quantize_speed.py [--gigabytes 1.0] [--runs 5] [--device cpu|cuda]

Makes a bf16 model with the linear shapes of an 8-billion-parameter Llama, and times in turn, several times over, in a
fresh process each:

    copy           read every input byte, write as many bytes as the NVFP4 output has, with plain file calls
    nvfp4          the recipe, round to nearest, without calibration
    nvfp4-sweep    the recipe

Prints medians in MB of bf16 input a second, and each recipe's median ratio to `copy` of the same turn.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from record import record
from safetensors.torch import save_file

SHAPES = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (14336, 4096),
    "mlp.up_proj": (14336, 4096),
    "mlp.down_proj": (4096, 14336),
}
RECIPES = ("nvfp4", "nvfp4-sweep")


def make_model(folder: Path, num_bytes: float) -> int:
    """Layers of the shapes above until `num_bytes` is reached; returns the bytes written."""
    layer_bytes = 2 * sum(n * k for n, k in SHAPES.values())
    count = max(1, round(num_bytes / layer_bytes))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(count):
        for name, shape in SHAPES.items():
            weight = torch.randn(shape, generator=generator, dtype=torch.float32).mul_(0.02).bfloat16()
            tensors[f"model.layers.{layer}.{name}.weight"] = weight
    save_file(tensors, folder / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": count}
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 4096, "dtype": "bfloat16"}))
    return count * layer_bytes


def copy(model: Path, out: Path) -> None:
    """The ceiling: the same bytes in and out, nothing computed."""
    buffer = bytearray(16 << 20)
    size = (model / "model.safetensors").stat().st_size
    out.mkdir()
    with (model / "model.safetensors").open("rb", buffering=0) as reader, (out / "x").open("wb", buffering=0) as writer:
        read = written = 0
        while got := reader.readinto(buffer):
            read += got
            want = int(read * 4.5 / 16)
            writer.write(memoryview(buffer)[: want - written])
            written = want
    assert read == size


def run_once(model: Path, out: Path, what: str, device: str) -> tuple[float, float]:
    """Seconds of work in a fresh process, and MB of peak memory over the interpreter's with everything imported."""
    shutil.rmtree(out, ignore_errors=True)
    run = subprocess.run(
        [sys.executable, __file__, "--child", what, str(model), str(out), device],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    shutil.rmtree(out, ignore_errors=True)
    taken, peak = run.stdout.split()[-2:]
    return float(taken), float(peak)


def peak_mb() -> float:
    """High-water mark of this program's memory. getrusage would count what the parent held when it forked."""
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def child(what: str, model: Path, out: Path, device: str) -> None:
    import transformers  # noqa: F401  (imported by the work itself; not part of what it takes)

    from blockscale import api

    if device != "cpu":
        torch.zeros(1, device=device)  # the driver starts before the clock does

    before_mb = peak_mb()
    begin = time.perf_counter()
    if what == "copy":
        copy(model, out)
    else:
        api.quantize(model, out, what, device=device)
    seconds = time.perf_counter() - begin
    print(seconds, peak_mb() - before_mb)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, out = Path(folder) / "model", Path(folder) / "out"
        model.mkdir()
        num_bytes = make_model(model, args.gigabytes * 1e9)
        seconds: dict[str, list[float]] = {what: [] for what in ("copy", *RECIPES)}
        peaks_mb: dict[str, float] = dict.fromkeys(seconds, 0.0)
        run_once(model, out, "copy", args.device)  # the page cache as every later run finds it
        for _ in range(args.runs):
            for what, times in seconds.items():
                taken, peak = run_once(model, out, what, args.device)
                times.append(taken)
                peaks_mb[what] = max(peaks_mb[what], peak)
    figures = [
        {
            "what": what,
            "input_mb": num_bytes / 1e6,
            "median_mb_per_s": num_bytes / 1e6 / statistics.median(times),
            "mb_per_s": [num_bytes / 1e6 / t for t in times],
            "peak_mb_over_imports": peaks_mb[what],
            "median_ratio_to_copy": statistics.median(c / t for c, t in zip(seconds["copy"], times, strict=True)),
        }
        for what, times in seconds.items()
    ]
    record("quantize_speed" + ("" if args.device == "cpu" else "_gpu"), figures)
    for row in figures:
        print(
            f"{row['what']:12s} {row['median_mb_per_s']:8.0f} MB/s   {row['median_ratio_to_copy']:.2f} of copy   "
            f"{row['peak_mb_over_imports']:.0f} MB"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
    else:
        main()
