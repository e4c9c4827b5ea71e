"""Which kernel serves an op on a device, and why.

Every kernel names the compute capabilities that it was compiled and checked for, one by one: a new member of a family
is served by what is known to run there, and by plain torch where nothing is.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from blockscale.errors import MissingDependencyError
from blockscale.kernels.cpu.build import find_compiler
from blockscale.kernels.device import Device
from blockscale.kernels.prepare import Layout


class Op(Enum):
    """What kernels do. The values are the names of the ops in `torch.ops.blockscale`."""

    LINEAR_W4A16 = "linear_w4a16"
    LINEAR_W4A8 = "linear_w4a8"
    LINEAR_W4A4 = "linear_w4a4"
    QUANTIZE_NVFP4 = "quantize_nvfp4"
    RMS_NORM_QUANTIZE = "rms_norm_quantize"
    SILU_MUL_QUANTIZE = "silu_mul_quantize"
    HADAMARD_QUANTIZE = "hadamard_quantize"
    QUANTIZE_WEIGHT_SWEEP = "quantize_weight_sweep"
    QUANTIZE_KV = "quantize_kv"
    ADD_RMS_NORM = "add_rms_norm"
    GATED = "gated"
    ROTATE_INTO_CACHE = "rotate_into_cache"
    MOE_W4A16 = "moe_w4a16"
    ATTENTION_DECODE = "attention_decode"
    ATTENTION_PREFILL = "attention_prefill"
    ATTENTION_MLA = "attention_mla"


class Mode(Enum):
    """NATIVE     the device's own instructions take the operands as they are stored
    FUSED      decoded or encoded within the kernel, next to the arithmetic, at the speed of the stored bytes
    EMULATED   the result that another device's instructions would give, by other instructions
    REFERENCE  plain torch: right, and slow
    """

    NATIVE = "native"
    FUSED = "fused"
    EMULATED = "emulated"
    REFERENCE = "reference"


class Kernel(Enum):
    """A family of kernels: one launcher. The values are names to read."""

    CUDA_LINEAR_SMALL = "cuda/linear_small"
    CUDA_LINEAR_LARGE = "cuda/linear_large"
    CUDA_LINEAR_W4A8 = "cuda/linear_w4a8"
    CUDA_LINEAR_E4M3 = "cuda/linear_w4a8, E4M3 kept"
    HUMMING = "humming"
    TRITON_LINEAR = "triton/linear"
    TRITON_LINEAR_W4A4 = "triton/linear_w4a4"
    TRITON_QUANTIZE = "triton/quantize"
    TRITON_CHAIN = "triton/chain"
    CUDA_MOE = "cuda/moe"
    TRITON_MOE = "triton/moe"
    TRITON_ATTENTION = "triton/attention"
    CPU_LINEAR = "cpu/linear"
    CPU_QUANTIZE = "cpu/quantize"
    TORCH = "torch"


@dataclass(frozen=True)
class Choice:
    """A kernel that serves an op on a device. `reason`: why this one and none before it in the op's list."""

    op: Op
    kernel: Kernel
    mode: Mode
    reason: str
    layout: Layout | None = None
    min_m: int = 1
    max_m: int | None = None

    def is_for(self, m: int) -> bool:
        """Products with `m` rows of activations."""
        return max(1, m) >= self.min_m and (self.max_m is None or m <= self.max_m)


@dataclass(frozen=True)
class Candidate:
    """A kernel that an op may be served by.

    capabilities  exactly where; None: on the CPU; empty: anywhere
    layout        of the weight it reads, for ops that have one
    min_m, max_m  rows of activations that it is for
    """

    kernel: Kernel
    mode: Mode
    capabilities: frozenset[tuple[int, int]] | None
    layout: Layout | None = None
    min_m: int = 1
    max_m: int | None = None


HOPPER = frozenset({(9, 0)})
CUDA_MOE = frozenset({(9, 0), (10, 0), (12, 0)})  # those that moe.cu is compiled for in the tests
# Each was compiled for with Triton 3.6 and its machine code read; 11.0 from Triton 3.9 on
TRITON = frozenset({(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)})
_TRITON_NEEDED = {(11, 0): (3, 9)}
_TRITON_LEAST = (3, 6)
_ANYWHERE: frozenset[tuple[int, int]] = frozenset()

_TORCH = Candidate(Kernel.TORCH, Mode.REFERENCE, _ANYWHERE, Layout.ROW_MAJOR)
CANDIDATES: dict[Op, tuple[Candidate, ...]] = {
    Op.LINEAR_W4A16: (
        Candidate(Kernel.CUDA_LINEAR_SMALL, Mode.FUSED, HOPPER, Layout.FRAGMENTS, max_m=32),
        Candidate(Kernel.CUDA_LINEAR_LARGE, Mode.FUSED, HOPPER, Layout.FRAGMENTS),
        Candidate(Kernel.TRITON_LINEAR, Mode.FUSED, TRITON, Layout.ROW_MAJOR),
        Candidate(Kernel.HUMMING, Mode.FUSED, TRITON - {(11, 0)}, Layout.HUMMING),
        Candidate(Kernel.CPU_LINEAR, Mode.FUSED, None, Layout.CPU),
        _TORCH,
    ),
    Op.LINEAR_W4A8: (
        Candidate(Kernel.CUDA_LINEAR_W4A8, Mode.FUSED, HOPPER, Layout.FRAGMENTS),
        Candidate(Kernel.CUDA_LINEAR_E4M3, Mode.FUSED, HOPPER, Layout.E4M3),
        Candidate(Kernel.CPU_LINEAR, Mode.FUSED, None, Layout.CPU),
        _TORCH,
    ),
    Op.LINEAR_W4A4: (
        Candidate(Kernel.TRITON_LINEAR_W4A4, Mode.EMULATED, TRITON, Layout.ROW_MAJOR),
        Candidate(Kernel.CPU_LINEAR, Mode.EMULATED, None, Layout.CPU),
        _TORCH,
    ),
    Op.QUANTIZE_NVFP4: (
        Candidate(Kernel.TRITON_QUANTIZE, Mode.FUSED, TRITON),
        Candidate(Kernel.CPU_QUANTIZE, Mode.FUSED, None),
        _TORCH,
    ),
    Op.RMS_NORM_QUANTIZE: (Candidate(Kernel.TRITON_QUANTIZE, Mode.FUSED, TRITON), _TORCH),
    Op.SILU_MUL_QUANTIZE: (Candidate(Kernel.TRITON_QUANTIZE, Mode.FUSED, TRITON), _TORCH),
    Op.HADAMARD_QUANTIZE: (Candidate(Kernel.TRITON_QUANTIZE, Mode.FUSED, TRITON), _TORCH),
    Op.QUANTIZE_WEIGHT_SWEEP: (Candidate(Kernel.TRITON_QUANTIZE, Mode.FUSED, TRITON), _TORCH),
    Op.QUANTIZE_KV: (Candidate(Kernel.TRITON_QUANTIZE, Mode.FUSED, TRITON), _TORCH),
    Op.ADD_RMS_NORM: (Candidate(Kernel.TRITON_CHAIN, Mode.FUSED, TRITON), _TORCH),
    Op.GATED: (Candidate(Kernel.TRITON_CHAIN, Mode.FUSED, TRITON), _TORCH),
    Op.ROTATE_INTO_CACHE: (Candidate(Kernel.TRITON_CHAIN, Mode.FUSED, TRITON), _TORCH),
    Op.MOE_W4A16: (
        Candidate(Kernel.CUDA_MOE, Mode.FUSED, CUDA_MOE, Layout.ROW_MAJOR),
        Candidate(Kernel.TRITON_MOE, Mode.FUSED, TRITON, Layout.ROW_MAJOR),
        _TORCH,
    ),
    Op.ATTENTION_DECODE: (Candidate(Kernel.TRITON_ATTENTION, Mode.FUSED, TRITON), _TORCH),
    Op.ATTENTION_PREFILL: (Candidate(Kernel.TRITON_ATTENTION, Mode.FUSED, TRITON), _TORCH),
    Op.ATTENTION_MLA: (Candidate(Kernel.TRITON_ATTENTION, Mode.FUSED, TRITON), _TORCH),
}


@cache
def choose(op: Op, device: Device) -> Choice:
    """The first of the op's candidates that runs on `device` with what is installed."""
    return usable(op, device)[0]


@cache
def usable(op: Op, device: Device) -> tuple[Choice, ...]:
    """Every candidate that runs on `device`, the first choice first; plain torch is always the last."""
    missing: list[str] = []
    found = []
    for candidate in CANDIDATES[op]:
        if not _is_for(candidate, device):
            continue
        obstacle = "" if candidate.kernel is Kernel.TORCH else _obstacle(candidate.kernel, device)
        if obstacle:
            missing.append(f"{candidate.kernel.value}: {obstacle}")
            continue
        if candidate.kernel is Kernel.TORCH:
            reason = "; ".join(missing) or f"no kernel for {_where(device)}"
        else:
            reason = "; ".join((f"{_where(device)}, {_DOES[candidate.mode]}", *missing))
        rows = candidate.min_m, candidate.max_m
        found.append(Choice(op, candidate.kernel, candidate.mode, reason, candidate.layout, *rows))
    return tuple(found)


_DOES = {
    Mode.NATIVE: "multiplied as stored",
    Mode.FUSED: "decoded or encoded inside the kernel",
    Mode.EMULATED: "the device has no FP4 arithmetic here: the same bytes by 16-bit arithmetic",
}


def choices(device: Device) -> Iterator[Choice]:
    """What serves each op, in the order of `Op`."""
    for op in Op:
        yield choose(op, device)


def _is_for(candidate: Candidate, device: Device) -> bool:
    if candidate.capabilities is None:
        return device.type == "cpu"
    return not candidate.capabilities or device.capability in candidate.capabilities


def _where(device: Device) -> str:
    return "CPU" if device.capability is None else "capability {}.{}".format(*device.capability)


def _obstacle(kernel: Kernel, device: Device) -> str:
    """What keeps `kernel` from running with what is installed; empty where nothing does."""
    family = kernel.value.split("/")[0]
    if family == "triton":
        needed = _TRITON_NEEDED.get(device.capability or (0, 0), _TRITON_LEAST)
        return _older("triton", needed)
    if kernel is Kernel.HUMMING:
        return "" if find_spec("humming") else "humming-kernels is not installed"
    if family == "cuda":
        return "" if find_spec("cuda") and find_spec("cuda.bindings") else "cuda-bindings is not installed"
    try:
        find_compiler()
    except MissingDependencyError as error:
        return f"{error}; {error.hint}"
    return ""


def _older(package: str, needed: tuple[int, ...]) -> str:
    wanted = ".".join(map(str, needed))
    try:
        have = version(package)
    except PackageNotFoundError:
        return f"{package} is not installed ({wanted} or later is needed)"
    numbers = tuple(map(int, re.findall(r"\d+", have)[: len(needed)]))
    return f"{package} {have} is too old ({wanted} is needed)" if numbers < needed else ""
