"""RMSNorm, with the sum of the residual stream before it where there is one, and NVFP4 of what comes out, in one pass.

    h = x + residual                                rounded to x's dtype: the new residual
    y = round(h / sqrt(mean(h^2) + epsilon)) * w    rounded to x's dtype, as Llama does
    y = h / sqrt(mean(h^2) + epsilon) * (1 + w)     rounded once, as Gemma does (unit_offset)

and packed, block_scale as `quantize` gives them for y. Sums are fp32. Rounding y to 16 bits first costs nothing and
keeps the bytes those of the two steps taken apart. A row with NaN or Inf is NaN from end to end, as in bf16.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.formats.tensor import FLOAT_DTYPES
from blockscale.kernels import checks
from blockscale.kernels.triton.nvfp4_blocks import (
    LARGEST_GLOBAL_SCALE,
    load_halves,
    quantize_halves,
    store_codes,
    store_halves,
    store_swizzled,
    widened,
)
from blockscale.kernels.triton.quantize import (
    BLOCK,
    check_blocks,
    check_can_run,
    check_global_scale,
    empty_outputs,
    padded,
)

BLOCKS_A_WARP = 64
_MOST_BLOCKS = 1024  # of a row that is held in registers; longer ones are read twice


@dataclass(frozen=True)
class NormQuantized:
    """packed uint8 [..., K/2], block_scale float8_e4m3fn [..., K/16] or swizzled; the others [..., K] in x's dtype.

    residual  x + residual, None without a residual
    normed    what was quantized, None unless asked for
    """

    packed: Tensor
    block_scale: Tensor
    residual: Tensor | None
    normed: Tensor | None


@triton.jit
def _load_sum(x, residual, offset, mask, HAS_RESIDUAL: tl.constexpr):
    low, high = load_halves(x, offset, mask, True)
    low, high = widened(low), widened(high)
    if HAS_RESIDUAL:
        other_low, other_high = load_halves(residual, offset, mask, True)
        low = widened((low + widened(other_low)).to(x.dtype.element_ty))
        high = widened((high + widened(other_high)).to(x.dtype.element_ty))
    return low, high


@triton.jit
def _normalize(half, weight, factor, DTYPE: tl.constexpr, UNIT_OFFSET: tl.constexpr):
    y = half * factor
    y = y * (1.0 + weight) if UNIT_OFFSET else widened(y.to(DTYPE)) * weight
    return widened(y.to(DTYPE))


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def _norm_kernel(
    x,
    residual,
    weight,
    global_scale,
    packed,
    block_scale,
    new_residual,
    normed,
    x_stride,
    residual_stride,
    num_rows,
    num_blocks,
    epsilon,
    BLOCKS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORMED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    FOUR_OVER_SIX: tl.constexpr,
    SWIZZLE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """One row a program. IS_WHOLE: it fits BLOCKS blocks, and is read once."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    if SWIZZLE and row >= num_rows:  # padding
        zero = tl.zeros([BLOCKS], tl.int32)
        for start in range(0, (num_blocks + 3) // 4 * 4, BLOCKS):
            store_swizzled(block_scale, row, 0, start + block, zero, num_blocks)
        return
    x += row * x_stride
    residual += row * residual_stride
    new_residual += row * num_blocks * 16
    normed += row * num_blocks * 16
    scale = tl.load(global_scale)
    mask = block < num_blocks
    low, high = _load_sum(x, residual, block * 16, mask, HAS_RESIDUAL)
    # before the reduction, which waits for all of the row
    weight_low, weight_high = load_halves(weight, block * 16, mask)
    squares = low * low + high * high  # [BLOCKS, 8]
    if not IS_WHOLE:
        for start in range(BLOCKS, num_blocks, BLOCKS):
            at = start + block
            low, high = _load_sum(x, residual, at * 16, at < num_blocks, HAS_RESIDUAL)
            squares += low * low + high * high
    mean = tl.div_rn(tl.sum(tl.sum(squares, axis=1), axis=0), (num_blocks * 16).to(tl.float32))
    factor = tl.div_rn(1.0, tl.sqrt_rn(mean + epsilon))

    for part in range(1 if IS_WHOLE else (num_blocks + BLOCKS - 1) // BLOCKS):
        at = part * BLOCKS + block
        mask = at < num_blocks
        if not IS_WHOLE:
            low, high = _load_sum(x, residual, at * 16, mask, HAS_RESIDUAL)
            weight_low, weight_high = load_halves(weight, at * 16, mask)
        if HAS_RESIDUAL:
            store_halves(new_residual, at * 16, low, high, mask)
        y_low = _normalize(low, widened(weight_low), factor, x.dtype.element_ty, UNIT_OFFSET)
        y_high = _normalize(high, widened(weight_high), factor, x.dtype.element_ty, UNIT_OFFSET)
        if HAS_NORMED:
            store_halves(normed, at * 16, y_low, y_high, mask)
        low_word, high_word, code = quantize_halves(y_low, y_high, scale, FOUR_OVER_SIX, LARGEST)
        store_codes(
            packed, block_scale, row, part * BLOCKS, 0, block, low_word, high_word, code, mask, num_blocks, SWIZZLE
        )


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    global_scale: Tensor,
    *,
    epsilon: float = 1e-6,
    residual: Tensor | None = None,
    unit_offset: bool = False,
    four_over_six: bool = False,
    swizzled: bool = False,
    keep_normed: bool = False,
) -> NormQuantized:
    """NVFP4 of RMSNorm(x [+ residual]) for x [..., K], bf16, fp16 or fp32.

    weight        [K], bf16, fp16 or fp32
    global_scale  fp32, one element: the static scale of the layer that follows
    residual      [..., K] of x's dtype; it is not changed
    unit_offset   the factor is 1 + weight, as in Gemma

    FormatError for a dtype, shape or device that does not fit.
    """
    op = "rms_norm_quantize"
    check_blocks(op, x)
    k = x.shape[-1]
    checks.check_shape(op, "weight", weight, (k,))
    checks.check_dtype(op, "weight", weight, FLOAT_DTYPES)
    check_global_scale(op, global_scale, x)
    checks.check_same_device(op, x=x, weight=weight, residual=residual)
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise FormatError(
            f"{op}: residual is {checks.describe_tensor(residual)}", hint=f"give {checks.describe_tensor(x)}, as x"
        )
    check_can_run(op, x, _norm_kernel)
    packed, block_scale = empty_outputs(x.shape, x.device, swizzled)
    new_residual = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device) if keep_normed else None
    flat = checks.rows(x)
    other = flat if residual is None else checks.rows(residual)
    num_rows, num_blocks = flat.shape[0], k // BLOCK
    blocks = min(max(4, triton.next_power_of_2(num_blocks)), _MOST_BLOCKS)
    if num_rows:
        with torch.cuda.device_of(x):
            _norm_kernel[(padded(num_rows, 128, swizzled),)](
                flat,
                other,
                weight.contiguous(),
                global_scale,
                packed.view(torch.int32),
                block_scale.view(torch.uint8),
                flat if new_residual is None else new_residual,
                flat if normed is None else normed,
                flat.stride(0),
                other.stride(0),
                num_rows,
                num_blocks,
                epsilon,
                BLOCKS=blocks,
                IS_WHOLE=num_blocks <= blocks,
                HAS_RESIDUAL=residual is not None,
                HAS_NORMED=keep_normed,
                UNIT_OFFSET=unit_offset,
                FOUR_OVER_SIX=four_over_six,
                SWIZZLE=swizzled,
                LARGEST=LARGEST_GLOBAL_SCALE[x.dtype],
                num_warps=min(max(blocks // BLOCKS_A_WARP, 1), 16),
                enable_fp_fusion=False,
            )
    return NormQuantized(packed, block_scale, new_residual, normed)
