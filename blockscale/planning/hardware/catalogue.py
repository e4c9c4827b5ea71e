"""The catalogue of GPUs: memory, bandwidth, peaks, links and power, with the range where sources disagree."""

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from blockscale.errors import UsageError


@dataclass(frozen=True)
class Figure:
    """A catalogue value and the range that sources span."""

    value: float
    low: float
    high: float


_AGREED = 1.1  # a range of a tenth widens an interval of 1.39 to 1.41


def _only(value: float) -> Figure:
    return Figure(value, value, value)


@dataclass(frozen=True)
class Gpu:
    """One GPU. Peaks are dense, in FLOP/s by operand type; `link_bytes_per_s` is what one GPU can send.

    native    formats that its tensor cores multiply by themselves
    system    what it is sold in: name, GPUs, kW at most
    """

    key: str
    name: str
    vendor: str
    architecture: str
    capability: str
    memory_bytes: int
    bandwidth: Figure
    peaks: Mapping[str, Figure]
    tdp_watts: Figure | None
    link_name: str
    link_bytes_per_s: float
    link_domain: int
    native: tuple[str, ...]
    system_name: str
    system_gpus: int
    system_kw: Figure | None
    all_in_kw: float | None
    toolkit: str
    driver: str
    cooling: str
    status: str
    confidence: str
    notes: str

    @property
    def ends(self) -> tuple["Gpu", "Gpu"]:
        """(with the most of what sources give it, with the least)."""
        quick = {name: _only(peak.high) for name, peak in self.peaks.items()}
        slow = {name: _only(peak.low) for name, peak in self.peaks.items()}
        return (
            replace(self, bandwidth=_only(self.bandwidth.high), peaks=quick),
            replace(self, bandwidth=_only(self.bandwidth.low), peaks=slow),
        )

    @property
    def is_uncertain(self) -> bool:
        """Whether sources disagree by so much that predictions do."""
        return any(figure.high > _AGREED * figure.low for figure in (self.bandwidth, *self.peaks.values()))

    @property
    def is_roadmap(self) -> bool:
        """Whether it cannot be bought yet, so that its figures are announcements."""
        return any(word in self.status for word in ("announced", "preview"))

    def compute_format(self, weight: str, activation: str | None = None) -> tuple[str, bool]:
        """(operand type that the tensor cores multiply, whether the format is native).

        A format that is not native costs its own bytes and computes in the next wider type that is: NVFP4 on Hopper
        is 4.5 bits of memory and bf16 of arithmetic.
        """
        if activation is None or weight in ("bf16", "int4"):
            return "bf16", weight == "bf16"
        if weight in ("nvfp4", "mxfp4") and activation == weight and weight in self.native:
            return "fp4", True
        has_fp8 = "fp8" in self.native
        if activation in ("fp8", "mxfp8") and has_fp8:
            return "fp8", weight not in ("nvfp4", "mxfp4") or "mxfp8" in self.native
        return "bf16", False

    def peak(self, operand: str) -> Figure:
        """Dense FLOP/s. UsageError where the catalogue has none."""
        if operand not in self.peaks:
            raise UsageError(
                f"{self.name}: no {operand} peak is known", hint="describe the GPU in a file: --gpu my.toml"
            )
        return self.peaks[operand]


@cache
def catalogue() -> dict[str, Gpu]:
    """Every GPU by its key, as shipped with the package."""
    text = resources.files("blockscale.planning.hardware").joinpath("gpus.toml").read_text(encoding="utf-8")
    return {key: _gpu(key, entry) for key, entry in tomllib.loads(text)["gpu"].items()}


def buyable() -> tuple[Gpu, ...]:
    """Those of the catalogue that are no announcements."""
    return tuple(gpu for gpu in catalogue().values() if not gpu.is_roadmap)


@cache
def _aliases() -> dict[str, str]:
    text = resources.files("blockscale.planning.hardware").joinpath("gpus.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text)["gpu"]
    return {alias: key for key, entry in entries.items() for alias in (key, *entry.get("aliases", ()))}


def find_gpu(name: str) -> Gpu:
    """By key, alias or file. UsageError offers the nearest names."""
    if name.endswith(".toml"):
        return read_gpu(Path(name))
    wanted = name.lower().replace("_", "-").replace(" ", "-").removeprefix("nvidia-").removeprefix("amd-")
    known = _aliases()
    if wanted in known:
        return catalogue()[known[wanted]]
    near = difflib.get_close_matches(wanted, known, 3, 0.4)
    raise UsageError(f"no GPU '{name}' in the catalogue", hint="nearest: " + ", ".join(near) if near else _all_names())


def _all_names() -> str:
    return "known: " + ", ".join(catalogue())


def read_gpu(path: Path) -> Gpu:
    """A GPU described by the user, in the catalogue's own form with one entry."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UsageError(f"{path}: cannot be read: {e.strerror}", hint="check the path") from e
    except (ValueError, UnicodeDecodeError) as e:
        raise UsageError(f"{path}: not valid TOML: {e}", hint="see the catalogue's entries for the form") from e
    entries = content.get("gpu", content)
    if isinstance(entries, Mapping) and len(entries) == 1 and isinstance(next(iter(entries.values())), Mapping):
        key, entry = next(iter(entries.items()))
        return _gpu(key, entry, str(path))
    return _gpu(path.stem, content, str(path))


_NEEDED = ("memory_bytes", "bandwidth_tb_per_s", "peak_tflops")


def _gpu(key: str, entry: Mapping[str, Any], where: str = "the catalogue") -> Gpu:
    missing = [name for name in _NEEDED if name not in entry]
    if missing:
        raise UsageError(f"{where}: {key} lacks {', '.join(missing)}", hint="bytes, TB/s, and dense TFLOP/s by type")
    link, system = entry.get("link", {}), entry.get("system", {})
    try:
        gpu = Gpu(
            key=key,
            name=str(entry.get("name", key)),
            vendor=str(entry.get("vendor", "")),
            architecture=str(entry.get("architecture", "")),
            capability=str(entry.get("capability", "")),
            memory_bytes=int(entry["memory_bytes"]),
            bandwidth=_figure(entry["bandwidth_tb_per_s"], 1e12),
            peaks={name: _figure(value, 1e12) for name, value in entry["peak_tflops"].items()},
            tdp_watts=_figure(entry["tdp_watts"]) if "tdp_watts" in entry else None,
            link_name=str(link.get("name", "none")),
            link_bytes_per_s=float(link.get("gb_per_s", 0)) * 1e9 / 2,  # catalogues count both directions
            link_domain=int(link.get("domain", 1)),
            native=_native(entry.get("native", [])),
            system_name=str(system.get("name", "")),
            system_gpus=int(system.get("gpus", 1)),
            system_kw=_figure(system["kw"]) if "kw" in system else None,
            all_in_kw=float(entry["all_in_kw"]) if "all_in_kw" in entry else None,
            toolkit=str(entry.get("toolkit", "")),
            driver=str(entry.get("driver", "")),
            cooling=str(entry.get("cooling", "")),
            status=str(entry.get("status", "")),
            confidence=str(entry.get("confidence", "")),
            notes=str(entry.get("notes", "")),
        )
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as e:
        raise UsageError(
            f"{where}: {key} has a field of the wrong type: {e}", hint="see the catalogue's entries"
        ) from e
    for name, figures in _ranges(gpu).items():
        if not all(0 < figure.low <= figure.value <= figure.high < math.inf for figure in figures):
            raise UsageError(
                f"{where}: {name} of {key} is no positive number", hint="positive, and low <= value <= high"
            )
    for name, (figures, least, most, unit) in _sizes(gpu).items():
        if not all(least <= figure.low <= figure.high <= most for figure in figures):
            raise UsageError(f"{where}: {name} of {key} is far from any GPU's", hint=f"{name}: {unit}")
    if min(gpu.link_domain, gpu.system_gpus) < 1 or not 0 <= gpu.link_bytes_per_s < math.inf:
        raise UsageError(f"{where}: {key} is joined to less than itself", hint="link.domain and system.gpus from 1 on")
    return gpu


def _native(formats: Any) -> tuple[str, ...]:
    if not isinstance(formats, list) or not all(isinstance(name, str) for name in formats):
        raise ValueError("native is a list of formats")
    return tuple(formats)


def _ranges(gpu: Gpu) -> dict[str, tuple[Figure, ...]]:
    """What must be positive, by the field's name."""
    memory = float(gpu.memory_bytes)
    found = {
        "memory_bytes": (Figure(memory, memory, memory),),
        "bandwidth_tb_per_s": (gpu.bandwidth,),
        "peak_tflops": tuple(gpu.peaks.values()),
        "tdp_watts": () if gpu.tdp_watts is None else (gpu.tdp_watts,),
        "system.kw": () if gpu.system_kw is None else (gpu.system_kw,),
    }
    if gpu.all_in_kw is not None:
        found["all_in_kw"] = (_figure(gpu.all_in_kw),)
    return found


def _sizes(gpu: Gpu) -> dict[str, tuple[tuple[Figure, ...], float, float, str]]:
    """What lies outside was given in another unit, by the field's name: figures, least, most, the unit."""
    ranges = _ranges(gpu)
    link = _only(gpu.link_bytes_per_s * 2 / 1e9)
    return {
        "memory_bytes": (ranges["memory_bytes"], 1e9, 1e13, "bytes: 96 GB are 96_000_000_000"),
        "bandwidth_tb_per_s": (ranges["bandwidth_tb_per_s"], 1e10, 1e15, "TB/s: 1792 GB/s are 1.792"),
        "peak_tflops": (ranges["peak_tflops"], 1e11, 1e18, "TFLOP/s: 4 PFLOP/s are 4000"),
        "tdp_watts": (ranges["tdp_watts"], 5, 20_000, "watts of one board"),
        "system.kw": (ranges["system.kw"], 0.01, 5_000, "kilowatts of the system: 10 200 W are 10.2"),
        "all_in_kw": (ranges.get("all_in_kw", ()), 0.01, 50, "kilowatts a GPU"),
        "link.gb_per_s": ((link,), 0, 100_000, "GB/s of a GPU, both directions together"),
    }


def _figure(value: Any, unit: float = 1.0) -> Figure:
    if isinstance(value, Mapping):
        return Figure(*(float(value[name]) * unit for name in ("value", "low", "high")))
    return _only(float(value) * unit)
