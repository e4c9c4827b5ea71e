"""What this machine has: GPUs and the versions that decide what they run. Imports no torch."""

import importlib.metadata
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

from blockscale.planning.hardware.catalogue import Gpu, catalogue

_QUERY = "name,driver_version,memory.total,compute_cap"
_TIMEOUT_S = 20


@dataclass(frozen=True)
class Device:
    """A GPU that the driver shows. `memory_bytes` as it reports them."""

    name: str
    capability: str
    memory_bytes: int


@dataclass(frozen=True)
class Machine:
    """Versions are None where something is not installed or was not said; `toolkit`: CUDA or ROCm that torch was
    built with. `reason`: why no device is seen."""

    devices: tuple[Device, ...] = ()
    driver: str | None = None
    toolkit: str | None = None
    torch: str | None = None
    triton: str | None = None
    reason: str = ""


def this_machine() -> Machine:
    """Through NVML where its Python package is installed, else through nvidia-smi."""
    torch, toolkit = _installed_torch()
    devices, driver, reason = _by_nvml() or _by_nvidia_smi()
    return Machine(devices, driver, toolkit, torch, _version("triton"), reason)


_Seen = tuple[tuple[Device, ...], str | None, str]


def _by_nvml() -> _Seen | None:
    """None where the package is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as e:
        return (), None, f"NVML finds no GPU: {e}"
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        devices = tuple(
            Device(
                _text(pynvml.nvmlDeviceGetName(handle)),
                ".".join(map(str, pynvml.nvmlDeviceGetCudaComputeCapability(handle))),
                int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            )
            for handle in handles
        )
        return devices, _text(pynvml.nvmlSystemGetDriverVersion()), "" if devices else "NVML counts no GPU"
    except pynvml.NVMLError as e:
        return (), None, f"NVML fails: {e}"
    finally:
        pynvml.nvmlShutdown()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _by_nvidia_smi() -> _Seen:
    program = shutil.which("nvidia-smi")
    if program is None:
        return (), None, "no NVIDIA driver is installed (neither NVML's package nor nvidia-smi is here)"
    try:
        run = subprocess.run(
            [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return (), None, f"nvidia-smi does not answer: {e}"
    if run.returncode:
        said = (run.stderr or run.stdout).strip().splitlines()
        return (), None, f"nvidia-smi fails: {said[0] if said else run.returncode}"
    return parse_nvidia_smi(run.stdout)


def parse_nvidia_smi(output: str) -> _Seen:
    """Of the query above: name, driver, MiB, compute capability."""
    devices, driver = [], None
    for line in output.splitlines():
        fields = [field.strip() for field in line.rsplit(",", 3)]
        if len(fields) == 4 and fields[2].isdigit():
            devices.append(Device(fields[0], fields[3], int(fields[2]) * 1024 * 1024))
            driver = fields[1]
    return tuple(devices), driver, "" if devices else "nvidia-smi lists no GPU"


def _installed_torch() -> tuple[str | None, str | None]:
    """(version, CUDA or ROCm of its build), read from its files."""
    version = _version("torch")
    if version is None:
        return None, None
    try:
        located = importlib.metadata.distribution("torch").locate_file("torch/version.py")
        with open(str(located), encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return version, None
    for key, name in (("cuda", "CUDA"), ("hip", "ROCm")):
        for line in lines:
            left, _, right = line.partition("=")
            value = right.strip().strip("'\"")
            if left.split(":")[0].strip() == key and value not in ("None", ""):
                return version, f"{name} {value}"
    return version, None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def catalogue_entry(device: Device) -> Gpu | None:
    """The catalogue's GPU that a device is: same capability, a name in common, the nearest memory."""
    words = _words(device.name) - {"nvidia", "geforce", "gpu"}
    found = [
        (len(words & _words(gpu.name)), -abs(gpu.memory_bytes - device.memory_bytes), gpu)
        for gpu in catalogue().values()
        if gpu.capability == device.capability
    ]
    near = [item for item in found if item[0] and -item[1] < 0.1 * item[2].memory_bytes]
    return max(near, key=lambda item: item[:2])[2] if near else None


def _words(name: str) -> set[str]:
    return set(name.lower().replace("-", " ").replace("(", " ").replace(")", " ").split())
