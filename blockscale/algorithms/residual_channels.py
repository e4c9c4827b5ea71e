"""Residual channels: the rounding error of a few input channels is rounded too, and multiplied with them again.

With e = x - q(x), S channels and their weights W_S repeated after the others:

    x W^T ~= [q(x), q(e_S)] [q(W), q(W_S)]^T      one product of depth K + S, 4.5 (K + S) / K bits a weight

On those channels the input's error falls to that of an error rounded again. Best are the channels whose errors move
the output most: E[e_j^2] ||w_j||^2. The paper takes those of largest |x|; both scores do here.

Both parts share one input global scale, as one product has one.

Source: "ARCQuant", arXiv 2601.07475.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.formats.spec import NVFP4

_PAPER_STEP = 64
_OUTLIER = 2.0**-3  # of the row's largest magnitude


def residual_energy(mean_square_error: Tensor, weight: Tensor) -> Tensor:
    """fp32 [K]: expected squared output error of each input channel, E[e_j^2] ||w_j||^2.

    mean_square_error   [K]: mean over tokens of (x - q(x))^2
    weight              [N, K]: the rows of all linears that share the input
    """
    if weight.dim() != 2 or mean_square_error.shape != weight.shape[-1:]:
        raise FormatError(
            f"errors of shape {list(mean_square_error.shape)} do not fit weights of {list(weight.shape)}",
            hint="one mean squared error for each input channel, and weights [N, K]",
        )
    return mean_square_error.float() * weight.float().square().sum(0)


def choose_channels(score: Tensor, count: int) -> Tensor:
    """int64 [count]: the channels of largest score [K] (`residual_energy`, or the largest |x| of each), largest first.

    Neighbours in this order share a block, so channels of like size do. Of equal scores the first channel is taken.
    FormatError unless `count` is a multiple of 16 between 0 and K.
    """
    if score.dim() != 1 or count % NVFP4.block_size or not 0 <= count <= len(score):
        raise FormatError(
            f"cannot take {count} residual channels of {list(score.shape)}",
            hint=f"a multiple of {NVFP4.block_size}, at most the number of channels",
        )
    return torch.argsort(score, descending=True, stable=True)[:count]


def outlier_count(x: Tensor) -> int:
    """The paper's number of channels for inputs x [..., K]: K times the share of values above 1/8 of their row's
    largest, rounded up to a multiple of 64, and at most K (rounded down to whole blocks)."""
    if x.numel() == 0:
        raise FormatError(f"no inputs to count outliers in: shape {list(x.shape)}")
    k = x.shape[-1]
    magnitude = x.float().abs()
    count = (magnitude > _OUTLIER * magnitude.amax(-1, keepdim=True)).sum().item()
    wanted = -(-int(count) * k // (x.numel() * _PAPER_STEP)) * _PAPER_STEP
    return min(wanted, k - k % NVFP4.block_size)


def augment_input(
    x: Tensor, channels: Tensor, round_input: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """(values [..., K + S] fp32, factor 0-d) of x [..., K], with [x, e_S] ~= values * factor.

    `round_input` is `fake_quantize.round_activation` with its format and scale given: (values, factor) of a tensor.
    FormatError where that factor is not one for all, as the two parts could not share it.
    """
    values, factor = round_input(x)
    if factor.dim():
        raise FormatError("residual channels need inputs with one global scale, not one a token")
    error = x.float().index_select(-1, channels) - values.index_select(-1, channels) * factor
    return torch.cat((values, round_input(error)[0]), -1), factor


def augment_weight(weight: Tensor, channels: Tensor) -> Tensor:
    """[..., K + S]: the weight [..., K] with the columns of the residual channels repeated at the end."""
    return torch.cat((weight, weight.index_select(-1, channels)), -1)


def bits_per_weight(k: int, num_channels: int) -> float:
    """Stored bits for each of the N K weights of a linear with residual channels."""
    return NVFP4.bits_per_element * (k + num_channels) / k
