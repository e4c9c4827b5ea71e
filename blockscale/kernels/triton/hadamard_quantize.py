"""Block Hadamard rotation of activations and NVFP4 of what comes out, in one pass.

    y = x R,  R = blockdiag(H / sqrt(size)),  H[i, j] = (-1)^popcount(i & j),  size 16, 32, 64 or 128

in fp32 by log2(size) rounds of sums and differences, nearest neighbours first, and one product by fp32(size^-1/2):
the same operations in the same order as on the CPU, so that packed and block_scale are those of the rotated tensor
bit for bit. A value that is not finite makes its whole block of `size` so.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.kernels.triton.nvfp4_blocks import (
    LARGEST_GLOBAL_SCALE,
    columns,
    join_columns,
    load_halves,
    quantize_halves,
    store_codes,
    tile_places,
    widened,
)
from blockscale.kernels.triton.quantize import (
    BLOCK,
    check_blocks,
    check_can_run,
    check_global_scale,
    empty_outputs,
    near_rows,
    tiles_of,
)

SIZES = (16, 32, 64, 128)

# Rotated values are multiples of size^-1/2 > 2^-4 times the dtype's smallest number.
_ROOM = 2.0**-4


@triton.jit
def _rotate_eight(x):
    """Rounds of distance 1, 2 and 4 within [B, 8]."""
    a0, a1, a2, a3, a4, a5, a6, a7 = columns(x)
    b0, b1, b2, b3, b4, b5, b6, b7 = a0 + a1, a0 - a1, a2 + a3, a2 - a3, a4 + a5, a4 - a5, a6 + a7, a6 - a7
    c0, c1, c2, c3, c4, c5, c6, c7 = b0 + b2, b1 + b3, b0 - b2, b1 - b3, b4 + b6, b5 + b7, b4 - b6, b5 - b7
    return join_columns(c0 + c4, c1 + c5, c2 + c6, c3 + c7, c0 - c4, c1 - c5, c2 - c6, c3 - c7)


@triton.jit
def _rotate_blocks(x, DISTANCE: tl.constexpr, COUNT: tl.constexpr):
    """The round between blocks DISTANCE apart, of [B, 8], COUNT blocks rotated together; lanes of a warp exchange."""
    groups: tl.constexpr = x.shape[0] // COUNT
    x = tl.reshape(x, [groups, COUNT, 8])
    place = tl.arange(0, COUNT)[None, :, None]
    other = tl.gather(x, tl.broadcast_to(place ^ DISTANCE, [groups, COUNT, 8]), axis=1)
    is_first = (place & DISTANCE) == 0
    return tl.reshape(tl.where(is_first, x, other) + tl.where(is_first, other, -x), [groups * COUNT, 8])


@triton.jit
def rotate_halves(low, high, SIZE: tl.constexpr, FACTOR: tl.constexpr):
    """Halves [B, 8] of consecutive blocks, SIZE / 16 of which are rotated together. FACTOR = SIZE^-1/2."""
    low, high = _rotate_eight(low), _rotate_eight(high)
    low, high = low + high, low - high
    if SIZE >= 32:
        low, high = _rotate_blocks(low, 1, SIZE // 16), _rotate_blocks(high, 1, SIZE // 16)
    if SIZE >= 64:
        low, high = _rotate_blocks(low, 2, SIZE // 16), _rotate_blocks(high, 2, SIZE // 16)
    if SIZE >= 128:
        low, high = _rotate_blocks(low, 4, SIZE // 16), _rotate_blocks(high, 4, SIZE // 16)
    return low * FACTOR, high * FACTOR


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "tiles_a_row"])
def _hadamard_kernel(
    x,
    global_scale,
    packed,
    block_scale,
    row_stride,
    num_rows,
    num_blocks,
    tiles_a_row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    FACTOR: tl.constexpr,
    FOUR_OVER_SIX: tl.constexpr,
    SWIZZLE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    first_row, first_block, row, block, mask = tile_places(num_rows, num_blocks, tiles_a_row, ROWS, COLUMNS)
    start = x + first_row * row_stride + first_block.to(tl.int64) * 16
    low, high = load_halves(start, row * row_stride + block * 16, mask)
    low, high = rotate_halves(widened(low), widened(high), SIZE, FACTOR)
    low_word, high_word, code = quantize_halves(low, high, tl.load(global_scale), FOUR_OVER_SIX, LARGEST)
    store_codes(
        packed, block_scale, first_row, first_block, row, block, low_word, high_word, code, mask, num_blocks, SWIZZLE
    )


def hadamard_quantize(
    x: Tensor, global_scale: Tensor, size: int, *, four_over_six: bool = False, swizzled: bool = False
) -> tuple[Tensor, Tensor]:
    """(packed uint8 [..., K/2], block_scale float8_e4m3fn [..., K/16] or swizzled) of x R, x [..., K] of any float.

    size          of the rotation: 16, 32, 64 or 128, a divisor of K
    global_scale  fp32, one element: of the rotated activations

    FormatError for a size, dtype, shape or device that does not fit.
    """
    op = "hadamard_quantize"
    check_blocks(op, x)
    k = x.shape[-1]
    if size not in SIZES or k % size:
        raise FormatError(
            f"{op}: a rotation of size {size} over {k} channels",
            hint="sizes: " + ", ".join(map(str, SIZES)) + "; K must be a multiple of the size",
        )
    check_global_scale(op, global_scale, x)
    check_can_run(op, x, _hadamard_kernel)
    packed, block_scale = empty_outputs(x.shape, x.device, swizzled)
    flat = near_rows(x)
    num_rows, num_blocks = flat.shape[0], k // BLOCK
    tile, tiles_a_row, num_programs = tiles_of(num_rows, num_blocks, swizzled)
    if num_rows:
        with torch.cuda.device_of(x):
            _hadamard_kernel[(num_programs,)](
                flat,
                global_scale,
                packed.view(torch.int32),
                block_scale.view(torch.uint8),
                flat.stride(0),
                num_rows,
                num_blocks,
                tiles_a_row,
                ROWS=tile.rows,
                COLUMNS=tile.columns,
                SIZE=size,
                FACTOR=size**-0.5,
                FOUR_OVER_SIX=four_over_six,
                SWIZZLE=swizzled,
                LARGEST=LARGEST_GLOBAL_SCALE[x.dtype] * (_ROOM if x.dtype != torch.float32 else 1.0),
                num_warps=tile.num_warps,
                enable_fp_fusion=False,
            )
    return packed, block_scale
