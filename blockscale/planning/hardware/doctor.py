"""What a machine runs natively, what it emulates, and which version stands in the way."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from blockscale.errors import UsageError
from blockscale.planning.hardware.catalogue import Gpu, find_gpu
from blockscale.planning.hardware.machine import Device, Machine, catalogue_entry, this_machine

FORMATS = ("nvfp4", "mxfp4", "mxfp6", "mxfp8", "fp8", "int4", "bf16")
KERNELS_ELSEWHERE = "asked of the machine itself: blockscale doctor, there"


class Mode(Enum):
    NATIVE = "native"
    EMULATED = "emulated"
    IMPOSSIBLE = "impossible"


@dataclass(frozen=True)
class FormatVerdict:
    """How a GPU with these versions runs a format. `operand`: what its tensor cores multiply; None: nothing.

    blocking  the versions that stand in the way, each as `driver 550 (570.26 is needed)`
    """

    format: str
    mode: Mode
    operand: str | None
    reason: str
    blocking: tuple[str, ...] = ()


@dataclass(frozen=True)
class GpuDiagnosis:
    """`is_known`: it is in the catalogue or was described. `count`: so many of it."""

    name: str
    count: int
    memory_bytes: int
    capability: str
    is_known: bool
    formats: tuple[FormatVerdict, ...]


@dataclass(frozen=True)
class Diagnosis:
    """`unchecked`: versions that were not given or found, so that nothing is said of them.

    ops  which kernel serves each op, and its self-test; None where the machine's own torch was not asked
    """

    machine: Machine
    gpus: tuple[GpuDiagnosis, ...]
    unchecked: tuple[str, ...]
    is_described: bool
    ops: tuple[Mapping[str, Any], ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data. `ops` is null, not empty, where it is not known which kernel serves what."""
        return {
            "driver": self.machine.driver,
            "toolkit": self.machine.toolkit,
            "torch": self.machine.torch,
            "triton": self.machine.triton,
            "described": self.is_described,
            "reason": self.machine.reason,
            "gpus": [
                {**asdict(gpu), "formats": [{**asdict(f), "mode": f.mode.value} for f in gpu.formats]}
                for gpu in self.gpus
            ],
            "formats": {f.format: f.mode.value for f in self.gpus[0].formats} if self.gpus else {},
            "unchecked": list(self.unchecked),
            "ops": None if self.ops is None else [dict(op) for op in self.ops],
        }


def diagnose(
    gpu: Gpu | None = None,
    *,
    driver: str | None = None,
    cuda: str | None = None,
    rocm: str | None = None,
    torch: str | None = None,
    triton: str | None = None,
) -> Diagnosis:
    """Of this machine, or of one that is described by its GPU and versions. UsageError for what is no version.

    Versions that are given take the place of those that were found.
    """
    given = {"driver": driver, "cuda": cuda, "rocm": rocm, "torch": torch, "triton": triton}
    for name, value in given.items():
        if value is not None and version_numbers(value) is None:
            raise UsageError(f"--{name} {value}: not a version", hint="numbers with dots, like 570.26")
    if cuda is not None and rocm is not None:
        raise UsageError("--cuda and --rocm are two toolkits", hint="give one of them")
    machine = Machine() if gpu is not None else this_machine()
    toolkit = f"CUDA {cuda}" if cuda else f"ROCm {rocm}" if rocm else machine.toolkit
    machine = replace(
        machine,
        driver=driver or machine.driver,
        toolkit=toolkit,
        torch=torch or machine.torch,
        triton=triton or machine.triton,
    )
    if gpu is not None:
        checked = GpuDiagnosis(gpu.name, 1, gpu.memory_bytes, gpu.capability, True, tuple(verdicts(gpu, machine)))
        gpus: tuple[GpuDiagnosis, ...] = (checked,)
    else:
        gpus = tuple(_own(device, machine) for device in dict.fromkeys(machine.devices))
    found = {"driver": machine.driver, "toolkit": machine.toolkit, "torch": machine.torch, "triton": machine.triton}
    unchecked = tuple(name for name, value in found.items() if value is None)
    return Diagnosis(machine, gpus, unchecked, gpu is not None)


def _own(device: Device, machine: Machine) -> GpuDiagnosis:
    count = machine.devices.count(device)
    gpu = catalogue_entry(device)
    formats = () if gpu is None else tuple(verdicts(gpu, machine, must_be_installed=True))
    return GpuDiagnosis(device.name, count, device.memory_bytes, device.capability, gpu is not None, formats)


# torch that has a type for the format's elements or scales, and whose builds know the GPU that multiplies it.
_TORCH_NEEDED = {"nvfp4": "2.8", "mxfp4": "2.8", "mxfp6": "2.7", "mxfp8": "2.7", "fp8": "2.1"}
_TRITON_NEEDED = {"nvfp4": "3.3", "mxfp4": "3.3", "mxfp6": "3.3", "mxfp8": "3.3", "fp8": "2.1"}


def verdicts(gpu: Gpu, machine: Machine, *, must_be_installed: bool = False) -> Iterator[FormatVerdict]:
    """One for each format. `must_be_installed`: a version that was not found stands in the way, too."""
    base = tuple(_blocking(gpu, machine, must_be_installed))
    for fmt in FORMATS:
        operand = _operand(gpu, fmt)
        if base:
            yield FormatVerdict(fmt, Mode.IMPOSSIBLE, None, f"{gpu.name} does not run with these versions", base)
        elif operand != fmt:
            yield FormatVerdict(fmt, Mode.EMULATED, operand, _emulation(fmt, operand))
        elif own := tuple(_too_old(fmt, machine)):
            yield FormatVerdict(fmt, Mode.EMULATED, "bf16", _emulation(fmt, "bf16"), own)
        else:
            yield FormatVerdict(fmt, Mode.NATIVE, operand, "the tensor cores multiply it as it is stored")


def _operand(gpu: Gpu, fmt: str) -> str:
    """What the tensor cores multiply: the format itself where they can."""
    capability = version_numbers(gpu.capability)
    if gpu.vendor == "NVIDIA" and capability is not None and capability < (8, 0):
        return "fp16"
    return fmt if fmt == "bf16" or fmt in gpu.native else "bf16"


def _emulation(fmt: str, operand: str) -> str:
    return f"stored in {fmt}, so memory is saved; widened to {operand} before the tensor cores multiply it"


# The first driver of a CUDA's major version, and the first torch whose builds know a major capability.
_DRIVER_OF_CUDA = {11: "450.80", 12: "525.60", 13: "580.65"}
_TORCH_OF_CAPABILITY = {8: "1.8", 9: "2.0", 10: "2.7", 12: "2.7"}


def _blocking(gpu: Gpu, machine: Machine, must_be_installed: bool) -> Iterator[str]:
    """Versions too old for the GPU itself, whatever the format."""
    capability = version_numbers(gpu.capability) if gpu.vendor == "NVIDIA" else None
    yield from _older("driver", machine.driver, _driver(gpu))
    if capability is not None:
        yield from _older("torch", machine.torch, _TORCH_OF_CAPABILITY.get(capability[0]))
    needed = _toolkit(gpu)
    if needed is not None:
        name, least = needed
        have = machine.toolkit
        if have is not None and not have.startswith(name):
            yield f"{have} ({name} {least} is needed)"
        elif have is not None:
            own = have.removeprefix(name).strip()
            yield from _older(name, own, least)
            if name == "CUDA":
                numbers = version_numbers(own) or (0,)
                for blocked in _older("driver", machine.driver, _DRIVER_OF_CUDA.get(numbers[0])):
                    yield f"{blocked.removesuffix(')')} by {have})"
        elif must_be_installed and machine.torch is not None:
            yield f"torch {machine.torch} is built for the CPU alone ({name} {least} is needed)"
    if must_be_installed and machine.torch is None:
        yield "torch is not installed"


def _too_old(fmt: str, machine: Machine) -> Iterator[str]:
    yield from _older("torch", machine.torch, _TORCH_NEEDED.get(fmt))
    yield from _older("triton", machine.triton, _TRITON_NEEDED.get(fmt))


def _older(name: str, have: str | None, needed: str | None) -> Iterator[str]:
    own, least = version_numbers(have or ""), version_numbers(needed or "")
    if own is not None and least is not None and own < least[: len(own)]:  # 570 may be any of that branch
        yield f"{name} {have} ({needed} is needed)"


def version_numbers(text: str) -> tuple[int, ...] | None:
    """`570.26` as (570, 26), without what follows the numbers; None where there are none in front."""
    match = re.match(r"\d+(?:\.\d+)*", text.strip())
    return tuple(map(int, match[0].split("."))) if match else None


def _driver(gpu: Gpu) -> str | None:
    """AMD's driver comes with ROCm and is judged by it."""
    return gpu.driver if version_numbers(gpu.driver) else None


def _toolkit(gpu: Gpu) -> tuple[str, str] | None:
    match = re.match(r"(CUDA|ROCm) (\d+(?:\.\d+)*)", gpu.toolkit)
    return (match[1], match[2]) if match else None


def doctor(gpu: str | None = None, **versions: str | None) -> Diagnosis:
    """The verb: `gpu` is a name of the catalogue or a .toml file; see `diagnose` for the versions."""
    return diagnose(None if gpu is None else find_gpu(gpu), **versions)
