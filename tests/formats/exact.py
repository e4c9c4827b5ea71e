"""Rounding by exhaustive search in float64: slow, and with nothing in common with the code under test."""

import torch
from torch import Tensor

from blockscale.formats.spec import Minifloat


def field_value(code: int, element: Minifloat) -> float:
    """The value of a code from its three bit fields; what lies past `element.max` is NaN."""
    mantissa = code % 2**element.mantissa_bits
    exponent = code // 2**element.mantissa_bits % 2**element.exponent_bits
    is_negative = code // 2 ** (element.mantissa_bits + element.exponent_bits) == 1
    if exponent == 0:
        value = mantissa * 2.0 ** (1 - element.bias - element.mantissa_bits)
    else:
        value = (2**element.mantissa_bits + mantissa) * 2.0 ** (exponent - element.bias - element.mantissa_bits)
    if value > element.max:
        value = float("nan")
    return -value if is_negative else value


def magnitudes(element: Minifloat) -> Tensor:
    """float64, ascending: the non-negative values, so that an index is a code."""
    values = [field_value(code, element) for code in range(2 ** (element.bits - 1))]
    return torch.tensor([v for v in values if v == v], dtype=torch.float64)


def nearest_codes(x: Tensor, element: Minifloat, step: Tensor | float = 1.0) -> Tensor:
    """uint8: the code whose value times `step` lies nearest to `x`, the even code of two as near; no code for -0.0."""
    table = magnitudes(element)
    step = torch.as_tensor(step, dtype=torch.float64)
    distance = (x.double().abs().unsqueeze(-1) - table * step.unsqueeze(-1)).abs()
    nearest = distance.amin(-1, keepdim=True)
    parity = torch.arange(len(table)) % 2
    # among the nearest (one or two) the even one comes first in this order
    code = torch.where(distance == nearest, parity, 2).argmin(-1)
    return (code + (x < 0) * 2 ** (element.bits - 1)).to(torch.uint8)
