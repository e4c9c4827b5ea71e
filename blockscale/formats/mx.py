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


def _floor_log2(x: Tensor) -> Tensor:
    """int32 floor(log2 x) of positive fp32, subnormals included; -150 for zero."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent, mantissa in [.5, 1)
    return torch.where(mantissa == 0, torch.full_like(exponent, -149), exponent) - 1


def scale_from_amax(amax: Tensor, element: Minifloat, rule: ScaleRule = ScaleRule.EVEN) -> Tensor:
    """uint8 E8M0 codes, the shape of `amax`. Exponents are clamped to 2^-127..2^127; a zero block gets the smallest."""
    amax = amax.float()
    if rule is ScaleRule.FIT:
        quotient = amax / element.max
        exponent = _floor_log2(quotient)
        exponent += torch.ldexp(torch.ones_like(quotient), exponent) < quotient
    else:
        exponent = _floor_log2(amax) - element.max_exponent
        if rule is ScaleRule.EVEN:  # 2 - 2^-(m+1) and above rounds up to the next binade
            mantissa = torch.frexp(amax).mantissa * 2
            exponent += mantissa >= 2 - 2.0 ** -(element.mantissa_bits + 1)
    return exponent.clamp(-_BIAS, _BIAS).add(_BIAS).to(torch.uint8)


def scale_values(scale: Tensor) -> Tensor:
    """fp32 values of E8M0 codes; 255 is NaN."""
    values = torch.ldexp(torch.ones(scale.shape, device=scale.device), scale.int() - _BIAS)
    return torch.where(scale == _NAN_CODE, torch.nan, values)


def encode_codes(x: Tensor, scale: Tensor, element: Minifloat) -> Tensor:
    """[..., K] floats and uint8 scales [..., K/32] -> uint8 codes [..., K], one per byte."""
    blocks = x.float().unflatten(-1, (scale.shape[-1], -1))
    # x / 2^e in two steps: 2^-e alone overflows for the smallest scales
    exponent = (scale.int() - _BIAS).unsqueeze(-1)
    half = exponent // 2
    scaled = torch.ldexp(torch.ldexp(blocks, -half), half - exponent)
    return encode(scaled, element).flatten(-2)


def decode_codes(codes: Tensor, scale: Tensor, element: Minifloat) -> Tensor:
    """uint8 codes [..., K] -> fp32 [..., K]; exact unless the product leaves fp32."""
    values = decode_table(element, codes.device)[codes.long()].unflatten(-1, (scale.shape[-1], -1))
    return (values * scale_values(scale).unsqueeze(-1)).flatten(-2)
