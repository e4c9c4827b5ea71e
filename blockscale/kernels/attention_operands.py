"""What attention asks of its operands, in the same words for every kernel. Nothing here looks at values."""

import torch
from torch import Tensor

from blockscale.errors import UsageError
from blockscale.kernels.checks import check_dtype, check_same_device, check_shape, describe_tensor
from blockscale.kernels.paged_cache import LatentCache, PagedCache


def check_attention(
    op: str,
    q: Tensor,
    cache: PagedCache,
    page_table: Tensor,
    lengths: Tensor,
    sinks: Tensor | None,
    window: int,
    softcap: float,
) -> None:
    """Decode and prefill: q [*, num_heads, D] of the cache's dtype, and the rest as the ops say."""
    check_dtype(op, "q", q, (cache.dtype,))
    check_shape(op, "q", q, (None, None, cache.head_dim))
    if q.shape[1] == 0 or q.shape[1] % cache.num_kv_heads:
        raise UsageError(
            f"{op}: q is {describe_tensor(q)}, the cache has {cache.num_kv_heads} KV heads",
            hint="the number of query heads is a multiple of that of KV heads",
        )
    _check_pages(op, page_table, lengths)
    if sinks is not None:
        check_shape(op, "sinks", sinks, (q.shape[1],))
    check_same_device(op, q=q, cache=cache.k, page_table=page_table, lengths=lengths, sinks=sinks)
    if window < 0 or softcap < 0:
        raise UsageError(f"{op}: window {window}, softcap {softcap}", hint="0 turns either off; neither is negative")


def check_chunks(op: str, q: Tensor, lengths: Tensor, cu_seqlens: Tensor) -> None:
    """Prefill's own: cu_seqlens int32 [B + 1]."""
    check_dtype(op, "cu_seqlens", cu_seqlens, (torch.int32,))
    check_shape(op, "cu_seqlens", cu_seqlens, (lengths.shape[0] + 1,))
    check_same_device(op, q=q, cu_seqlens=cu_seqlens)


def check_latent(op: str, q: Tensor, cache: LatentCache, page_table: Tensor, lengths: Tensor) -> None:
    """Multi-head latent attention: q [B, num_heads, latent_dim + rope_dim]."""
    check_dtype(op, "q", q, (cache.dtype,))
    _check_pages(op, page_table, lengths)
    check_shape(op, "q", q, (lengths.shape[0], None, cache.latent_dim + cache.rope_dim))
    check_same_device(op, q=q, cache=cache.pages, page_table=page_table, lengths=lengths)


def _check_pages(op: str, page_table: Tensor, lengths: Tensor) -> None:
    check_dtype(op, "page_table", page_table, (torch.int32,))
    check_dtype(op, "lengths", lengths, (torch.int32,))
    check_shape(op, "lengths", lengths, (None,))
    check_shape(op, "page_table", page_table, (lengths.shape[0], None))
