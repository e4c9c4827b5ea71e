"""The OCP MX formats: small floats in blocks of 32 that share a power-of-two scale (E8M0).

    x ~= element(code) * 2^(e8m0 - 127)

The specification leaves the choice of exponent open; three rules are in use (`ScaleRule`).
Source: OCP Microscaling Formats (MX) specification v1.0, sections 5 and 6.
"""

from enum import Enum

import torch
from torch import Tensor

from blockscale.formats.minifloat import decode_table, encode
from blockscale.formats.spec import Minifloat

_BIAS, _NAN_CODE = 127, 255


class ScaleRule(Enum):
    """How the shared exponent follows from a block's amax.

    FLOOR  floor(log2 amax) - emax, of the OCP specification; values above the last binade saturate
    EVEN   the same after rounding amax half up to the element's mantissa bits (compressed-tensors, torchao EVEN);
           the lowest error of the three for E2M1
    FIT    ceil(log2(amax / max)): the smallest power of two that never saturates (Model Optimizer, torchao RCEIL);
           the lowest error for E4M3, whose largest value lies well short of the next binade
    """

    FLOOR = "floor"
    EVEN = "even"
    FIT = "fit"


def scale_from_amax(amax: Tensor, element: Minifloat, rule: ScaleRule = ScaleRule.EVEN) -> Tensor:
    """uint8 E8M0 codes, the shape of `amax`. Exponents are clamped to 2^-127..2^127; a zero block gets the smallest."""
    amax = amax.float()
    # Mantissas in [.5, 1) are compared instead of dividing, which would round where the quotient is subnormal.
    mantissa, exponent = torch.frexp(amax)
    exponent = torch.where(amax == 0, -149, exponent) - (element.max_exponent + 1)
    if rule is ScaleRule.FIT:
        exponent += mantissa > element.max * 2.0 ** -(element.max_exponent + 1)
    elif rule is ScaleRule.EVEN:  # 2 - 2^-(m+1) times a power of two and above rounds up to the next binade
        exponent += mantissa >= 1 - 2.0 ** -(element.mantissa_bits + 2)
    return exponent.clamp(-_BIAS, _BIAS).add(_BIAS).to(torch.uint8)


def scale_values(scale: Tensor) -> Tensor:
    """fp32 values of E8M0 codes; 255 is NaN."""
    values = torch.ldexp(torch.ones(scale.shape, device=scale.device), scale.int() - _BIAS)
    return torch.where(scale == _NAN_CODE, torch.nan, values)


def encode_codes(x: Tensor, scale: Tensor, element: Minifloat) -> Tensor:
    """[..., K] floats and uint8 scales [..., K/32] -> uint8 codes [..., K], one per byte."""
    blocks = x.float().unflatten(-1, (scale.shape[-1], -1))
    # 2^-127..2^127 are fp32 numbers: the multiplication is exact until it underflows, far below the element's range
    return encode(torch.ldexp(blocks, _BIAS - scale.int().unsqueeze(-1)), element).flatten(-2)


def decode_codes(codes: Tensor, scale: Tensor, element: Minifloat) -> Tensor:
    """uint8 codes [..., K] -> fp32 [..., K]; exact unless the product leaves fp32."""
    values = decode_table(element, codes.device).index_select(0, codes.reshape(-1).int())
    values = values.view(*scale.shape, -1)  # [..., K/32, 32]
    return values.mul_(scale_values(scale).unsqueeze(-1)).flatten(-2)
