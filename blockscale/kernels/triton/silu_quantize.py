"""The gated activation of an MLP and NVFP4 of what comes out, in one pass.

    SILU        round(gate sigmoid(gate)) * up
    GELU_TANH   round(gate sigmoid(2 u)) * up,  u = sqrt(2 / pi) (gate + 0.044715 gate^3): GELU's tanh form
    CLAMPED     (up + 1) * gate sigmoid(alpha gate), gate at most `limit`, up within -limit..limit: gpt-oss

in fp32, rounded to gate's dtype where `round` stands and at the end, as the models do in 16 bits (CLAMPED: at the end
only); then packed and block_scale as `quantize` gives them. NaN and Inf go through as in bf16.
"""

from enum import Enum

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.kernels import checks
from blockscale.kernels.triton.nvfp4_blocks import (
    LARGEST_GLOBAL_SCALE,
    load_halves,
    load_pairs,
    quantize_halves,
    store_codes,
    store_halves,
    tile_places,
    widened,
)
from blockscale.kernels.triton.quantize import (
    BLOCK,
    FAR,
    check_blocks,
    check_can_run,
    check_global_scale,
    empty_outputs,
    near_rows,
    tiles_of,
)


class Gate(Enum):
    """What the gate goes through."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    CLAMPED = "clamped"


_SILU: tl.constexpr = tl.constexpr(0)
_GELU_TANH: tl.constexpr = tl.constexpr(1)
_CLAMPED: tl.constexpr = tl.constexpr(2)
NUMBERS = {Gate.SILU: 0, Gate.GELU_TANH: 1, Gate.CLAMPED: 2}


@triton.jit
def activate(gate, up, alpha, limit, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """fp32 of any shape, holding numbers of DTYPE."""
    if ACTIVATION == _CLAMPED:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
        return ((up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))).to(DTYPE).to(tl.float32)
    exponent = gate
    if ACTIVATION == _GELU_TANH:
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    gate = (gate / (1.0 + tl.exp(-exponent))).to(DTYPE).to(tl.float32)
    return (gate * up).to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "tiles_a_row"])
def _gated_kernel(
    gate,
    up,
    global_scale,
    packed,
    block_scale,
    activated,
    gate_stride,
    up_stride,
    num_rows,
    num_blocks,
    tiles_a_row,
    alpha,
    limit,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_ACTIVATED: tl.constexpr,
    FOUR_OVER_SIX: tl.constexpr,
    SWIZZLE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    first_row, first_block, row, block, mask = tile_places(num_rows, num_blocks, tiles_a_row, ROWS, COLUMNS)
    first = first_block.to(tl.int64) * 16
    if IS_INTERLEAVED:
        pairs = gate + first_row * gate_stride + first * 2
        gate_low, up_low, gate_high, up_high = load_pairs(pairs, row * gate_stride + block * 32, mask)
    else:
        gate_low, gate_high = load_halves(gate + first_row * gate_stride + first, row * gate_stride + block * 16, mask)
        up_low, up_high = load_halves(up + first_row * up_stride + first, row * up_stride + block * 16, mask)
        gate_low, gate_high, up_low, up_high = widened(gate_low), widened(gate_high), widened(up_low), widened(up_high)
    low = activate(gate_low, up_low, alpha, limit, ACTIVATION, gate.dtype.element_ty)
    high = activate(gate_high, up_high, alpha, limit, ACTIVATION, gate.dtype.element_ty)
    if HAS_ACTIVATED:
        start = activated + first_row * num_blocks * 16 + first
        store_halves(start, (row * num_blocks + block) * 16, low, high, mask)
    low_word, high_word, code = quantize_halves(low, high, tl.load(global_scale), FOUR_OVER_SIX, LARGEST)
    store_codes(
        packed, block_scale, first_row, first_block, row, block, low_word, high_word, code, mask, num_blocks, SWIZZLE
    )


def silu_mul_quantize(
    gate: Tensor,
    up: Tensor,
    global_scale: Tensor,
    *,
    activation: Gate = Gate.SILU,
    alpha: float = 1.702,
    limit: float = 7.0,
    four_over_six: bool = False,
    swizzled: bool = False,
    activated: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(packed uint8 [..., K/2], block_scale float8_e4m3fn [..., K/16] or swizzled) of activation(gate) * up.

    gate, up      [..., K] of one dtype, bf16, fp16 or fp32: the halves of one tensor, h[..., :K] and h[..., K:], or
                  its even and odd elements, h[..., 0::2] and h[..., 1::2], or any two
    alpha, limit  of CLAMPED
    activated     [..., K] of gate's dtype, contiguous: also gets what was quantized

    FormatError for a dtype, shape, stride or device that does not fit.
    """
    op = "silu_mul_quantize"
    check_blocks(op, gate, "gate")
    if up.shape != gate.shape or up.dtype != gate.dtype:
        raise FormatError(f"{op}: up is {checks.describe_tensor(up)}", hint=f"give {checks.describe_tensor(gate)}")
    check_global_scale(op, global_scale, gate)
    checks.check_same_device(op, gate=gate, up=up, activated=activated)
    if activated is not None:
        checks.check_shape(op, "activated", activated, gate.shape)
        checks.check_dtype(op, "activated", activated, (gate.dtype,))
        checks.check_contiguous(op, "activated", activated)
    check_can_run(op, gate, _gated_kernel)
    packed, block_scale = empty_outputs(gate.shape, gate.device, swizzled)
    k = gate.shape[-1]
    pairs = _interleaved_rows(gate, up)
    gate_rows, up_rows = (near_rows(gate), near_rows(up)) if pairs is None else (pairs, pairs)
    num_rows, num_blocks = gate_rows.shape[0], k // BLOCK
    tile, tiles_a_row, num_programs = tiles_of(num_rows, num_blocks, swizzled)
    if num_rows:
        with torch.cuda.device_of(gate):
            _gated_kernel[(num_programs,)](
                gate_rows,
                up_rows,
                global_scale,
                packed.view(torch.int32),
                block_scale.view(torch.uint8),
                gate_rows if activated is None else activated,
                gate_rows.stride(0),
                up_rows.stride(0),
                num_rows,
                num_blocks,
                tiles_a_row,
                alpha,
                limit,
                ROWS=tile.rows,
                COLUMNS=tile.columns,
                ACTIVATION=NUMBERS[activation],
                IS_INTERLEAVED=pairs is not None,
                HAS_ACTIVATED=activated is not None,
                FOUR_OVER_SIX=four_over_six,
                SWIZZLE=swizzled,
                LARGEST=LARGEST_GLOBAL_SCALE[gate.dtype],
                num_warps=tile.num_warps,
                enable_fp_fusion=False,
            )
    return packed, block_scale


def _interleaved_rows(gate: Tensor, up: Tensor) -> Tensor | None:
    """[M, K] view of the gate if both are every second element of one tensor, the gate first: one load brings both."""
    follows = up.data_ptr() == gate.data_ptr() + gate.element_size()
    if not follows or gate.stride() != up.stride() or gate.stride(-1) != 2:
        return None
    rows = gate.reshape(-1, gate.shape[-1])
    is_view = rows.data_ptr() == gate.data_ptr() and rows.stride(-1) == 2
    return rows if is_view and rows.stride(0) < FAR else None
