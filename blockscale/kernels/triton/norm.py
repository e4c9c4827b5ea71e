"""RMSNorm of the residual stream, with what is added to it before, in one pass.

total = x + added                                        rounded to the dtype of x
out   = total / sqrt(mean(total^2) + epsilon) * weight   in fp32, rounded once
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockscale.kernels.between_operands import check_norm
from blockscale.kernels.triton.chain import chained, enter_chain
from blockscale.kernels.triton.quantize import check_can_run

OP = "add_rms_norm"
# At a time: few registers, so that the program finds room beside blocks of the linear ahead and starts while they run
_COLUMNS = 4096


@triton.jit
def _norm_kernel(
    x, added, weight, total, out, x_stride, added_stride, num_columns, epsilon,
    COLUMNS: tl.constexpr, IS_WHOLE: tl.constexpr, HAS_ADDED: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """A row a program, COLUMNS at a time; IS_WHOLE: they hold all of it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    x += row * x_stride
    added += row * added_stride
    total += row * num_columns
    out += row * num_columns
    enter_chain(IS_CHAINED)
    if IS_WHOLE:
        mask = column < num_columns
        h = _sum(x, added, total, column, mask, HAS_ADDED)
        factor = tl.rsqrt(tl.sum(h * h, 0) / num_columns + epsilon)
        w = tl.load(weight + column, mask=mask, other=0.0)
        tl.store(out + column, (h * factor * w).to(out.dtype.element_ty), mask=mask)
    else:
        squares = tl.zeros([COLUMNS], tl.float32)
        for first in range(0, num_columns, COLUMNS):
            place = first + column
            h = _sum(x, added, total, place, place < num_columns, HAS_ADDED)
            squares += h * h
        factor = tl.rsqrt(tl.sum(squares, 0) / num_columns + epsilon)
        source = total if HAS_ADDED else x  # the sum's barriers stand between writing and reading again
        for first in range(0, num_columns, COLUMNS):
            place = first + column
            mask = place < num_columns
            h = tl.load(source + place, mask=mask, other=0.0).to(tl.float32)
            w = tl.load(weight + place, mask=mask, other=0.0)
            tl.store(out + place, (h * factor * w).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum(x, added, total, place, mask, HAS_ADDED: tl.constexpr):
    h = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if HAS_ADDED:
        h += tl.load(added + place, mask=mask, other=0.0).to(tl.float32)
        rounded = h.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=mask)
        h = rounded.to(tl.float32)
    return h


def add_rms_norm(x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(total, out), [T, K] like x; total is x itself where nothing is added.

    x, added  [T, K] of one dtype, rows of stride 1
    weight    fp32 [K]

    FormatError for a dtype, shape, stride or device that does not fit.
    """
    check_norm(OP, x, added, weight)
    check_can_run(OP, x, _norm_kernel)
    num_rows, num_columns = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out, total = torch.empty(x.shape, dtype=x.dtype, device=x.device), x
    if added is not None:
        added = added if added.stride(1) == 1 else added.contiguous()
        total = torch.empty_like(out)
    if num_rows:
        columns = min(triton.next_power_of_2(num_columns), _COLUMNS)
        with torch.cuda.device_of(x):
            _norm_kernel[(num_rows,)](
                x, x if added is None else added, weight, total, out,
                x.stride(0), 0 if added is None else added.stride(0), num_columns, epsilon,
                COLUMNS=columns, IS_WHOLE=num_columns <= columns, HAS_ADDED=added is not None,
                num_warps=max(columns // 512, 1), **chained(x.device),
            )  # fmt: skip
    return total, out
