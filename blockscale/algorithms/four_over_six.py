"""Four over six: each block's largest value becomes 6 or, where that errs less, 4.

E2M1 has nothing between 4 and 6, so values near 5/6 of the amax round badly; mapping the amax to 4 instead uses the
finer levels. Both scales must fit E4M3, hence the global scale amax / (6 * 256).
Source: Cook et al., "Four Over Six", arXiv 2512.02010.
"""

import torch
from torch import Tensor

from blockscale.formats.error import block_squared_error
from blockscale.formats.nvfp4 import block_amax, block_scale_from_amax


def four_or_six_block_scale(x: Tensor, global_scale: Tensor, block_size: int = 16) -> Tensor:
    """float8_e4m3fn [..., K/block_size] for x [..., K]; 6 where the squared errors are equal."""
    amax = block_amax(x, block_size)
    # in units of the global scale, or the squares of very small or large weights would leave fp32
    magnitude = (x.float().abs() / global_scale).unflatten(-1, (-1, block_size))
    six = block_scale_from_amax(amax, global_scale)
    four = torch.where(amax == 0, six.float(), block_scale_from_amax(amax.float() * 1.5, global_scale).float())
    error_six = block_squared_error(magnitude, six.float())
    error_four = block_squared_error(magnitude, four)
    return torch.where(error_four < error_six, four, six.float()).to(torch.float8_e4m3fn)
