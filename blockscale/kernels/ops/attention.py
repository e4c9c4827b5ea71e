"""Attention of new tokens to keys and values in pages: one token a sequence (decode), or several (prefill)."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from blockscale.kernels.device import describe
from blockscale.kernels.ops.library import cache_parts, define
from blockscale.kernels.paged_cache import KVFormat, LatentCache, PagedCache
from blockscale.kernels.select import Kernel, Op, choose


def attention_decode(
    q: Tensor,
    cache: PagedCache,
    page_table: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """[B, num_heads, D] like q: the last token of each sequence attends to its `lengths` [B] tokens.

    page_table  int32 [B, max_pages]
    window      tokens that a query sees, itself included; 0 for all
    softcap     logits become softcap * tanh(logits / softcap); 0 for none
    sinks       [num_heads]: a logit a head that takes part in the denominator alone
    """
    return _DECODE(q, *cache_parts(cache), page_table, lengths, scale, window, softcap, sinks)


def attention_prefill(
    q: Tensor,
    cache: PagedCache,
    page_table: Tensor,
    lengths: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """[T, num_heads, D] like q: new tokens of several sequences attend to what stands before them in the pages.

    lengths     int32 [B]: tokens of each sequence, the new ones included
    cu_seqlens  int32 [B + 1]: where each sequence's new tokens begin in q
    """
    return _PREFILL(q, *cache_parts(cache), page_table, lengths, cu_seqlens, scale, window, softcap, sinks)


def attention_mla(q: Tensor, cache: LatentCache, page_table: Tensor, lengths: Tensor, *, scale: float) -> Tensor:
    """[B, num_heads, latent_dim] like q: decode of multi-head latent attention, whose heads share key and value.

    q  [B, num_heads, latent_dim + rope_dim]; the rest as in `attention_decode`
    """
    parts = (cache.pages, cache.block_scale, cache.scale, cache.rope_dim, cache.format.value, cache.dtype)
    return _MLA(q, *parts, page_table, lengths, scale)


@cache
def launcher(op: Op, kernel: Kernel) -> Callable[..., Tensor]:
    """The function of a kernel, with the arguments of the op."""
    if kernel is Kernel.TRITON_ATTENTION:
        if op is Op.ATTENTION_DECODE:
            from blockscale.kernels.triton.attention_decode import attention_decode as decode

            return decode
        if op is Op.ATTENTION_MLA:
            from blockscale.kernels.triton.attention_mla import attention_mla as latent

            return latent
        from blockscale.kernels.triton.attention_prefill import attention_prefill as prefill

        return prefill
    from blockscale.kernels.reference import attention as reference

    plain: dict[Op, Callable[..., Tensor]] = {
        Op.ATTENTION_DECODE: reference.attention_decode,
        Op.ATTENTION_PREFILL: reference.attention_prefill,
        Op.ATTENTION_MLA: reference.attention_mla,
    }
    return plain[op]


def _paged(op: Op, q: Tensor, *operands: Any) -> Tensor:
    """The parts of the cache, then page_table, lengths [, cu_seqlens], scale, window, softcap, sinks."""
    k, v, k_block_scale, v_block_scale, k_scale, v_scale, fmt, dtype, *others = operands
    *tables, scale, window, softcap, sinks = others
    cache = PagedCache(KVFormat(fmt), k, v, k_block_scale, v_block_scale, k_scale, v_scale, dtype)
    run = launcher(op, choose(op, describe(cache.k.device)).kernel)
    return run(q, cache, *tables, scale=scale, window=window, softcap=softcap, sinks=sinks)


def _mla(
    q: Tensor,
    pages: Tensor,
    block_scale: Tensor | None,
    cache_scale: Tensor | None,
    rope_dim: int,
    fmt: str,
    dtype: torch.dtype,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
) -> Tensor:
    cache = LatentCache(KVFormat(fmt), pages, block_scale, cache_scale, rope_dim, dtype)
    run = launcher(Op.ATTENTION_MLA, choose(Op.ATTENTION_MLA, describe(pages.device)).kernel)
    return run(q, cache, page_table, lengths, scale=scale)


def _fake_mla(
    q: Tensor, pages: Tensor, block_scale: Tensor | None, cache_scale: Tensor | None, rope_dim: int, *others: object
) -> Tensor:
    return q.new_empty(*q.shape[:-1], q.shape[-1] - rope_dim)


def _fake(q: Tensor, *others: object) -> Tensor:
    return q.new_empty(q.shape)


_CACHE = (
    "Tensor k, Tensor v, Tensor? k_block_scale, Tensor? v_block_scale, Tensor? k_scale, Tensor? v_scale, "
    "str format, ScalarType dtype"
)
_OPTIONS = "float? scale, int window, float softcap, Tensor? sinks"
_DECODE = define(
    Op.ATTENTION_DECODE.value,
    f"(Tensor q, {_CACHE}, Tensor page_table, Tensor lengths, {_OPTIONS}) -> Tensor",
    partial(_paged, Op.ATTENTION_DECODE),
    _fake,
)
_PREFILL = define(
    Op.ATTENTION_PREFILL.value,
    f"(Tensor q, {_CACHE}, Tensor page_table, Tensor lengths, Tensor cu_seqlens, {_OPTIONS}) -> Tensor",
    partial(_paged, Op.ATTENTION_PREFILL),
    _fake,
)
_MLA = define(
    Op.ATTENTION_MLA.value,
    "(Tensor q, Tensor pages, Tensor? block_scale, Tensor? cache_scale, int rope_dim, str format, ScalarType dtype, "
    "Tensor page_table, Tensor lengths, float scale) -> Tensor",
    _mla,
    _fake_mla,
)
