"""How long `inspect` takes on the headers of the largest models, and in how much memory.

    python benchmarks/inspect_giant.py [--runs 5] [--models deepseek-r1 llama-3.1-405b]

Makes sparse NVFP4 checkpoints whose configs, headers, index and file sizes are real and whose data are holes, and
inspects each in a fresh process: seconds from the call to its result, seconds of the whole process with its imports,
and the process's high-water mark of memory. The files' headers are in the page cache from the second run on, as they
are for a checkpoint just written; the first run is given too.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import record

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # where the checkpoints are made

from faults import giants

MODELS = {"deepseek-r1": giants.deepseek_r1, "llama-3.1-405b": giants.llama_405b}


def child(folder: Path) -> None:
    begin = time.perf_counter()
    import blockscale

    result = blockscale.inspect(folder)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time()
    status = Path("/proc/self/status").read_text().splitlines()
    peak_mb = int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024 / 1e6
    print(
        json.dumps(
            {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mb": peak_mb, "bytes": result.to_dict()["bytes"]}
        )
    )


def run_once(folder: Path) -> dict[str, float]:
    """`seconds` with the imports that inspect asks for; `process_seconds` with the interpreter's start; `cpu_seconds`,
    which other work on the machine does not stretch, of the whole process."""
    begin = time.perf_counter()
    run = subprocess.run(
        [sys.executable, __file__, "--child", str(folder)], check=True, stdout=subprocess.PIPE, text=True
    )
    return {**json.loads(run.stdout.splitlines()[-1]), "process_seconds": time.perf_counter() - begin}


def measure(name: str, parent: Path, num_runs: int) -> dict[str, object]:
    folder = MODELS[name](parent / name)
    load = os.getloadavg()[0]  # other work on the machine makes times longer
    runs = [run_once(folder) for _ in range(num_runs)]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return {
        "model": name,
        "num_tensors": len(index["weight_map"]),
        "checkpoint_gb": runs[0]["bytes"] / 1e9,
        "first_seconds": runs[0]["seconds"],
        "median_seconds": statistics.median(run["seconds"] for run in runs),
        "worst_seconds": max(run["seconds"] for run in runs),
        "median_cpu_seconds": statistics.median(run["cpu_seconds"] for run in runs),
        "median_process_seconds": statistics.median(run["process_seconds"] for run in runs),
        "peak_mb": max(run["peak_mb"] for run in runs),
        "load_average_before": load,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        figures = [measure(name, Path(parent), args.runs) for name in args.models]
    record("inspect_giant", figures)
    for row in figures:
        print(
            f"{row['model']:16s} {row['num_tensors']:7d} tensors  {row['checkpoint_gb']:.0f} GB   "
            f"{row['median_seconds']:.2f} s (worst {row['worst_seconds']:.2f})   {row['peak_mb']:.0f} MB"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]))
    else:
        main()
