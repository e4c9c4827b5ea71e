"""What the ops between linears ask of their operands, in the same words for every kernel. Nothing here looks at
values."""

import torch
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.formats.tensor import FLOAT_DTYPES
from blockscale.kernels.checks import check_contiguous, check_dtype, check_same_device, check_shape
from blockscale.kernels.paged_cache import PagedCache


def check_norm(op: str, x: Tensor, added: Tensor | None, weight: Tensor) -> None:
    """x and added [T, K] of one dtype, weight fp32 [K]."""
    _check_factor(op, "weight", weight, None)
    check_shape(op, "x", x, (None, weight.shape[0]))
    check_dtype(op, "x", x, FLOAT_DTYPES)
    if added is not None:
        check_shape(op, "added", added, tuple(x.shape))
        check_dtype(op, "added", added, (x.dtype,))
    check_same_device(op, x=x, weight=weight, added=added)


def check_halves(op: str, both: Tensor) -> None:
    """Gate and up side by side, [T, 2 K]."""
    check_shape(op, "both", both, (None, None))
    check_dtype(op, "both", both, FLOAT_DTYPES)
    if both.shape[1] % 2:
        raise FormatError(f"{op}: rows of {both.shape[1]} are no two halves", hint="give gate and up side by side")


def check_heads(
    op: str,
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: PagedCache,
    slots: Tensor,
    norms: tuple[Tensor, Tensor] | None,
) -> None:
    """heads [T, H + 2 KV, D] of the cache's dtype, cos and sin fp32 [T, 1, R], slots int64 [T], norms fp32 [D]."""
    num_kv_heads, size = cache.num_kv_heads, cache.head_dim
    check_shape(op, "heads", heads, (None, None, size))
    check_dtype(op, "heads", heads, (cache.dtype,))
    num_tokens, turned = heads.shape[0], cos.shape[-1] if cos.dim() else 0
    if heads.shape[1] <= 2 * num_kv_heads or turned % 2 or not 0 < turned <= size:
        raise FormatError(
            f"{op}: {heads.shape[1]} heads of {size}, {num_kv_heads} of them keys, {turned} elements turned",
            hint="heads are queries, keys and values, and an even number of elements turns",
        )
    for name, x in (("cos", cos), ("sin", sin)):
        check_shape(op, name, x, (num_tokens, 1, turned))
        check_dtype(op, name, x, (torch.float32,))
        check_contiguous(op, name, x)
    check_shape(op, "slots", slots, (num_tokens,))
    check_dtype(op, "slots", slots, (torch.int64,))
    check_contiguous(op, "slots", slots)
    q_norm, k_norm = norms or (None, None)
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            _check_factor(op, name, weight, size)
    check_same_device(op, cache=cache.k, heads=heads, cos=cos, sin=sin, slots=slots, q_norm=q_norm, k_norm=k_norm)


def _check_factor(op: str, name: str, weight: Tensor, size: int | None) -> None:
    check_shape(op, name, weight, (size,))
    check_dtype(op, name, weight, (torch.float32,))
    check_contiguous(op, name, weight)
