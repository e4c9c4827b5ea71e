"""Activations to NVFP4, with a global scale that is given (static) or taken from the tensor (dynamic).

    packed, block_scale = quantize(x, global_scale)
    packed, block_scale, global_scale = quantize_dynamic(x)

The bytes are those of `formats.nvfp4` for every finite input, and those of the four-over-six rule where that is asked
for: errors are summed in the order of torch on a CPU, and six wins a tie. A block with NaN or Inf decodes to NaN
(`nvfp4_blocks`). The dynamic scale is that of the finite numbers: one broken token does not take the others along.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.formats.spec import E2M1, E4M3
from blockscale.formats.tensor import FLOAT_DTYPES
from blockscale.kernels import checks
from blockscale.kernels.triton.nvfp4_blocks import (
    LARGEST_GLOBAL_SCALE,
    load_halves,
    quantize_halves,
    store_scales,
    store_words,
)

BLOCK = 16
# element * block_scale that the amax of a tensor maps to; four-over-six needs room above the amax scale
UNSCALED_MAX, UNSCALED_MAX_WITH_HEADROOM = E2M1.max * E4M3.max, E2M1.max * 256.0

AMAX_BLOCKS = 512  # a tile of the first launch of the dynamic way
_FEW, _MANY = 64, 1024  # amaxes that it leaves to the second


@dataclass(frozen=True)
class Tile:
    """Blocks of 16 that one program takes, `rows` x `columns`, and the warps that do it."""

    rows: int
    columns: int
    num_warps: int


FLAT = Tile(1, 512, 4)  # contiguous tensors: one long row
STRIDED = Tile(4, 128, 4)
SWIZZLED = Tile(32, 16, 4)


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "tiles_a_row"])
def _amax_kernel(x, partials, num_rows, row_stride, num_blocks, tiles_a_row, BLOCKS: tl.constexpr):
    """Largest finite magnitudes of the tiles program, program + programs ... of x, into partials[program]."""
    largest = tl.zeros([BLOCKS, 8], tl.float32)
    num_tiles = num_rows * tiles_a_row
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        row = (tile // tiles_a_row).to(tl.int64)
        block = (tile % tiles_a_row) * BLOCKS + tl.arange(0, BLOCKS)
        low, high = load_halves(x + row * row_stride, block.to(tl.int64) * 16, block < num_blocks)
        for half in tl.static_range(2):
            magnitude = tl.abs(low if half == 0 else high)
            largest = tl.maximum(largest, tl.where(magnitude < float("inf"), magnitude, 0.0))
    tl.store(partials + tl.program_id(0), tl.max(largest))


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "tiles_a_row"])
def _quantize_kernel(
    x,
    packed,
    block_scale,
    global_scale,
    partials,
    num_rows,
    row_stride,
    num_blocks,
    tiles_a_row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTIALS: tl.constexpr,
    UNSCALED: tl.constexpr,
    FOUR_OVER_SIX: tl.constexpr,
    SWIZZLE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    # positions within the tile are 32-bit, those of tiles 64-bit
    tile = tl.program_id(0)
    place = tl.arange(0, ROWS * COLUMNS)
    if ROWS == 1:  # one row, and no division
        first = tile.to(tl.int64) * COLUMNS
        mask = place < num_blocks - first
        low, high = load_halves(x + first * 16, place * 16, mask)
        target = place
    else:
        first_row = (tile // tiles_a_row).to(tl.int64) * ROWS
        first_block = (tile % tiles_a_row).to(tl.int64) * COLUMNS
        row, block = place // COLUMNS, place % COLUMNS
        mask = (row < num_rows - first_row) & (block < num_blocks - first_block)
        offset = row.to(tl.int64) * row_stride + block * 16
        low, high = load_halves(x + (first_row * row_stride + first_block * 16), offset, mask)
        first = first_row * num_blocks + first_block
        target = row.to(tl.int64) * num_blocks + block

    if PARTIALS:
        amax = tl.max(tl.load(partials + tl.arange(0, PARTIALS)))
        scale = tl.where(amax == 0.0, 1.0, tl.div_rn(amax, UNSCALED))
        if tile == 0:
            tl.store(global_scale, scale)
    else:
        scale = tl.load(global_scale)
    low_word, high_word, code = quantize_halves(low, high, scale, FOUR_OVER_SIX, LARGEST)

    store_words(packed + first * 2, target, low_word, high_word, mask)
    if SWIZZLE:
        store_scales(block_scale, first_row + row, first_block + block, code, num_rows, num_blocks, True)
    else:
        tl.store(block_scale + first + target, code.to(tl.uint8), mask=mask)


def quantize(
    x: Tensor, global_scale: Tensor, *, four_over_six: bool = False, swizzled: bool = False
) -> tuple[Tensor, Tensor]:
    """(packed uint8 [..., K/2], block_scale float8_e4m3fn) of x [..., K], bf16, fp16 or fp32.

    global_scale   fp32, one element, on x's device; four-over-six wants headroom: amax / (6 * 256)
    swizzled       block_scale is 1-D, [M, K/16] as `formats.layout.swizzle` lays it out, padding zero; else [..., K/16]

    Rows may lie any distance apart. FormatError for a dtype, a K or a scale that does not fit.
    """
    check_global_scale("quantize", global_scale, x)
    return _launch("quantize", x, global_scale, four_over_six, swizzled, None)


def quantize_dynamic(
    x: Tensor, *, four_over_six: bool = False, swizzled: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(packed, block_scale, global_scale fp32 0-d): as `quantize`, with the global scale of this tensor's amax.

    global_scale = amax / 2688 (four-over-six: amax / 1536), 1 for zeros, NaN and Inf not counted. Two launches, and
    nothing waits for the device. Rows that are quantized together share the scale: results depend on the batch.
    """
    check_blocks("quantize_dynamic", x)
    global_scale = torch.empty((), dtype=torch.float32, device=x.device)
    num_partials = _FEW if x.numel() <= _FEW * AMAX_BLOCKS * BLOCK else _MANY
    partials = torch.empty(num_partials, dtype=torch.float32, device=x.device)
    packed, block_scale = _launch("quantize_dynamic", x, global_scale, four_over_six, swizzled, partials)
    return packed, block_scale, global_scale


def _launch(
    op: str, x: Tensor, global_scale: Tensor, four_over_six: bool, swizzled: bool, partials: Tensor | None
) -> tuple[Tensor, Tensor]:
    check_blocks(op, x)
    check_can_run(op, x, _quantize_kernel)
    packed, block_scale = empty_outputs(x.shape, x.device, swizzled)
    flat = checks.rows(x)
    num_rows, num_blocks, row_stride = flat.shape[0], flat.shape[1] // BLOCK, flat.stride(0)
    if num_rows == 0:
        if partials is not None:
            global_scale.fill_(1.0)
        return packed, block_scale
    tile = SWIZZLED if swizzled else STRIDED
    if flat.is_contiguous() and not swizzled:
        num_rows, num_blocks, row_stride, tile = 1, num_rows * num_blocks, 0, FLAT
    with torch.cuda.device_of(x):
        if partials is not None:
            tiles_a_row = triton.cdiv(num_blocks, AMAX_BLOCKS)
            _amax_kernel[(partials.numel(),)](
                flat, partials, num_rows, row_stride, num_blocks, tiles_a_row, BLOCKS=AMAX_BLOCKS, num_warps=4
            )
        tiles_a_row = triton.cdiv(padded(num_blocks, 4, swizzled), tile.columns)
        num_tiles = triton.cdiv(padded(num_rows, 128, swizzled), tile.rows) * tiles_a_row
        _quantize_kernel[(num_tiles,)](
            flat,
            packed.view(torch.int32),
            block_scale.view(torch.uint8),
            global_scale,
            global_scale if partials is None else partials,
            num_rows,
            row_stride,
            num_blocks,
            tiles_a_row,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            PARTIALS=0 if partials is None else partials.numel(),
            UNSCALED=UNSCALED_MAX_WITH_HEADROOM if four_over_six else UNSCALED_MAX,
            FOUR_OVER_SIX=four_over_six,
            SWIZZLE=swizzled,
            LARGEST=LARGEST_GLOBAL_SCALE[x.dtype],
            num_warps=tile.num_warps,
            enable_fp_fusion=False,
        )
    return packed, block_scale


def padded(size: int, multiple: int, swizzled: bool) -> int:
    """Rows or columns of scales that are written: whole tiles of the swizzled layout have padding."""
    return -(-size // multiple) * multiple if swizzled else size


def check_blocks(op: str, x: Tensor, name: str = "x") -> None:
    """`x` is [..., K] of bf16, fp16 or fp32, K a multiple of 16."""
    checks.check_dtype(op, name, x, FLOAT_DTYPES)
    if x.dim() == 0:
        raise FormatError(f"{op}: {name} is {checks.describe_tensor(x)}", hint=f"{name} must be [..., K]")
    checks.check_multiple(op, f"the last dimension of {name}", x.shape[-1], BLOCK)


def check_global_scale(op: str, global_scale: Tensor, x: Tensor) -> None:
    """One fp32 number on the device of `x`."""
    checks.check_dtype(op, "global_scale", global_scale, (torch.float32,))
    if global_scale.numel() != 1:
        raise FormatError(f"{op}: global_scale has shape {list(global_scale.shape)}", hint="give one number, 0-d")
    checks.check_same_device(op, x=x, global_scale=global_scale)


def check_can_run(op: str, x: Tensor, kernel: object) -> None:
    """A compiled kernel needs a GPU; one run by Triton's interpreter does not."""
    if x.device.type != "cuda" and isinstance(kernel, triton.runtime.JITFunction):
        raise FormatError(f"{op}: x is on {x.device}", hint="this kernel runs on NVIDIA GPUs: move the operands there")


def empty_outputs(shape: tuple[int, ...], device: torch.device, swizzled: bool = False) -> tuple[Tensor, Tensor]:
    """(packed uint8 [..., K/2], block_scale float8_e4m3fn [..., K/16] or swizzled) for values of shape [..., K]."""
    *lead, k = shape
    packed = torch.empty(*lead, k // 2, dtype=torch.uint8, device=device)
    if not swizzled:
        return packed, torch.empty(*lead, k // BLOCK, dtype=torch.float8_e4m3fn, device=device)
    size = padded(math.prod(lead), 128, True) * padded(k // BLOCK, 4, True)
    return packed, torch.empty(size, dtype=torch.float8_e4m3fn, device=device)
