"""The verb `bench kernels` but for names of models: what is measured by default, and the table that comes of it."""

import datetime
import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from blockscale.errors import OutputError, UsageError
from blockscale.formats.spec import get_format
from blockscale.kernels.bench.linear import Progress, Row, bench_linears, table_rows
from blockscale.kernels.device import describe
from blockscale.kernels.measured import Table, to_dict
from blockscale.kernels.prepare import FORMATS

GPU_M, CPU_M = (1, 8, 16, 64, 128, 1024), (1, 8)
_PACKAGES = ("torch", "triton", "nvidia-cuda-nvrtc", "humming-kernels", "vllm")


def bench_kernels(
    shapes: Sequence[tuple[int, int]],
    m: Sequence[int] | None = None,
    *,
    format: str = "nvfp4",
    device: str | None = None,
    table: Path | None = None,
    command: str = "",
    progress: Progress | None = None,
) -> list[Row]:
    """Rows of `bench_linears`; `table` is written, too, if it is given. UsageError for what cannot be measured."""
    fmt = get_format(format)
    if fmt not in FORMATS:
        raise UsageError(f"no kernels for {fmt.name}", hint="formats: " + ", ".join(f.name for f in FORMATS))
    wanted = m if m is not None else GPU_M if (device or default_device()).startswith("cuda") else CPU_M
    if not shapes or not wanted or min(wanted) < 1 or min(min(s) for s in shapes) < 1:
        raise UsageError("nothing to measure", hint="shapes N,K and rows M are 1 or more")
    place = _device(device or default_device())
    if table is not None and place.type != "cuda":
        raise UsageError("a table is kept of a GPU", hint="leave --table away on the CPU")
    rows = bench_linears(shapes, wanted, place, fmt=fmt, progress=progress)
    if table is not None:
        _write(table, rows, place, command)
    return rows


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"no device '{name}'", hint="cuda, cuda:1 or cpu") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"no device '{name}': torch sees {torch.cuda.device_count()} GPUs", hint="blockscale doctor")
    describe(device)
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _write(path: Path, rows: Sequence[Row], device: torch.device, command: str) -> None:
    facts = describe(device)
    assert facts.capability is not None
    made = Table(facts.name, facts.capability, str(datetime.date.today()), _versions(), command, table_rows(rows))
    try:
        path.write_text(json.dumps(to_dict(made), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror}", hint="give a file in a folder that can be written") from error


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
