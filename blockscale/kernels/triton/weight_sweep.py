"""Weights to NVFP4 with the block scale of least squared error: 11 E4M3 codes around the amax scale are tried.

    packed, block_scale = quantize_weight_sweep(weight, global_scale)

The codes amax code - 3 ... + 7, or 1 ... 15 where that is below 8, and the first of equal errors wins: the rule, the
proof that no other code is better, and the order of operations are the library's scale sweep without importances. As
errors are summed in the order in which torch sums 16 numbers on a CPU, the bytes are those of the sweep there; on
another device torch sums in another order, and there may choose differently between scales whose errors agree to
fp32's precision. A block with NaN or Inf decodes to NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockscale.kernels.triton.nvfp4_blocks import (
    LARGEST_GLOBAL_SCALE,
    block_amax,
    block_error,
    encode_halves,
    is_usual,
    load_halves,
    magnitudes,
    scale_of_amax,
    store_words,
    widened,
)
from blockscale.kernels.triton.quantize import BLOCK, check_blocks, check_can_run, check_global_scale, empty_outputs

_BLOCKS, _NUM_WARPS = 128, 4  # a tile


@triton.jit
def e4m3_value(code):
    """fp32 of positive E4M3 codes int32 1..126."""
    normal = ((code << 20) + 0x3C000000).to(tl.float32, bitcast=True)  # 120 << 23: the difference of the biases
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)


@triton.jit(do_not_specialize=["num_blocks"])
def _sweep_kernel(weight, global_scale, packed, block_scale, num_blocks, BLOCKS: tl.constexpr, LARGEST: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64) * BLOCKS
    block = tl.arange(0, BLOCKS)
    mask = block < num_blocks - tile
    low, high = load_halves(weight + tile * 16, block * 16, mask)
    low, high = widened(low), widened(high)
    scale = tl.load(global_scale)
    amax = block_amax(low, high)
    _, start = scale_of_amax(amax, 6.0 * scale, 0.0, 0.0, True)
    if is_usual(scale, LARGEST):
        low_magnitude, high_magnitude = magnitudes(low, high, scale, False)
    else:
        low_magnitude, high_magnitude = magnitudes(low, high, scale, True)
    is_low = start < 8
    num_codes = 11 + 4 * tl.max((is_low & mask).to(tl.int32))
    best_code, best_error = start, tl.full([BLOCKS], float("inf"), tl.float32)
    for i in range(num_codes):
        code = tl.where(is_low, i + 1, tl.minimum(tl.maximum(start - 3 + i, 1), 126))
        error = block_error(low_magnitude, high_magnitude, e4m3_value(code))
        is_better = (error < best_error) & (is_low | (i < 11))
        best_code, best_error = tl.where(is_better, code, best_code), tl.where(is_better, error, best_error)
    code = tl.where(amax == 0.0, start, best_code)  # a zero block keeps the scale of 1

    value = e4m3_value(code)
    if is_usual(scale, LARGEST):
        low_word, high_word, code = encode_halves(low, high, value, code, amax, scale, False)
    else:
        low_word, high_word, code = encode_halves(low, high, value, code, amax, scale, True)
    store_words(packed + tile * 2, block, low_word, high_word, mask)
    tl.store(block_scale + tile + block, code.to(tl.uint8), mask=mask)


def quantize_weight_sweep(weight: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """(packed uint8 [..., K/2], block_scale float8_e4m3fn [..., K/16]) of weight [..., N, K], bf16, fp16 or fp32.

    global_scale  fp32, one element, with headroom for a scale above the amax scale: amax / (6 * 256)

    FormatError for a dtype, a K or a scale that does not fit.
    """
    op = "quantize_weight_sweep"
    check_blocks(op, weight, "weight")
    check_global_scale(op, global_scale, weight)
    check_can_run(op, weight, _sweep_kernel)
    packed, block_scale = empty_outputs(weight.shape, weight.device)
    flat = weight.contiguous()
    num_blocks = flat.numel() // BLOCK
    if num_blocks:
        with torch.cuda.device_of(weight):
            _sweep_kernel[(triton.cdiv(num_blocks, _BLOCKS),)](
                flat,
                global_scale,
                packed.view(torch.int32),
                block_scale.view(torch.uint8),
                num_blocks,
                BLOCKS=_BLOCKS,
                LARGEST=LARGEST_GLOBAL_SCALE[weight.dtype],
                num_warps=_NUM_WARPS,
                enable_fp_fusion=False,
            )
    return packed, block_scale
