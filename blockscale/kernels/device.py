"""What a kernel is chosen by: the facts of one device. A machine that one does not have is a plain instance."""

from dataclasses import dataclass
from functools import cache

import torch

from blockscale.errors import FormatError


@dataclass(frozen=True)
class Device:
    """`type`: cpu or cuda. `capability`: (major, minor) of an NVIDIA GPU, None elsewhere.

    num_sms              multiprocessors; on the CPU the threads that torch uses
    shared_memory_bytes  that one thread block may use (opt-in), 0 on the CPU
    l2_bytes             L2 cache of a GPU, 0 on the CPU
    """

    type: str
    capability: tuple[int, int] | None
    name: str
    num_sms: int
    shared_memory_bytes: int
    l2_bytes: int

    @property
    def arch(self) -> str:
        """The target that kernels are compiled for: sm_86, sm_90a, sm_120a ...; "cpu" on the CPU.

        From 9.0 on the instructions worth having belong to one architecture, which is what the `a` says.
        """
        if self.capability is None:
            return self.type
        major, minor = self.capability
        return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def describe(device: torch.device | str) -> Device:
    """The facts of a torch device; cached. FormatError for a kind that has no kernels (mps, meta ...)."""
    device = torch.device(device)
    if device.type == "cpu":
        return _cpu(torch.get_num_threads())
    if device.type != "cuda" or torch.version.cuda is None:
        raise FormatError(f"no kernels for device '{device}'", hint="move the tensors to cpu or to an NVIDIA GPU")
    return _cuda(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _cpu(num_threads: int) -> Device:
    return Device("cpu", None, "CPU", num_threads, 0, 0)


@cache
def _cuda(index: int) -> Device:
    facts = torch.cuda.get_device_properties(index)
    return Device(
        "cuda",
        (facts.major, facts.minor),
        facts.name,
        facts.multi_processor_count,
        facts.shared_memory_per_block_optin,  # type: ignore[attr-defined]  # missing from torch's stubs
        facts.L2_cache_size,
    )
