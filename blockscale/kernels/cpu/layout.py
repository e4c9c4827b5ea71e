"""The groups of 16 rows that kernels.h describes: their size, and the way back to row-major order."""

import torch
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.formats.spec import NVFP4, Format
from blockscale.kernels.prepare import Layout, PreparedWeight

ROWS, TILE_K, HEADER_BYTES = 16, 64, 64
_CODE_BYTES = ROWS * TILE_K // 2


def num_groups(n: int) -> int:
    return -(-n // ROWS)


def tile_bytes(fmt: Format) -> int:
    return _CODE_BYTES + ROWS * TILE_K // fmt.block_size


def group_bytes(fmt: Format, k: int) -> int:
    """Bytes of 16 rows of a weight with K = k: the header, and tiles of 64 columns, up to a multiple of 64."""
    return -(-(HEADER_BYTES + -(-k // TILE_K) * tile_bytes(fmt)) // 64) * 64


def from_groups(weight: PreparedWeight) -> PreparedWeight:
    """The row-major weight of the same values.

    Where several bytes mean the same, one of them comes back: no negative scale, no code but 0 under a scale of zero,
    and NaN in each scale of a row that had one.
    """
    if weight.layout is not Layout.CPU:
        raise FormatError(f"the layout is {weight.layout.value}", hint="unpack it with the file that packed it")
    n, k, fmt = weight.n, weight.k, weight.format
    per_tile, tiles = TILE_K // fmt.block_size, -(-k // TILE_K)
    groups = weight.packed
    body = groups[:, HEADER_BYTES : HEADER_BYTES + tiles * tile_bytes(fmt)].unflatten(1, (tiles, tile_bytes(fmt)))
    codes = body[..., :_CODE_BYTES].unflatten(-1, (TILE_K // 8, ROWS, 4))  # [G, T, 8, 16, 4]
    packed = codes.permute(0, 3, 1, 2, 4).reshape(-1, tiles * TILE_K // 2)[:n, : k // 2].contiguous()
    scales = body[..., _CODE_BYTES:].unflatten(-1, (ROWS, per_tile))  # [G, T, 16, blocks]
    block_scale = scales.permute(0, 2, 1, 3).reshape(-1, tiles * per_tile)[:n, : k // fmt.block_size]
    block_scale = _narrow_e4m3(block_scale) if fmt == NVFP4 else block_scale.clone()
    is_nan = groups[:, :HEADER_BYTES].contiguous().view(torch.float32).reshape(-1)[:n].isnan()
    block_scale[is_nan] = 0x7F if fmt == NVFP4 else 0xFF
    return PreparedWeight(Layout.ROW_MAJOR, packed, block_scale, weight.global_scale, weight.shape, fmt, weight.dtype)


def _narrow_e4m3(scale: Tensor) -> Tensor:
    """Stored bytes, of five bits of exponent, to those of E4M3; 0 stays 0."""
    exponent, mantissa = (scale >> 3).float() - 31, (scale & 7).float()
    value = torch.ldexp(1 + mantissa / 8, exponent + 8)
    return torch.where(scale == 0, 0.0, value).to(torch.float8_e4m3fn).view(torch.uint8)
