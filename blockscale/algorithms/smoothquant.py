"""SmoothQuant: input outliers are moved into the weights, by their largest magnitudes.

    s_j = amax_t |x_tj|^a / amax_n |W_nj|^(1 - a)

for use as x W^T = (x / s) (W diag(s))^T, like AWQ's scales and chosen among by `awq.best_smoothing`. Only ratios of
scales matter to a format with a global scale, so they are centred and clamped as AWQ's are.

Source: Xiao et al., "SmoothQuant", arXiv 2211.10438.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from blockscale.algorithms.awq import bounded_scale, check_channels

EXPONENTS = (0.4, 0.5, 0.6, 0.7, 0.8)


def smoothquant_scales(
    input_amax: Tensor, weight_rows: Tensor, exponents: Iterable[float] = EXPONENTS
) -> dict[float, Tensor]:
    """Exponent -> fp32 [K].

    input_amax    [K]: largest |x| of each input channel
    weight_rows   [N, K]: the rows of all linears that share the input

    A channel without input or without weights has a scale of 1 and no say in the others'.
    """
    check_channels(input_amax, weight_rows)
    inputs, weights = input_amax.double(), weight_rows.abs().amax(0).double()
    is_alive = (inputs > 0) & (weights > 0)
    inputs, weights = torch.where(is_alive, inputs, 1.0), torch.where(is_alive, weights, 1.0)
    return {a: bounded_scale(inputs**a / weights ** (1 - a), is_alive) for a in exponents}
