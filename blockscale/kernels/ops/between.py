"""What stands between two linears of a layer: norms, gates, and positions and caches before attention."""

from collections.abc import Callable
from functools import cache as cached
from typing import Any

import torch
from torch import Tensor

from blockscale.errors import UsageError
from blockscale.kernels.device import describe
from blockscale.kernels.ops.library import cache_parts, define
from blockscale.kernels.paged_cache import KVFormat, PagedCache
from blockscale.kernels.select import Kernel, Op, choose

ACTIVATIONS = ("silu", "gelu_tanh", "clamped")


def add_rms_norm(x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(x + added, RMSNorm of it times weight), [T, K] like x (bf16, fp16, fp32); weight fp32 [K]."""
    total, out = _NORM(x, added, weight, epsilon)
    return (x if added is None else total), out


def gated(both: Tensor, activation: str = "silu", *, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """[T, K] of gate and up side by side, [T, 2 K]: activation(gate) * up; silu, gelu_tanh, or clamped (gpt-oss)."""
    return _GATED(both, activation, alpha, limit)


def rotate_into_cache(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: PagedCache,
    slots: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    epsilon: float = 1e-6,
) -> Tensor:
    """Queries [T, H, D], normed and turned; keys, likewise, and values of the same tokens are in the cache.

    heads     [T, H + 2 KV, D] in the cache's dtype: queries, keys, values
    cos, sin  fp32 [T, 1, R]: the first R elements of a head turn, element j < R/2 with j + R/2; sin's first half is
              negative
    slots     int64 [T]: page * page_size + place; those outside the cache are skipped
    norms     of queries and keys, fp32 [D] each
    """
    q_norm, k_norm = norms or (None, None)
    return _ROTATE(*cache_parts(cache), heads, cos, sin, slots, q_norm, k_norm, epsilon)


@cached
def launcher(op: Op, kernel: Kernel) -> Callable[..., Any]:
    """The function of a kernel, with the arguments of the op."""
    if kernel is Kernel.TORCH:
        from blockscale.kernels.reference import between

        plain: dict[Op, Callable[..., Any]] = {
            Op.ADD_RMS_NORM: between.add_rms_norm,
            Op.GATED: between.gated,
            Op.ROTATE_INTO_CACHE: between.rotate_into_cache,
        }
        return plain[op]
    from blockscale.kernels.triton.norm import add_rms_norm as norm
    from blockscale.kernels.triton.rotary import rotate_into_cache as rotate

    functions: dict[Op, Callable[..., Any]] = {
        Op.ADD_RMS_NORM: norm,
        Op.GATED: _triton_gated,
        Op.ROTATE_INTO_CACHE: rotate,
    }
    return functions[op]


def _triton_gated(both: Tensor, activation: str, alpha: float, limit: float) -> Tensor:
    from blockscale.kernels.triton.gated import gated as kernel
    from blockscale.kernels.triton.silu_quantize import Gate

    return kernel(both, Gate(activation), alpha, limit)


def _run(op: Op, x: Tensor) -> Callable[..., Any]:
    return launcher(op, choose(op, describe(x.device)).kernel)


def _norm(x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    total, out = _run(Op.ADD_RMS_NORM, x)(x, added, weight, epsilon)
    return (x.new_empty(0) if added is None else total), out  # results of ops are no views of operands


def _gated(both: Tensor, activation: str, alpha: float, limit: float) -> Tensor:
    if activation not in ACTIVATIONS:
        raise UsageError(f"no activation '{activation}'", hint=", ".join(ACTIVATIONS))
    y: Tensor = _run(Op.GATED, both)(both, activation, alpha, limit)
    return y


def _rotate(
    k_pages: Tensor,
    v_pages: Tensor,
    k_block_scale: Tensor | None,
    v_block_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    fmt: str,
    dtype: torch.dtype,
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    epsilon: float,
) -> Tensor:
    pages = PagedCache(KVFormat(fmt), k_pages, v_pages, k_block_scale, v_block_scale, k_scale, v_scale, dtype)
    norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
    q: Tensor = _run(Op.ROTATE_INTO_CACHE, heads)(heads, cos, sin, pages, slots, norms, epsilon)
    return q


def _fake_norm(x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(0) if added is None else x.new_empty(x.shape), x.new_empty(x.shape)


def _fake_gated(both: Tensor, activation: str, alpha: float, limit: float) -> Tensor:
    return both.new_empty(*both.shape[:-1], both.shape[-1] // 2)


def _fake_rotate(k_pages: Tensor, *others: Any) -> Tensor:
    heads = others[7]
    return heads.new_empty(heads.shape[0], heads.shape[1] - 2 * k_pages.shape[2], heads.shape[2])


_NORM = define(
    "add_rms_norm",
    "(Tensor x, Tensor? added, Tensor weight, float epsilon) -> (Tensor, Tensor)",
    _norm,
    _fake_norm,
)
_GATED = define("gated", "(Tensor both, str activation, float alpha, float limit) -> Tensor", _gated, _fake_gated)
_ROTATE = define(
    "rotate_into_cache",
    "(Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor(c!)? k_block_scale, Tensor(d!)? v_block_scale, "
    "Tensor? k_scale, Tensor? v_scale, str format, ScalarType dtype, Tensor heads, Tensor cos, Tensor sin, "
    "Tensor slots, Tensor? q_norm, Tensor? k_norm, float epsilon) -> Tensor",
    _rotate,
    _fake_rotate,
)
