"""The feed-forward layer of a mixture of experts over four-bit weights: see `experts` for the formula."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from blockscale.formats.spec import get_format
from blockscale.kernels.device import describe
from blockscale.kernels.experts import SILU, GatedActivation
from blockscale.kernels.ops.library import define
from blockscale.kernels.prepare import Layout, PreparedWeight
from blockscale.kernels.select import Kernel, Op, usable


def moe_w4a16(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: PreparedWeight,
    down: PreparedWeight,
    *,
    activation: GatedActivation = SILU,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """[T, N] of the dtype of x [T, K]: tokens through their experts, weighted and summed.

    topk_ids      int32 or int64 [T, top_k]; ids outside 0..E-1 add nothing
    topk_weights  float [T, top_k]
    gate_up       row-major stack [E, 2 H, K]; down  [E, N, H]
    """
    return _MOE(
        x,
        topk_ids,
        topk_weights,
        gate_up.packed,
        gate_up.block_scale,
        gate_up.global_scale,
        down.packed,
        down.block_scale,
        down.global_scale,
        list(gate_up.shape),
        list(down.shape),
        gate_up.format.name,
        gate_up.dtype,
        activation.alpha,
        activation.beta,
        activation.limit,
        activation.is_interleaved,
        gate_up_bias,
        down_bias,
    )


@cache
def launcher(kernel: Kernel) -> Callable[..., Tensor]:
    """The function of a kernel, with the arguments of `moe_w4a16`."""
    if kernel is Kernel.CUDA_MOE:
        from blockscale.kernels.cuda.moe import moe as few_tokens

        return few_tokens
    if kernel is Kernel.TRITON_MOE:
        from blockscale.kernels.triton.moe import moe

        return moe
    from blockscale.kernels.reference.moe import moe_w4a16 as reference

    return reference


def kernel_for(x: Tensor, topk_ids: Tensor, gate_up: PreparedWeight, down: PreparedWeight) -> Kernel:
    """The first that runs on the device; where that is for few tokens and has a reason against these, the next."""
    device = describe(gate_up.device)
    able = usable(Op.MOE_W4A16, device)
    if able[0].kernel is Kernel.CUDA_MOE:
        from blockscale.kernels.cuda.moe import why_not

        if len(gate_up.shape) != 3 or topk_ids.dim() != 2 or why_not(x, topk_ids, gate_up, down, device) is not None:
            return able[1].kernel
    return able[0].kernel


def _run(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Tensor,
    gate_up_block_scale: Tensor,
    gate_up_global_scale: Tensor,
    down: Tensor,
    down_block_scale: Tensor,
    down_global_scale: Tensor,
    gate_up_shape: list[int],
    down_shape: list[int],
    fmt: str,
    dtype: torch.dtype,
    alpha: float,
    beta: float,
    limit: float,
    is_interleaved: bool,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    def stack(packed: Tensor, block_scale: Tensor, global_scale: Tensor, shape: list[int]) -> PreparedWeight:
        return PreparedWeight(Layout.ROW_MAJOR, packed, block_scale, global_scale, tuple(shape), get_format(fmt), dtype)

    first = stack(gate_up, gate_up_block_scale, gate_up_global_scale, gate_up_shape)
    second = stack(down, down_block_scale, down_global_scale, down_shape)
    return launcher(kernel_for(x, topk_ids, first, second))(
        x,
        topk_ids,
        topk_weights,
        first,
        second,
        activation=GatedActivation(alpha, beta, limit, is_interleaved),
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )


def _fake(x: Tensor, *others: object) -> Tensor:
    down_shape = others[9]
    assert isinstance(down_shape, list)
    return x.new_empty(x.shape[0], down_shape[1])


_STACKS = (
    "Tensor gate_up, Tensor gate_up_block_scale, Tensor gate_up_global_scale, "
    "Tensor down, Tensor down_block_scale, Tensor down_global_scale, "
    "int[] gate_up_shape, int[] down_shape, str format, ScalarType dtype"
)
_ACTIVATION = "float alpha, float beta, float limit, bool is_interleaved"
_SCHEMA = (
    f"(Tensor x, Tensor topk_ids, Tensor topk_weights, {_STACKS}, {_ACTIVATION}, "
    "Tensor? gate_up_bias=None, Tensor? down_bias=None) -> Tensor"
)
_MOE = define(Op.MOE_W4A16.value, _SCHEMA, _run, _fake)
