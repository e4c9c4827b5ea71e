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
from blockscale.kernels.device import describe
from blockscale.kernels.triton.nvfp4_blocks import (
    LARGEST_GLOBAL_SCALE,
    is_usual,
    load_halves,
    quantize_halves,
    quantize_halves_as,
    store_codes,
    store_words,
    tile_places,
    unpacked_words,
    widened,
)

BLOCK = 16
# element * block_scale that the amax of a tensor maps to; four-over-six needs room above the amax scale
UNSCALED_MAX, UNSCALED_MAX_WITH_HEADROOM = E2M1.max * E4M3.max, E2M1.max * 256.0

AMAX_BLOCKS = 512  # a tile of the first launch of the dynamic way
_WORD_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
PROGRAMS_A_SM = 8  # of the kernel for contiguous tensors
FAR = 2**31 // 64  # elements between rows: positions within a tile are 32-bit
_FEW, _MANY = 64, 1024  # amaxes that it leaves to the second


@dataclass(frozen=True)
class Tile:
    """Blocks of 16 that one program takes, `rows` x `columns`, and the warps that do it."""

    rows: int
    columns: int
    num_warps: int


FLAT = Tile(1, 256, 8)  # contiguous tensors: one long row
ONE_ROW = Tile(1, 128, 4)
STRIDED = Tile(4, 64, 4)
SWIZZLED = Tile(32, 16, 4)


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "tiles_a_row"])
def _amax_kernel(x, partials, num_rows, row_stride, num_blocks, tiles_a_row, BLOCKS: tl.constexpr):
    """Largest finite magnitudes of the tiles program, program + programs ... of x, into partials[program]."""
    largest = tl.zeros([BLOCKS, 8], tl.float32)
    num_tiles = num_rows * tiles_a_row
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        row = (tile // tiles_a_row).to(tl.int64)
        first = (tile % tiles_a_row).to(tl.int64) * BLOCKS
        block = tl.arange(0, BLOCKS)
        mask = block < tl.minimum(num_blocks - first, BLOCKS).to(tl.int32)
        low, high = load_halves(x + row * row_stride + first * 16, block * 16, mask, True)
        low, high = tl.abs(widened(low)), tl.abs(widened(high))
        largest = tl.maximum(largest, tl.where(low < float("inf"), low, 0.0))
        largest = tl.maximum(largest, tl.where(high < float("inf"), high, 0.0))
    tl.store(partials + tl.program_id(0), tl.max(largest))


@triton.jit
def _global_scale(global_scale, partials, PARTIALS: tl.constexpr, UNSCALED: tl.constexpr):
    """What `global_scale` holds, or what it is to hold: the amax of the partial ones / UNSCALED, 1 for zeros."""
    if PARTIALS == 0:
        scale = tl.load(global_scale)
    else:
        amax = tl.max(tl.load(partials + tl.arange(0, PARTIALS)))
        scale = tl.where(amax == 0.0, 1.0, tl.div_rn(amax, UNSCALED))
        if tl.program_id(0) == 0:
            tl.store(global_scale, scale)
    return scale


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
    first_row, first_block, row, block, mask = tile_places(num_rows, num_blocks, tiles_a_row, ROWS, COLUMNS)
    start = x + first_row * row_stride + first_block.to(tl.int64) * 16
    low, high = load_halves(start, row * row_stride + block * 16, mask)
    scale = _global_scale(global_scale, partials, PARTIALS, UNSCALED)
    low_word, high_word, code = quantize_halves(widened(low), widened(high), scale, FOUR_OVER_SIX, LARGEST)
    store_codes(
        packed, block_scale, first_row, first_block, row, block, low_word, high_word, code, mask, num_blocks, SWIZZLE
    )


@triton.jit
def _load_words(words, first, block, num_blocks, BLOCKS: tl.constexpr, IS_EVEN: tl.constexpr):
    """int32 [B, 4] twice: the two halves of 16-bit blocks, whose first is `first`; past the end the tensor's begin."""
    if IS_EVEN:
        at = words + tl.where(first < num_blocks, first, 0) * 8 + block[:, None] * 8 + tl.arange(0, 4)[None, :]
        low, high = tl.load(at), tl.load(at + 4)
    else:
        mask = (block < tl.minimum(num_blocks - first, BLOCKS).to(tl.int32))[:, None]
        at = words + first * 8 + block[:, None] * 8 + tl.arange(0, 4)[None, :]
        low, high = tl.load(at, mask=mask), tl.load(at + 4, mask=mask)
    return low, high


@triton.jit
def _flat_tiles(
    x,
    packed,
    block_scale,
    scale,
    num_blocks,
    BLOCKS: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_EVEN: tl.constexpr,
    FOUR_OVER_SIX: tl.constexpr,
    DIVIDE: tl.constexpr,
):
    """Tiles program, program + programs ..., the next one loaded while one is computed."""
    block = tl.arange(0, BLOCKS)
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    step = tl.num_programs(0).to(tl.int64) * BLOCKS
    low, high = _load_words(x, first, block, num_blocks, BLOCKS, IS_EVEN)
    for start in range(first, num_blocks, step):
        next_low, next_high = _load_words(x, start + step, block, num_blocks, BLOCKS, IS_EVEN)
        low_word, high_word, code = quantize_halves_as(
            unpacked_words(low, DTYPE), unpacked_words(high, DTYPE), scale, FOUR_OVER_SIX, DIVIDE
        )
        mask = block < BLOCKS if IS_EVEN else block < tl.minimum(num_blocks - start, BLOCKS).to(tl.int32)
        store_words(packed + start * 2, block, low_word, high_word, mask)
        tl.store(block_scale + start + block, code.to(tl.uint8), mask=mask)
        low, high = next_low, next_high


@triton.jit(do_not_specialize=["num_blocks"])
def _flat_kernel(
    x,
    packed,
    block_scale,
    global_scale,
    partials,
    num_blocks,
    BLOCKS: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_EVEN: tl.constexpr,
    PARTIALS: tl.constexpr,
    UNSCALED: tl.constexpr,
    FOUR_OVER_SIX: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """A contiguous tensor of 16-bit numbers, read as words of two. IS_EVEN: num_blocks is a multiple of BLOCKS."""
    scale = _global_scale(global_scale, partials, PARTIALS, UNSCALED)
    if is_usual(scale, LARGEST):
        _flat_tiles(x, packed, block_scale, scale, num_blocks, BLOCKS, DTYPE, IS_EVEN, FOUR_OVER_SIX, False)
    else:
        _flat_tiles(x, packed, block_scale, scale, num_blocks, BLOCKS, DTYPE, IS_EVEN, FOUR_OVER_SIX, True)


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
    flat = near_rows(x)
    num_rows, num_blocks, row_stride = flat.shape[0], flat.shape[1] // BLOCK, flat.stride(0)
    if num_rows == 0:
        if partials is not None:
            global_scale.fill_(1.0)
        return packed, block_scale
    is_one_row = flat.is_contiguous() and not swizzled
    if is_one_row:
        num_rows, num_blocks, row_stride = 1, num_rows * num_blocks, 0
    amaxes = global_scale if partials is None else partials  # not read where there are none
    outputs = packed.view(torch.int32), block_scale.view(torch.uint8), global_scale, amaxes
    rule = {
        "PARTIALS": 0 if partials is None else partials.numel(),
        "UNSCALED": UNSCALED_MAX_WITH_HEADROOM if four_over_six else UNSCALED_MAX,
        "FOUR_OVER_SIX": four_over_six,
        "LARGEST": LARGEST_GLOBAL_SCALE[x.dtype],
        "enable_fp_fusion": False,
    }
    with torch.cuda.device_of(x):
        if partials is not None:
            tiles_a_row = triton.cdiv(num_blocks, AMAX_BLOCKS)
            _amax_kernel[(partials.numel(),)](
                flat, partials, num_rows, row_stride, num_blocks, tiles_a_row, BLOCKS=AMAX_BLOCKS, num_warps=4
            )
        if is_one_row and x.dtype in _WORD_DTYPES and flat.data_ptr() % 4 == 0:
            num_programs = min(triton.cdiv(num_blocks, FLAT.columns), PROGRAMS_A_SM * describe(x.device).num_sms)
            _flat_kernel[(num_programs,)](
                flat.view(torch.int32),
                *outputs,
                num_blocks,
                BLOCKS=FLAT.columns,
                DTYPE=_WORD_DTYPES[x.dtype],
                IS_EVEN=num_blocks % FLAT.columns == 0,
                num_warps=FLAT.num_warps,
                **rule,
            )
        else:
            tile = ONE_ROW if is_one_row else STRIDED
            tile, tiles_a_row, num_programs = tiles_of(num_rows, num_blocks, swizzled, tile)
            _quantize_kernel[(num_programs,)](
                flat,
                *outputs,
                num_rows,
                row_stride,
                num_blocks,
                tiles_a_row,
                ROWS=tile.rows,
                COLUMNS=tile.columns,
                SWIZZLE=swizzled,
                num_warps=tile.num_warps,
                **rule,
            )
    return packed, block_scale


def near_rows(x: Tensor) -> Tensor:
    """[..., K] -> [M, K] as `checks.rows`, copied where rows lie so far apart that 32 bits do not span a tile's."""
    flat = checks.rows(x)
    return flat.contiguous() if flat.stride(0) >= FAR else flat


def tiles_of(num_rows: int, num_blocks: int, swizzled: bool, tile: Tile = STRIDED) -> tuple[Tile, int, int]:
    """(tile, tiles a row, programs) that cover the blocks; `tile` is for scales that are not swizzled."""
    tile = SWIZZLED if swizzled else tile
    tiles_a_row = triton.cdiv(padded(num_blocks, 4, swizzled), tile.columns)
    return tile, tiles_a_row, triton.cdiv(padded(num_rows, 128, swizzled), tile.rows) * tiles_a_row


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
