"""The gated activation between the two products of a feed-forward layer: activation(gate) * up.

Formulas and roundings are those of `silu_quantize.activate`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockscale.kernels.between_operands import check_halves
from blockscale.kernels.triton.chain import chained, enter_chain
from blockscale.kernels.triton.quantize import check_can_run
from blockscale.kernels.triton.silu_quantize import NUMBERS, Gate, activate

OP = "gated"
_COLUMNS = 512


@triton.jit
def _gated_kernel(
    both, out, stride, num_columns, alpha, limit,
    COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """COLUMNS of a row a program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < num_columns
    enter_chain(IS_CHAINED)
    gate = tl.load(both + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(both + row * stride + num_columns + column, mask=mask, other=0.0).to(tl.float32)
    y = activate(gate, up, alpha, limit, ACTIVATION, both.dtype.element_ty)
    tl.store(out + row * num_columns + column, y.to(out.dtype.element_ty), mask=mask)


def gated(both: Tensor, activation: Gate = Gate.SILU, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """[T, K] of `both` [T, 2 K], whose first half is the gate. FormatError for what does not fit."""
    check_halves(OP, both)
    check_can_run(OP, both, _gated_kernel)
    num_rows, width = both.shape
    both = both if both.stride(1) == 1 else both.contiguous()
    out = torch.empty(num_rows, width // 2, dtype=both.dtype, device=both.device)
    if out.numel():
        with torch.cuda.device_of(both):
            _gated_kernel[(num_rows, triton.cdiv(width // 2, _COLUMNS))](
                both, out, both.stride(0), width // 2, alpha, limit,
                COLUMNS=_COLUMNS, ACTIVATION=NUMBERS[activation], num_warps=4, **chained(both.device),
            )  # fmt: skip
    return out
