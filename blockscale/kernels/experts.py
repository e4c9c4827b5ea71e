"""A mixture of experts' feed-forward layer in four bits: what its operands are, and how they are checked.

    h[p] = act(x[token(p)] @ gate[e(p)].T + b, x[token(p)] @ up[e(p)].T + b)        p: a pair (token, choice)
    y[t] = sum over the choices p of t, in their order, of topk_weights[p] * (h[p] @ down[e(p)].T + b)

h is rounded to the dtype of x. A choice whose expert id lies outside 0..E-1 (padding, or an expert that another GPU
holds) adds nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.kernels import checks
from blockscale.kernels.prepare import Layout, PreparedWeight

_OP = "moe"


@dataclass(frozen=True)
class GatedActivation:
    """act(gate, up) = g * sigmoid(alpha * g) * (u + beta), g = min(gate, limit), u = clamp(up, -limit, limit).

    The defaults are SiLU(gate) * up; gpt-oss has alpha 1.702, beta 1, limit 7 and rows of gate and up in turn.

    is_interleaved  rows 2j of the weight are gate's and 2j + 1 up's; otherwise gate's rows stand above up's
    """

    alpha: float = 1.0
    beta: float = 0.0
    limit: float = float("inf")
    is_interleaved: bool = False


SILU = GatedActivation()
GPT_OSS = GatedActivation(alpha=1.702, beta=1.0, limit=7.0, is_interleaved=True)


def check_experts(weight: PreparedWeight, name: str) -> None:
    """`weight` is a row-major stack [E, N, K] whose global scales are [E], or [E, 2] for gate and up of their own."""
    if weight.layout is not Layout.ROW_MAJOR or len(weight.shape) != 3:
        found = f"{list(weight.shape)}, {weight.layout.value}"
        raise FormatError(f"{_OP}: {name} is {found}", hint=f"{name} is a row-major stack [E, N, K]")
    for part, tensor in (("packed", weight.packed), ("block_scale", weight.block_scale)):
        checks.check_contiguous(_OP, f"{name}.{part}", tensor)
        checks.check_dtype(_OP, f"{name}.{part}", tensor, (torch.uint8,))
    checks.check_aligned(_OP, f"{name}.packed", weight.packed, 8)
    num_experts, n, k = weight.shape
    checks.check_multiple(_OP, f"K of {name}", k, weight.format.block_size)
    checks.check_shape(_OP, f"{name}.packed", weight.packed, (num_experts, n, k // 2))
    checks.check_shape(_OP, f"{name}.block_scale", weight.block_scale, (num_experts, n, k // weight.format.block_size))
    scale = weight.global_scale
    checks.check_dtype(_OP, f"{name}.global_scale", scale, (torch.float32,))
    if not scale.is_contiguous() or tuple(scale.shape) not in ((num_experts,), (num_experts, 2)):
        raise FormatError(
            f"{_OP}: {name}.global_scale is {checks.describe_tensor(scale)}",
            hint=f"one for each expert, [{num_experts}], or [{num_experts}, 2] for gate and up",
        )


def check_routing(topk_ids: Tensor, topk_weights: Tensor, num_tokens: int) -> None:
    """ids int32 or int64 [T, top_k], weights float [T, top_k]."""
    checks.check_dtype(_OP, "topk_ids", topk_ids, (torch.int32, torch.int64))
    checks.check_dtype(_OP, "topk_weights", topk_weights, (torch.float32, torch.bfloat16, torch.float16))
    checks.check_shape(_OP, "topk_ids", topk_ids, (num_tokens, None))
    checks.check_shape(_OP, "topk_weights", topk_weights, tuple(topk_ids.shape))
    if topk_ids.shape[1] == 0:
        raise FormatError(f"{_OP}: topk_ids is [{num_tokens}, 0]", hint="each token needs at least one expert")


def check_moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: PreparedWeight,
    down: PreparedWeight,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> None:
    """Every operand of the layer; FormatError names the first that does not fit."""
    check_experts(gate_up, "gate_up")
    check_experts(down, "down")
    num_experts, rows, hidden = gate_up.shape
    checks.check_shape(_OP, "x", x, (None, hidden))
    checks.check_activation(_OP, x, hidden)
    check_routing(topk_ids, topk_weights, x.shape[0])
    checks.check_multiple(_OP, "rows of gate_up", rows, 2)
    if down.shape[0] != num_experts or down.k != rows // 2 or down.format != gate_up.format:
        found = f"{list(down.shape)} {down.format.name} after {list(gate_up.shape)} {gate_up.format.name}"
        raise FormatError(f"{_OP}: down is {found}", hint=f"down is [{num_experts}, N, {rows // 2}] of the same format")
    if down.global_scale.dim() != 1:
        raise FormatError(f"{_OP}: down.global_scale is {list(down.global_scale.shape)}", hint=f"[{num_experts}]")
    for name, bias, n in (("gate_up_bias", gate_up_bias, rows), ("down_bias", down_bias, down.n)):
        if bias is not None:
            checks.check_shape(_OP, name, bias, (num_experts, n))
            checks.check_dtype(_OP, name, bias, tuple(dict.fromkeys((x.dtype, torch.float32))))
            checks.check_contiguous(_OP, name, bias)
    checks.check_same_device(
        _OP,
        x=x,
        topk_ids=topk_ids,
        topk_weights=topk_weights,
        gate_up=gate_up.packed,
        down=down.packed,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )
