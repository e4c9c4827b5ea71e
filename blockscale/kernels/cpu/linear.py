"""Linears over NVFP4 and MXFP4 weights on the CPU.

Two ways for activations. EXACT multiplies them as they are: weights are decoded exactly, sums are fp32, and the result
is rounded once. INT8 rounds them to 8 bits with a scale of amax / 127 per block of 16 (NVFP4) or 32 (MXFP4), and sums
integers: normal activations get an error of 0.5 to 0.6 % of their rms. It is another model, so a caller asks for it.

bf16 activations that are subnormal count as zero where the processor multiplies bf16 (AVX512_BF16).
"""

from ctypes import byref
from enum import Enum

import torch
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.formats.nvfp4 import global_scale_from_amax
from blockscale.formats.spec import NVFP4
from blockscale.kernels.checks import (
    check_activation,
    check_bias,
    check_contiguous,
    check_dtype,
    check_same_device,
    check_shape,
    rows,
)
from blockscale.kernels.cpu.layout import from_groups, group_bytes, num_groups
from blockscale.kernels.cpu.library import (
    DTYPE_CODES,
    FORMAT_CODES,
    Level,
    Linear,
    check_result,
    level_argument,
    library,
)
from blockscale.kernels.cpu.quantize import amax
from blockscale.kernels.prepare import Layout, PreparedWeight
from blockscale.kernels.reference import linear as reference
from blockscale.kernels.reference.quantize import check_global_scale


class Activations(Enum):
    """How activations enter the product. The values are kernels.h's."""

    EXACT = 0
    INT8 = 1
    FP4 = 2


def prepare(weight: PreparedWeight) -> PreparedWeight:
    """A row-major weight [N, K] in the order of kernels.h: uint8 [ceil(N/16), group bytes], scales included.

    Where the kernels cannot be built the weight stays as it is, and plain torch multiplies it.
    """
    if weight.layout is Layout.CPU:
        return weight
    if weight.layout is not Layout.ROW_MAJOR or len(weight.shape) != 2:
        raise FormatError(
            f"cpu: cannot lay out a weight {list(weight.shape)} in the layout {weight.layout.value}",
            hint="give a row-major weight [N, K]; take a stack apart first",
        )
    n, k, fmt = weight.n, weight.k, weight.format
    _check_on_cpu("prepare", weight)
    check_dtype("prepare", "packed", weight.packed, (torch.uint8,))
    check_dtype("prepare", "block_scale", weight.block_scale, (torch.uint8,))
    check_shape("prepare", "packed", weight.packed, (n, k // 2))
    check_shape("prepare", "block_scale", weight.block_scale, (n, k // fmt.block_size))
    built = library()
    if built is None:
        return weight
    packed, block_scale = weight.packed.contiguous(), weight.block_scale.contiguous()
    groups = torch.empty(num_groups(n), group_bytes(fmt, k), dtype=torch.uint8)
    built.blockscale_prepare(
        packed.data_ptr(),
        block_scale.data_ptr(),
        n,
        k,
        FORMAT_CODES[fmt],
        torch.get_num_threads(),
        groups.data_ptr(),
    )
    nothing = torch.empty(0, dtype=torch.uint8)
    return PreparedWeight(Layout.CPU, groups, nothing, weight.global_scale, weight.shape, fmt, weight.dtype)


def linear(x: Tensor, weight: PreparedWeight, bias: Tensor | None = None, *, level: Level | None = None) -> Tensor:
    """x [..., K] (bf16, fp16 or fp32) times `weight` [N, K] plus `bias` [N], exact but for fp32 sums.

    Returns [..., N] of the dtype of x. The same bytes for any number of threads and for any batch that a row of x
    comes in. `level` forces an instruction set; UsageError if this machine lacks it.
    """
    return _linear("linear_w4a16", x, weight, bias, Activations.EXACT, level)


def linear_int8(x: Tensor, weight: PreparedWeight, bias: Tensor | None = None, *, level: Level | None = None) -> Tensor:
    """As `linear` with activations rounded to int8 per block. Rows with NaN or Inf are multiplied exactly."""
    return _linear("linear_w4a16_int8", x, weight, bias, Activations.INT8, level)


def linear_w4a4(
    x: Tensor,
    weight: PreparedWeight,
    bias: Tensor | None = None,
    input_global_scale: Tensor | None = None,
    *,
    level: Level | None = None,
) -> Tensor:
    """As `linear` with activations in NVFP4, to the byte those of formats/; products and block sums are exact.

    input_global_scale  fp32 0-d of a static activation scale; None takes amax / 2688 of the finite values of x
    """
    plain = _for_torch(weight)
    if plain is not None:
        return reference.linear_w4a4(x, plain, bias, input_global_scale)
    if weight.format != NVFP4:
        raise FormatError(f"linear_w4a4: the weight is {weight.format.name}", hint="activations in NVFP4 go with NVFP4")
    check_activation("linear_w4a4", x, weight.k, tuple(DTYPE_CODES))
    if input_global_scale is None:
        input_global_scale = global_scale_from_amax(amax(x, level=level))
    check_global_scale("linear_w4a4", input_global_scale, x)
    return _linear("linear_w4a4", x, weight, bias, Activations.FP4, level, float(input_global_scale))


def _linear(
    op: str,
    x: Tensor,
    weight: PreparedWeight,
    bias: Tensor | None,
    activations: Activations,
    level: Level | None,
    x_global_scale: float = 1.0,
) -> Tensor:
    plain = _for_torch(weight)
    if plain is not None:
        return reference.linear_w4a16(x, plain, bias)
    check_activation(op, x, weight.k, tuple(DTYPE_CODES))
    check_bias(op, bias, weight.n, x)
    check_same_device(op, x=x, weight=weight.packed, bias=bias)
    _check_layout(op, weight)
    built = library()
    assert built is not None
    flat = rows(x)
    y = torch.empty(flat.shape[0], weight.n, dtype=x.dtype)
    added = None if bias is None else bias.float().contiguous()
    call = Linear(
        groups=weight.packed.data_ptr(),
        x=flat.data_ptr(),
        bias=None if added is None else added.data_ptr(),
        y=y.data_ptr(),
        level=level_argument(level),
        n=weight.n,
        k=weight.k,
        m=flat.shape[0],
        x_stride=flat.stride(0),
        global_scale=float(weight.global_scale),
        x_global_scale=x_global_scale,
        format=FORMAT_CODES[weight.format],
        dtype=DTYPE_CODES[x.dtype],
        activation=activations.value,
        threads=torch.get_num_threads(),
    )
    if check_result(op, built.blockscale_linear(byref(call)), level):
        bad = ~torch.isfinite(flat).all(-1)
        y[bad] = _linear(op, flat[bad], weight, bias, Activations.EXACT, level)
    return y.view(*x.shape[:-1], weight.n)


def _for_torch(weight: PreparedWeight) -> PreparedWeight | None:
    """The row-major weight where plain torch multiplies it: where the kernels could not be built, then or now."""
    if weight.layout is Layout.ROW_MAJOR:
        return weight
    return from_groups(weight) if weight.layout is Layout.CPU and library() is None else None


def _check_on_cpu(op: str, weight: PreparedWeight) -> None:
    if weight.device.type != "cpu":
        raise FormatError(f"{op}: the weight lies on {weight.device}", hint="these kernels run on the CPU")


def _check_layout(op: str, weight: PreparedWeight) -> None:
    """The C code trusts the size of the weight."""
    if weight.layout is not Layout.CPU or len(weight.shape) != 2:
        raise FormatError(
            f"{op}: a weight {list(weight.shape)} in the layout {weight.layout.value}",
            hint="lay it out with cpu.linear.prepare",
        )
    _check_on_cpu(op, weight)
    check_dtype(op, "the weight", weight.packed, (torch.uint8,))
    check_shape(op, "the weight", weight.packed, (num_groups(weight.n), group_bytes(weight.format, weight.k)))
    check_contiguous(op, "the weight", weight.packed)
