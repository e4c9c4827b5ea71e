"""W4A8 linear: the FP8 tensor cores' speed for twice-rounded operands. A choice to be made knowingly.

    y[..., N] = (codes(x) [M, K] @ codes(W) [N, K].T) * scale(x) [M, 1] * row_scale [N] * global_scale (+ bias)

Weights in NVFP4 or MXFP4 become E4M3 with a scale per row, activations E4M3 with a scale per token; both are rounded to
four bits of significand by that. The product is torch's (cuBLAS). Weights are rounded at every call, or once, at one
byte each (`prepare`), which is the faster way where memory allows it. sm_89 and up.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.kernels.checks import check_activation, check_bias, check_multiple, check_same_device
from blockscale.kernels.cuda.dequantize import rows_to_e4m3, to_e4m3
from blockscale.kernels.prepare import PreparedWeight

_OP = "linear_w4a8"
_MULTIPLE = 16  # torch._scaled_mm takes N and K that are


@dataclass(frozen=True)
class E4m3Weight:
    """A weight [n, K] as E4M3, made once: weight ~= codes * scale.

    codes  float8_e4m3fn [N', K], N' = n rounded up to 16, zeros there
    scale  fp32 [1, N'], the global scale multiplied in
    """

    codes: Tensor
    scale: Tensor
    n: int

    @property
    def k(self) -> int:
        return self.codes.shape[1]


def prepare(weight: PreparedWeight) -> E4m3Weight:
    """One byte a weight beside, or instead of, the 4-bit one. `weight` is [N, K] in Layout.FRAGMENTS on a GPU."""
    check_multiple(_OP, "K", weight.k, _MULTIPLE)
    codes, row_scale = to_e4m3(weight, -(-weight.n // _MULTIPLE) * _MULTIPLE)
    return E4m3Weight(codes, (row_scale * weight.global_scale).view(1, -1), weight.n)


def linear(x: Tensor, weight: PreparedWeight | E4m3Weight, bias: Tensor | None = None) -> Tensor:
    """y [..., N] of the dtype of x.

    x       [..., K] bfloat16 or float16, any strides
    weight  [N, K] in Layout.FRAGMENTS, rounded to E4M3 for this call, or what `prepare` made of it
    bias    [N] of the dtype of x or fp32

    The product is rounded to bfloat16, whatever the dtype of x. FormatError for what it cannot take.
    """
    check_activation(_OP, x, weight.k)
    check_bias(_OP, bias, weight.n, x)
    ready = weight if isinstance(weight, E4m3Weight) else None
    check_same_device(_OP, x=x, weight=weight.codes if ready else weight.packed, bias=bias)  # type: ignore[union-attr]
    if x.device.type != "cuda":
        raise FormatError(f"{_OP}: x is on {x.device}", hint="move it to an NVIDIA GPU")
    if x.numel() == 0:
        return torch.empty(*x.shape[:-1], weight.n, dtype=x.dtype, device=x.device)
    if ready is None:
        assert isinstance(weight, PreparedWeight)
        ready = prepare(weight)
    codes, scale = rows_to_e4m3(x)
    # torch takes scales of rows only where the result is bfloat16.
    y = torch._scaled_mm(codes, ready.codes.T, scale, ready.scale, out_dtype=torch.bfloat16, use_fast_accum=True)
    y = y[:, : ready.n].to(x.dtype)
    if bias is not None:
        y = (y.float() + bias.float()).to(x.dtype)
    return y.reshape(*x.shape[:-1], ready.n)
