"""What small kernels between two linears share: they are links of a chain of programmatic launches.

A kernel that calls `enter_chain` lets the one behind it start at once, so that a linear brings its first weights while
the small kernel still runs; and itself waits there until what is ahead of it has ended. Whatever it reads that an
earlier kernel wrote, and all that it writes, comes after the call.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from blockscale.kernels.device import describe


@triton.jit
def enter_chain(IS_CHAINED: tl.constexpr):
    """The end of what may run ahead. Without effect unless IS_CHAINED."""
    if IS_CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def chained(device: torch.device) -> dict[str, Any]:
    """Launch options of such a kernel: sm_90 and later know programmatic launches."""
    capability = describe(device).capability if device.type == "cuda" else None
    if capability is None or capability < (9, 0):
        return {"IS_CHAINED": False}
    return {"IS_CHAINED": True, "launch_pdl": True}
