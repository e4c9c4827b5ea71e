"""A global scale moved into the norm in front of its linears, for graphs that ignore `.scale`.

y = g W x with x = n(h) * w becomes y = W' x' with x' = n(h) * (f w), f = g 2^k and W' = W 2^-k: the norm's weights,
fp32 in the file, take in f, and 2^k comes off the E4M3 scales, which is exact as long as none leaves its range. Without
k, x' would be too small for the fp16 scales of llama.cpp's 8-bit activations.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.checkpoint.linear import QuantizedLinear

MIN_FACTOR = 2.0**-8  # x' of a tenth of x's usual size still has an fp16 scale of full precision


@dataclass(frozen=True)
class Fold:
    """`factor` for the norm's weights; scales of the linears are divided by 2^`shift`."""

    factor: float
    shift: int


def find_fold(linears: Sequence[QuantizedLinear]) -> Fold | None:
    """For all NVFP4 linears behind one norm. None where their global scales differ, or scales leave no room."""
    scales = {linear.weight.global_scale.item() for linear in linears if linear.weight.global_scale is not None}
    if len(scales) != 1:
        return None
    global_scale = scales.pop()
    shift = max(0, round(-math.log2(global_scale)))
    while shift and any(lowered(linear, shift) is None for linear in linears):
        shift -= 1
    factor = global_scale * 2.0**shift
    return Fold(factor, shift) if factor >= MIN_FACTOR else None


def lowered(linear: QuantizedLinear, shift: int) -> Tensor | None:
    """The block scales [..., K/16] over 2^shift, float8_e4m3fn; None unless that is exact for every block that has a
    code other than zero."""
    scale = linear.weight.block_scale
    exact = scale.float() * 2.0**-shift
    result = exact.to(torch.float8_e4m3fn)
    changed = result.float() != exact
    if changed.any():
        magnitudes = linear.weight.packed.unflatten(-1, (scale.shape[-1], -1)) & 0x77
        if (changed & magnitudes.ne(0).any(-1)).any():
            return None
    return result
