"""A mixture of experts' feed-forward layer in plain torch, one expert after the other, sums in fp32."""

import torch
from torch import Tensor

from blockscale.kernels.experts import SILU, GatedActivation, check_moe
from blockscale.kernels.prepare import Layout, PreparedWeight
from blockscale.kernels.reference.linear import product


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
    """[T, N] of the dtype of x [T, K]: the layer that `experts` describes.

    topk_ids      int32 or int64 [T, top_k]; ids outside 0..E-1 add nothing
    topk_weights  float [T, top_k]
    """
    check_moe(x, topk_ids, topk_weights, gate_up, down, gate_up_bias, down_bias)
    num_tokens, top_k = topk_ids.shape
    out = torch.zeros(num_tokens, top_k, down.n, device=x.device)
    for e in range(gate_up.shape[0]):
        # every token goes through every expert and a mask picks: nothing waits for the device to count
        picked = topk_ids == e
        h = expert_product(x.float(), gate_up, e, gate_up_bias, activation.is_interleaved)
        y = expert_product(gated(h, activation).to(x.dtype).float(), down, e, down_bias)
        out = torch.where(picked.unsqueeze(-1), y.unsqueeze(1), out)
    is_real = (topk_ids >= 0) & (topk_ids < gate_up.shape[0])
    weights = torch.where(is_real, topk_weights.float(), 0.0)
    y = torch.zeros(num_tokens, down.n, device=x.device)
    for choice in range(top_k):  # in their order, as the kernels add
        y += weights[:, choice, None] * out[:, choice]
    return y.to(x.dtype)


def gated(h: Tensor, activation: GatedActivation) -> Tensor:
    """fp32 [T, 2 N] of gate and up -> [T, N]."""
    if activation.is_interleaved:
        gate, up = h[:, 0::2], h[:, 1::2]
    else:
        gate, up = h.chunk(2, dim=1)
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.beta)


def expert_product(
    x: Tensor, stack: PreparedWeight, e: int, bias: Tensor | None, is_interleaved: bool = False
) -> Tensor:
    """fp32 [T, N]: x [T, K] times expert `e`, whose global scale is one number or one each for gate and up."""
    one = PreparedWeight(
        Layout.ROW_MAJOR,
        stack.packed[e],
        stack.block_scale[e],
        stack.global_scale[e],
        stack.shape[1:],
        stack.format,
        stack.dtype,
    )
    scale = stack.global_scale[e]
    if scale.dim():
        scale = scale.repeat(one.n // 2) if is_interleaved else scale.repeat_interleave(one.n // 2)
    y = product(x, one) * scale
    return y if bias is None else y + bias[e].float()
