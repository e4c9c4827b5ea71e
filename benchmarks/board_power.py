"""What a GPU's board draws while idle, reading memory, multiplying, and waiting for launches.

These are the terms from which the planner builds a step's power. Needs a CUDA GPU and nvidia-smi, changes no setting.

    python benchmarks/board_power.py --out benchmarks/results/board_power.json
"""

import argparse
import json
import platform
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

SETTLE_S, MEASURE_S = 3.0, 6.0


def smi(query: str) -> list[str]:
    out = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0"],
        capture_output=True,
        text=True,
        check=True,
    )
    return [field.strip() for field in out.stdout.split(",")]


def watts_while(work: Callable[[], object]) -> dict[str, float]:
    """Mean board power, and the clock and how often `work` ran a second, after it has settled."""
    is_done, count = threading.Event(), 0

    def loop() -> None:
        nonlocal count
        while not is_done.is_set():
            for _ in range(8):
                work()
            torch.cuda.synchronize()
            count += 8

    thread = threading.Thread(target=loop)
    thread.start()
    time.sleep(SETTLE_S)
    samples, clocks, begin, before = [], [], time.perf_counter(), count
    while time.perf_counter() - begin < MEASURE_S:
        power, clock = smi("power.draw,clocks.sm")
        samples.append(float(power))
        clocks.append(float(clock))
    rate = (count - before) / (time.perf_counter() - begin)
    is_done.set()
    thread.join()
    mean = sum(samples) / len(samples)
    return {"watts": round(mean, 1), "sm_mhz": round(sum(clocks) / len(clocks)), "per_s": round(rate, 2)}


def works() -> dict[str, tuple[Callable[[], object], float, str]]:
    """Name -> (work, bytes or FLOP of one run, unit)."""
    n = 8192
    large = torch.empty(2 * 1024**3, dtype=torch.float32, device="cuda").uniform_()  # 8 GiB
    matrix = torch.randn(n * 4, n, device="cuda", dtype=torch.bfloat16)
    vector = torch.randn(n, 1, device="cuda", dtype=torch.bfloat16)
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t().contiguous().t()
    one = torch.ones((), device="cuda")
    small = torch.ones(1024, device="cuda")
    flop = 2.0 * n**3

    def fp8() -> object:
        return torch._scaled_mm(a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return {
        "idle": (lambda: time.sleep(0.05), 0.0, ""),
        "read memory (sum of 8 GiB)": (lambda: large.sum(), 4.0 * large.numel(), "TB/s"),
        "matrix by vector, bf16": (lambda: matrix @ vector, 2.0 * matrix.numel(), "TB/s"),
        "matrix by matrix, bf16": (lambda: a @ b, flop, "TFLOP/s"),
        "matrix by matrix, fp8": (fp8, flop, "TFLOP/s"),
        "small launches": (lambda: small.add_(1), 0.0, ""),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    name, driver, limit = smi("name,driver_version,power.limit")
    rows = []
    for label, (work, amount, unit) in works().items():
        row = {"work": label, **watts_while(work)}
        row["share_of_limit"] = round(row["watts"] / float(limit), 3)
        if unit:
            row["reached"] = round(amount * row["per_s"] / 1e12, 2)
            row["unit"] = unit
        rows.append(row)
        print(row, flush=True)
    record = {
        "command": "python benchmarks/board_power.py",
        "date": time.strftime("%Y-%m-%d"),
        "gpu": name,
        "driver": driver,
        "power_limit_watts": float(limit),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": rows,
    }
    if out:
        out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
