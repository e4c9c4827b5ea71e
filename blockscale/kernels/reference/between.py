"""What stands between two linears of a layer, in plain torch: fp32 inside, rounded once where a result is."""

import torch
from torch import Tensor
from torch.nn import functional

from blockscale.kernels.between_operands import check_halves, check_heads, check_norm
from blockscale.kernels.paged_cache import PagedCache
from blockscale.kernels.reference.kv import quantize_kv


def add_rms_norm(x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(x + added, RMSNorm of it times weight), [T, K] like x; weight fp32 [K]."""
    check_norm("add_rms_norm", x, added, weight)
    total = x if added is None else x + added
    return total, _norm(total, weight, epsilon)


def gated(both: Tensor, activation: str = "silu", alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """[T, K] of gate and up side by side, [T, 2 K]: activation(gate) * up; "silu", "gelu_tanh" or "clamped"."""
    check_halves("gated", both)
    gate, up = both.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate) * up
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.float().clamp(max=limit), up.float().clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(both.dtype)


def rotate_into_cache(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: PagedCache,
    slots: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    epsilon: float = 1e-6,
) -> Tensor:
    """Queries [T, H, D], normed and turned; keys, likewise, and values of `heads` [T, H + 2 KV, D] are in the cache.

    cos, sin  fp32 [T, 1, R]: the first R elements of a head turn
    slots     int64 [T]: page * page_size + place; those outside the cache are skipped
    """
    check_heads("rotate_into_cache", heads, cos, sin, cache, slots, norms)
    num_kv = cache.num_kv_heads
    q, k, v = heads.split([heads.shape[1] - 2 * num_kv, num_kv, num_kv], dim=1)
    if norms is not None:
        q, k = (_norm(x, weight, epsilon) for x, weight in zip((q, k), norms, strict=True))
    quantize_kv(cache, _turn(k, cos, sin), v.contiguous(), slots)
    return _turn(q, cos, sin)


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return functional.rms_norm(x.float(), weight.shape, weight, epsilon).to(x.dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size = cos.shape[-1]
    wide = x.float()
    turned, rest = wide[..., :size], wide[..., size:]
    swapped = torch.cat((turned[..., size // 2 :], turned[..., : size // 2]), dim=-1)
    return torch.cat((turned * cos + swapped * sin, rest), dim=-1).to(x.dtype)
