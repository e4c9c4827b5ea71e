"""Rounding to small floats, and their codes, in plain torch.

A float with m mantissa bits is uniform inside each binade with step 2^(e-m), and below its smallest normal with that
binade's step. Adding 1.5 * 2^23 * step to a magnitude and taking it away again therefore rounds it to a multiple of
the step, half to even, by the adder's own rounding; and the integer that the sum carries in its low bits, offset by
the binade, is the code itself, because codes of non-negative minifloats count upward without gaps.
"""

import torch
from torch import Tensor

from blockscale.formats.spec import Minifloat

_EXPONENT_MASK = 0x7F800000  # fp32


def _binade_magic(magnitude: Tensor, element: Minifloat) -> Tensor:
    """fp32 addend per element whose unit in the last place is the element's step at that magnitude."""
    min_normal = torch.tensor(element.min_normal).view(torch.int32).item()
    binade = (magnitude.view(torch.int32) & _EXPONENT_MASK).clamp_(min=min_normal).view(torch.float32)
    return binade.mul_(1.5 * 2.0 ** (23 - element.mantissa_bits))


def round_magnitude(magnitude: Tensor, element: Minifloat) -> Tensor:
    """Nearest representable value, half to even, saturating. `magnitude`: fp32, non-negative, any shape; new fp32."""
    magnitude = magnitude.clamp(max=element.max)
    magic = _binade_magic(magnitude, element)
    return (magnitude + magic).sub_(magic)


def encode(x: Tensor, element: Minifloat) -> Tensor:
    """uint8 codes of fp32 `x` (any shape), half to even, saturating at `element.max`.

    NaN saturates; x = -0.0 loses its sign and a negative that rounds to zero keeps it, as Model Optimizer does.
    """
    magnitude = x.abs().nan_to_num_(nan=element.max, posinf=element.max).clamp_(max=element.max)
    magic = _binade_magic(magnitude, element)
    steps, binades = magnitude.add_(magic).view(torch.int32), magic.view(torch.int32)
    steps.sub_(binades)  # multiples of the step
    # 1.5 * 2^23 * step lies in the binade of exponent e + 23 - m; e - (1 - bias) binades lie below it.
    first = torch.tensor(1.5 * 2.0 ** (23 - element.mantissa_bits) * element.min_normal).view(torch.int32).item()
    binades.sub_(first).bitwise_right_shift_(23 - element.mantissa_bits)
    code = steps.add_(binades).to(torch.uint8)
    return code.add_((x < 0).view(torch.uint8), alpha=1 << (element.bits - 1))


def decode_table(element: Minifloat, device: torch.device | str = "cpu") -> Tensor:
    """fp32 [2^bits]: the value of each code. Codes past `element.max` (E4M3's NaN, E5M2's Inf and NaN) give NaN."""
    codes = torch.arange(2**element.bits, dtype=torch.int64)
    mantissa = codes & (2**element.mantissa_bits - 1)
    exponent = (codes >> element.mantissa_bits) & (2**element.exponent_bits - 1)
    fraction = mantissa.double() / 2**element.mantissa_bits + (exponent > 0)
    value = fraction * 2.0 ** (exponent.clamp(min=1) - element.bias).double()
    value = torch.where(value > element.max, torch.nan, value)
    sign = 1.0 - 2.0 * (codes >> (element.bits - 1)).double()
    return (sign * value).float().to(device)
