"""E2M1's rounding cells: the values that round to a code, and the two levels around a value.

Everything is in units of the grid: a weight divided by block_scale * global_scale. The levels 0, .5, 1, 1.5, 2, 3, 4, 6
lie .5 apart up to 2, 1 up to 4 and 2 above; their cells meet half way, and 6's has no end, because E2M1 saturates.
"""

import torch
from torch import Tensor

from blockscale.formats.minifloat import decode_table
from blockscale.formats.spec import E2M1

_NUM_LEVELS = 8
_SIGN = 8  # the bit of a negative code
_MARGIN = 2.0**-10  # in a cell, and away from its edges, where rounding half to even may choose the neighbour


def levels(device: torch.device | str = "cpu") -> Tensor:
    """fp32 [8]: the magnitudes."""
    return decode_table(E2M1, device)[:_NUM_LEVELS]


def local_step(position: Tensor) -> Tensor:
    """Distance of the two levels around each position: fp32 .5, 1 or 2."""
    magnitude = position.abs()
    return 0.5 + 0.5 * (magnitude >= 2).float() + (magnitude >= 4).float()


def place_in_cell(position: Tensor, codes: Tensor) -> Tensor:
    """fp32: the point next to each position that rounds to the code given (uint8, the same shape).

    A position well inside that cell stays where it is, so for codes of round-to-nearest hardly anything moves.
    """
    magnitudes = levels(position.device)
    edges = (magnitudes[1:] + magnitudes[:-1]) / 2  # [7]
    upper = torch.cat((edges - _MARGIN, edges.new_full((1,), torch.inf)))  # by magnitude index
    lower = torch.cat((-upper[:1], edges + _MARGIN))
    index = (codes & (_SIGN - 1)).int()
    is_negative = codes >= _SIGN
    mirrored = torch.where(is_negative, -position, position)
    mirrored = torch.maximum(torch.minimum(mirrored, upper[index]), lower[index])
    return torch.where(is_negative, -mirrored, mirrored)


def lower_level(position: Tensor) -> Tensor:
    """int32: index of the level at or below each magnitude, at most 6, so that a level lies above it."""
    inner = levels(position.device)[1 : _NUM_LEVELS - 1]
    return torch.bucketize(position.abs(), inner, right=True, out_int32=True)


def signed_code(index: Tensor, position: Tensor) -> Tensor:
    """uint8 code of a level's index, with the sign of the position."""
    return index.to(torch.uint8) | ((position < 0).to(torch.uint8) * _SIGN)
