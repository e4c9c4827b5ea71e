"""Joules that a GPU took, from its own counter."""

from collections.abc import Callable
from typing import Any

import torch


def energy_meter(*devices: torch.device) -> Callable[[], float] | None:
    """A function that reads the GPUs' energy counters in joules, together; None where NVML does not answer.

    A counter is the whole board's, whoever used it. On the CPU there is none.
    """
    if any(device.type != "cuda" for device in devices):
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handles = [_handle(pynvml, device) for device in devices]
        for handle in handles:
            pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)  # older GPUs have no counter
    except pynvml.NVMLError:
        return None
    # it counts millijoules
    return lambda: sum(float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) for handle in handles) / 1e3


def _handle(pynvml: Any, device: torch.device) -> Any:
    """By its UUID: NVML counts GPUs that the process does not see."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(name)
    except TypeError:  # older versions of the package take bytes
        return pynvml.nvmlDeviceGetHandleByUUID(name.encode())
