"""What the CUDA linears ask of their operands."""

from torch import Tensor

from blockscale.errors import FormatError
from blockscale.kernels.checks import check_activation, check_bias, check_contiguous, check_same_device
from blockscale.kernels.device import describe
from blockscale.kernels.prepare import Layout, PreparedWeight


def check_fragments(op: str, weight: PreparedWeight) -> None:
    """FormatError unless it is one weight [N, K] in Layout.FRAGMENTS."""
    if weight.layout is not Layout.FRAGMENTS or len(weight.shape) != 2:
        found = f"{weight.layout.value} {list(weight.shape)}"
        raise FormatError(f"{op}: the weight is {found}", hint="prepare a weight [N, K] with layouts.to_fragments")


def check_linear(op: str, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> None:
    """x [..., K], such a weight and a contiguous bias [N] or None, all on one GPU of compute capability 9.0."""
    check_fragments(op, weight)
    check_activation(op, x, weight.k)
    check_bias(op, bias, weight.n, x)
    check_same_device(op, x=x, weight=weight.packed, bias=bias)
    device = describe(x.device)
    if device.capability != (9, 0):
        raise FormatError(f"{op}: runs on compute capability 9.0, not on {device.name}", hint="use another kernel")
    if bias is not None:
        check_contiguous(op, "bias", bias)
