"""How far a quantized tensor lies from its source."""

import math

import torch
from torch import Tensor

from blockscale.formats.minifloat import round_magnitude
from blockscale.formats.spec import E2M1

_SLICE = 1 << 22  # elements in float64 at a time


def mse(reference: Tensor, approximation: Tensor) -> float:
    """Mean squared error, accumulated in float64."""
    return torch.mean((reference.double() - approximation.double()) ** 2).item()


def relative_mse(reference: Tensor, approximation: Tensor) -> float:
    """sum((x - y)^2) / sum(x^2), in float64; 0 for a zero tensor kept exactly, inf for one that was not."""
    error = power = 0.0
    for x, y in zip(reference.reshape(-1).split(_SLICE), approximation.reshape(-1).split(_SLICE), strict=True):
        error += torch.sum((x.double() - y.double()) ** 2).item()
        power += torch.sum(x.double() ** 2).item()
    return error / power if power else (0.0 if error == 0 else math.inf)


def sqnr(reference: Tensor, approximation: Tensor) -> float:
    """Signal to quantization noise ratio in dB: -10 log10 of the relative MSE; inf for an exact copy."""
    ratio = relative_mse(reference, approximation)
    return -10 * math.log10(ratio) if ratio else math.inf


def block_squared_error(magnitude: Tensor, step: Tensor) -> Tensor:
    """Sum of squared E2M1 rounding errors a block: magnitudes fp32 [..., B, n], grid steps [..., B] -> [..., B]."""
    step = step.unsqueeze(-1)
    error = round_magnitude(magnitude / step, E2M1).mul_(step).sub_(magnitude)
    return error.square_().sum(-1)
