"""The block scale of least squared error, found exactly.

For a block b with E4M3 scale s (times the tensor's global scale g) the error is sum_i (x_i - e2m1(x_i / (s g)) s g)^2.
Let c be the E4M3 code of the amax scale, amax_b / (6 g) rounded. The best code lies in c-3 ... c+7: for
s >= amax_b / 3.5 every level in use is at most 3 s, so s / 2 serves as well, and that bounds s by 12/7 of the amax
scale, at most 7 codes up; below, enumerating E4M3's cells shows no gain past 3 codes. All 11 codes are tried.

Halving takes an E4M3 number to another only from 2^-5 (code 16) up: for c < 8, where the bound would end below that,
codes 1 ... 15 are tried instead.

Source: the bound as stated in ScaleSweep (2026); it holds for the unweighted error.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from blockscale.formats.error import block_squared_error
from blockscale.formats.nvfp4 import block_amax, block_scale_from_amax

OFFSETS = range(-3, 8)
_LOW_CODES = range(1, 16)
_FIRST_NORMAL = 8
_MIN_CODE, _MAX_CODE = 1, 126  # smallest subnormal .. 448; 0 would lose the block, 127 is NaN


def best_block_scale(x: Tensor, global_scale: Tensor, block_size: int = 16) -> Tensor:
    """float8_e4m3fn [..., K/block_size] of least squared error for x [..., K] (bf16, fp16 or fp32).

    `global_scale` wants headroom (amax / (6 * 256)): a scale above the largest block's amax scale must exist.
    """
    amax = block_amax(x, block_size)
    start = block_scale_from_amax(amax, global_scale).view(torch.uint8).int()
    # in units of the global scale, or the squares of very small or large weights would leave fp32
    magnitude = (x.float().abs() / global_scale).unflatten(-1, (-1, block_size))
    code = _least_error(magnitude, start, ((start + o).clamp_(_MIN_CODE, _MAX_CODE) for o in OFFSETS))
    is_low = start < _FIRST_NORMAL
    if is_low.any():
        low_start = start[is_low]
        low_codes = (torch.full_like(low_start, c) for c in _LOW_CODES)
        code[is_low] = _least_error(magnitude[is_low], low_start, low_codes)
    code = torch.where(amax == 0, start, code)  # a zero block keeps the scale of 1
    return code.to(torch.uint8).view(torch.float8_e4m3fn)


def _least_error(magnitude: Tensor, start: Tensor, candidates: Iterable[Tensor]) -> Tensor:
    """The candidate code of least squared error, a block: magnitudes [..., B, n], codes int32 [..., B]."""
    best_code, best_error = start.clone(), torch.full(start.shape, torch.inf, device=start.device)
    for code in candidates:
        error = block_squared_error(magnitude, code.to(torch.uint8).view(torch.float8_e4m3fn).float())
        is_better = error < best_error
        best_code = torch.where(is_better, code, best_code)
        best_error = torch.where(is_better, error, best_error)
    return best_code
