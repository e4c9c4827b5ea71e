"""Which kernel serves each op on this machine, and whether it computes what it should."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch

from blockscale.kernels.device import Device, describe
from blockscale.kernels.select import Choice, Kernel, Op, usable
from blockscale.kernels.selftest.attention import test_attention, test_mla
from blockscale.kernels.selftest.between import test_between
from blockscale.kernels.selftest.linear import test_linear
from blockscale.kernels.selftest.moe import test_moe
from blockscale.kernels.selftest.outcome import Mismatch
from blockscale.kernels.selftest.quantize import test_quantizer

_NOT_RUN = "not run"
_THREADS = 8
_TESTS: dict[Op, Callable[[Choice, torch.device], str]] = {
    Op.LINEAR_W4A16: test_linear,
    Op.LINEAR_W4A8: test_linear,
    Op.LINEAR_W4A4: test_linear,
    Op.QUANTIZE_NVFP4: test_quantizer,
    Op.RMS_NORM_QUANTIZE: test_quantizer,
    Op.SILU_MUL_QUANTIZE: test_quantizer,
    Op.HADAMARD_QUANTIZE: test_quantizer,
    Op.QUANTIZE_WEIGHT_SWEEP: test_quantizer,
    Op.QUANTIZE_KV: test_quantizer,
    Op.ADD_RMS_NORM: test_between,
    Op.GATED: test_between,
    Op.ROTATE_INTO_CACHE: test_between,
    Op.MOE_W4A16: test_moe,
    Op.ATTENTION_DECODE: test_attention,
    Op.ATTENTION_PREFILL: test_attention,
    Op.ATTENTION_MLA: test_mla,
}


@dataclass(frozen=True)
class Verdict:
    """One kernel of one op on one device.

    self_test  "passed", "failed" or "not run"; `detail` says what was compared, or what is wrong
    seconds    that the test took, building the kernel included
    """

    device: Device
    choice: Choice
    self_test: str
    detail: str
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        capability = self.device.capability
        return {
            "op": self.choice.op.value,
            "kernel": self.choice.kernel.value,
            "mode": self.choice.mode.value,
            "self_test": self.self_test,
            "detail": self.detail,
            "reason": self.choice.reason,
            "device": self.device.name,
            "capability": None if capability is None else "{}.{}".format(*capability),
            "seconds": round(self.seconds, 2),
        }


def self_test(*, is_run: bool = True) -> Iterator[Verdict]:
    """A verdict for each op and each kernel that may be called for it here, as they are found.

    The GPUs of this machine, one of each kind, or the CPU where torch sees none.
    """
    for place in devices():
        device = describe(place)
        every = [choice for op in Op for choice in serving(op, device)]
        if not is_run:
            yield from (Verdict(device, choice, _NOT_RUN, "", 0.0) for choice in every)
            continue
        # Nearly all of the time is that of compilers, which leave the interpreter's lock alone.
        with ThreadPoolExecutor(_THREADS if device.type == "cuda" else 1) as threads:
            yield from threads.map(_verdict, every, repeat(device), repeat(place))


def devices() -> tuple[torch.device, ...]:
    """One GPU of each kind, or the CPU."""
    kinds: dict[Device, torch.device] = {}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        place = torch.device("cuda", index)
        kinds.setdefault(describe(place), place)
    return tuple(kinds.values()) or (torch.device("cpu"),)


def serving(op: Op, device: Device) -> tuple[Choice, ...]:
    """The first choice, and those that the number of rows may bring in its place: they read the same layout."""
    able = usable(op, device)
    first = able[0]
    return (first, *(c for c in able[1:] if c.layout is first.layout and c.kernel is not Kernel.TORCH and first.layout))


def _verdict(choice: Choice, device: Device, place: torch.device) -> Verdict:
    begin = time.perf_counter()
    try:
        if place.type == "cuda":
            torch.cuda.set_device(place)  # each thread has a device of its own
        state, detail = "passed", _TESTS[choice.op](choice, place)
    except Mismatch as error:
        state, detail = "failed", str(error)
    except Exception as error:  # a kernel that does not build or run is a finding, too
        state, detail = "failed", f"{type(error).__name__}: {error}".split("\n")[0]
    return Verdict(device, choice, state, detail, time.perf_counter() - begin)
