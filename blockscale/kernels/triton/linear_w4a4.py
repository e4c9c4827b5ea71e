"""W4A4 as Blackwell computes it, on GPUs without FP4 instructions: for evaluation at the speed of 16-bit products.

    x ~= e2m1(code) * block_scale * input_global_scale     the bytes of `formats.nvfp4`, by `quantize`
    y  = (sum_k of exact products, in fp32) * (input_global_scale * global_scale) + bias

E2M1 * E4M3 has 6 bits and fits bf16 on both sides, so the 16-bit tensor cores multiply the very numbers that the FP4
ones do; what differs is the order of the fp32 sum, which no two GPUs share.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.formats.spec import NVFP4
from blockscale.formats.tensor import FLOAT_DTYPES
from blockscale.kernels.checks import check_activation, rows
from blockscale.kernels.prepare import PreparedWeight
from blockscale.kernels.triton.decode import decode_groups
from blockscale.kernels.triton.linear import check_operands, choose_for, multiply
from blockscale.kernels.triton.quantize import quantize, quantize_dynamic


@triton.jit(do_not_specialize=["M"])
def _decode_rows(
    groups,  # int64 [M, num_groups]
    scales,  # uint8 [M, num_groups]
    out,  # bf16 [M, 16 * (num_groups up to a multiple of 4)]
    M,
    num_groups,
    out_stride,
    BLOCK_M: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Activations as operands: e2m1 * e4m3 * 2^-8 in the order of `decode_groups`, zeros past the end."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = m.to(tl.int64)[:, None]
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[None, :]
    inside = (m < M)[:, None] & (g < num_groups)
    codes = tl.load(groups + row * num_groups + g, mask=inside, other=0)
    scale = tl.load(scales + row * num_groups + g, mask=inside, other=0)
    k = tl.program_id(1) * GROUPS * 16 + tl.arange(0, GROUPS * 16)[None, :]
    values = decode_groups(codes, scale, out.dtype.element_ty, False)
    tl.store(out + row * out_stride + k, values, mask=(m < M)[:, None] & (k < out_stride))


def linear(
    x: Tensor, weight: PreparedWeight, bias: Tensor | None = None, input_global_scale: Tensor | None = None
) -> Tensor:
    """[..., K] bf16, fp16 or fp32 -> [..., N] of its dtype.

    weight              [N, K] NVFP4 in Layout.ROW_MAJOR
    bias                [N] of x's dtype or fp32
    input_global_scale  fp32 0-d of a static activation scale; None takes it from the amax of x

    A block of activations with NaN or Inf makes its row of y NaN. FormatError for operands that do not fit.
    """
    op = "linear_w4a4"
    check_activation(op, x, weight.k, FLOAT_DTYPES)
    check_operands(op, x, weight, bias)
    if weight.format != NVFP4:
        raise FormatError(f"{op}: the weight is {weight.format.name}", hint="activations in NVFP4 go with NVFP4")
    flat = rows(x)
    y = torch.empty(flat.shape[0], weight.n, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y.view(*x.shape[:-1], weight.n)
    if input_global_scale is None:
        packed, block_scale, input_global_scale = quantize_dynamic(flat)
    else:
        packed, block_scale = quantize(flat, input_global_scale)
    with torch.cuda.device_of(x):
        values = _decoded(packed, block_scale.view(torch.uint8))
        config = replace(choose_for(flat, weight), reorder=True)
        multiply(values, weight, bias, y, config, input_global_scale)
    return y.view(*x.shape[:-1], weight.n)


def _decoded(packed: Tensor, block_scale: Tensor) -> Tensor:
    """bf16 [M, K up to a multiple of 64]: the operand that `multiply` takes with `reorder` and an input scale."""
    m, num_groups = block_scale.shape
    padded = -(-num_groups // 4) * 64
    out = torch.empty(m, padded, dtype=torch.bfloat16, device=packed.device)
    grid = (triton.cdiv(m, 16), triton.cdiv(padded, 256))
    _decode_rows[grid](packed.view(torch.int64), block_scale, out, m, num_groups, padded, BLOCK_M=16, GROUPS=16)
    return out
