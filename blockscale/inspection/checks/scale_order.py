"""Whether block scales lie in rows or in the tensor core's 128x4 tiles, told from their values alone. Needs no torch.

Rows and columns of real weights differ in magnitude: log2 of a block scale is to a part the sum of a number for its row
and one for its column. The 128x4 order scatters rows and columns, so that this part is larger once they are put back.
Random weights have no such part in either order.
"""

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

from blockscale.checkpoint.dialects.stored import StoredLinear
from blockscale.checkpoint.header import TensorInfo
from blockscale.formats.spec import Granularity, ScaleType
from blockscale.inspection.census import is_hole, one_byte_scale, read_bytes, scale_value

TILE_ROWS, TILE_COLS = 128, 4
_MAX_TILES, _MAX_COLS = 4, 512
_LOG2_ZERO = -10.0  # below E4M3's smallest number, 2^-9

Bytes = NDArray[np.uint8]


def padded_shape(rows: int, cols: int) -> tuple[int, int]:
    """Of a matrix in whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-cols // TILE_COLS) * TILE_COLS


def scale_shape(linear: StoredLinear) -> tuple[int, int] | None:
    """Rows and columns that the one-byte block scales of a weight [N, K] should have; None for other linears."""
    fmt = linear.scheme.weight
    packed, info = linear.tensors["packed"], linear.tensors.get("block_scale")
    if info is None or not one_byte_scale(info, fmt.scale) or fmt.granularity is not Granularity.BLOCK:
        return None
    if linear.is_transposed or len(packed.shape) != 2:
        return None
    return packed.shape[0], packed.shape[1] * 2 // fmt.block_size


def can_be_swizzled(linear: StoredLinear) -> bool:
    """Whether its block scales fill whole tiles, so that both orders have the same shape."""
    shape = scale_shape(linear)
    return shape is not None and 0 not in shape and linear.tensors["block_scale"].shape == shape == padded_shape(*shape)


def swizzle_evidence(linear: StoredLinear) -> float | None:
    """How much better rows and columns explain the scales once they are taken out of 128x4 order, in standard
    deviations of what random weights would show. Positive: they are swizzled. None: all are the same.

    Looks at some row tiles, from the first to the last.
    """
    info = linear.tensors["block_scale"]
    if is_hole(info):
        return None
    num_tiles = info.shape[0] // TILE_ROWS
    numbers = np.unique(np.linspace(0, num_tiles - 1, min(num_tiles, _MAX_TILES)).round().astype(int)).tolist()
    tiles = [_read_tile(info, number) for number in numbers]
    num_cols = min(info.shape[1], _MAX_COLS)
    table = _log2_table(linear.scheme.weight.scale)
    as_stored = table[np.concatenate([tile[:, :num_cols] for tile in tiles])]
    restored = table[np.concatenate([unswizzled_tile(tile)[:, :num_cols] for tile in tiles])]
    if as_stored.max() == as_stored.min():
        return None
    # of n random numbers, p fitted means explain a share of p / n, with a standard deviation of sqrt(2 p) / n
    num_fitted = sum(as_stored.shape) - 2
    deviation = math.sqrt(2 * num_fitted) / as_stored.size
    return (_explained(restored) - _explained(as_stored)) / (deviation * math.sqrt(2))


def unswizzled_tile(tile: Bytes) -> Bytes:
    """[128, C] bytes in the order of 128x4 tiles -> the same in rows."""
    cols = tile.shape[1]
    order = tile.reshape(cols // TILE_COLS, 32, 4, TILE_COLS)  # [column tile, r%32, r/32, c%4]
    return order.transpose(2, 1, 0, 3).reshape(TILE_ROWS, cols)


def is_padding_swizzled(info: TensorInfo, rows: int, cols: int) -> bool:
    """Of scales with the padded shape of [rows, cols]: whether they are swizzled, by where the padding's zeros lie.

    Only padding that lies in rows and columns behind the scales, all of it zero, speaks for row order.
    """
    padded = padded_shape(rows, cols)
    in_rows = read_bytes(info).reshape(padded)
    is_in_rows = not in_rows[rows:].any() and not in_rows[:, cols:].any()
    return bool(in_rows[:rows, :cols].any()) and not is_in_rows


def _read_tile(info: TensorInfo, number: int) -> Bytes:
    cols = info.shape[1]
    size = TILE_ROWS * cols
    part = TensorInfo(info.name, info.dtype, (TILE_ROWS, cols), info.path, info.offset + number * size, size)
    return read_bytes(part).reshape(TILE_ROWS, cols)


@cache
def _log2_table(scale: ScaleType) -> NDArray[np.float32]:
    """[256] log2 of a scale's magnitude, by byte."""
    values = [abs(scale_value(scale, byte)) for byte in range(256)]
    logs = [math.log2(value) if value else _LOG2_ZERO for value in values]
    return np.nan_to_num(np.array(logs, np.float32), nan=np.nanmax(logs))


def _explained(values: NDArray[np.float32]) -> float:
    """Share of the variance of [R, C] that row means and column means explain."""
    rows, cols = values.shape
    centred = values - values.mean(dtype=np.float64)
    of_rows, of_cols = centred.mean(1, dtype=np.float64), centred.mean(0, dtype=np.float64)
    explained = cols * float(of_rows @ of_rows) + rows * float(of_cols @ of_cols)
    return explained / float(np.sum(np.square(centred), dtype=np.float64))
