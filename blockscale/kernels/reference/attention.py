"""Attention over paged caches in plain torch and fp32.

    out[i, h] = sum_t softmax(scale * q[i, h] . k[t])_t * v[t]    t: tokens that query i sees

Pages and tokens that no query sees may hold anything: they are replaced by zeros before they are multiplied.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor

from blockscale.kernels.attention_operands import check_attention, check_chunks, check_latent
from blockscale.kernels.checks import check_shape
from blockscale.kernels.paged_cache import LatentCache, PagedCache, dequantize_pages


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
    """[B, num_heads, D] like q: the last of each sequence's tokens attends to all of them.

    page_table  int32 [B, max_pages]
    lengths     int32 [B], tokens of each sequence; one without tokens gives zeros
    window      tokens a query sees, itself included; 0 for all
    softcap     logits become softcap * tanh(logits / softcap); 0 for none
    sinks       [num_heads]: a logit a head that takes part in the denominator alone
    """
    check_attention("attention_decode", q, cache, page_table, lengths, sinks, window, softcap)
    check_shape("attention_decode", "q", q, (lengths.shape[0], None, None))
    last = (lengths.long() - 1).unsqueeze(1)
    out = [
        _attend(q[b : b + 1], cache, page_table[b], lengths[b], last[b], scale, window, softcap, sinks)
        for b in range(q.shape[0])
    ]
    return torch.cat(out) if out else torch.empty_like(q)


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
    """[T, num_heads, D] like q: new tokens of several sequences, one after the other, attend to what came before them.

    lengths     int32 [B]: tokens of each sequence in the cache, the new ones included
    cu_seqlens  int32 [B + 1]: where each sequence's new tokens begin in q; it is read on the host
    """
    check_attention("attention_prefill", q, cache, page_table, lengths, sinks, window, softcap)
    check_chunks("attention_prefill", q, lengths, cu_seqlens)
    starts = cu_seqlens.tolist()
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for b, (begin, end) in enumerate(pairwise(starts)):
        if end > begin:
            position = lengths[b].long() - (end - begin) + torch.arange(end - begin, device=q.device)
            part = q[begin:end]
            out[begin:end] = _attend(part, cache, page_table[b], lengths[b], position, scale, window, softcap, sinks)
    return out


def attention_mla(q: Tensor, cache: LatentCache, page_table: Tensor, lengths: Tensor, *, scale: float) -> Tensor:
    """[B, num_heads, latent_dim] like q: decode of multi-head latent attention, whose heads share key and value.

    q  [B, num_heads, latent_dim + rope_dim]; a token's key is all of its page's row, its value the latent part
    """
    check_latent("attention_mla", q, cache, page_table, lengths)
    pages = cache.pages.unsqueeze(2)
    block_scale = None if cache.block_scale is None else cache.block_scale.unsqueeze(2)
    shared = PagedCache(cache.format, pages, pages, block_scale, block_scale, cache.scale, cache.scale, cache.dtype)
    out = attention_decode(q, shared, page_table, lengths, scale=scale)
    return out[..., : cache.latent_dim].contiguous()


def _attend(
    q: Tensor,
    cache: PagedCache,
    pages: Tensor,
    length: Tensor,
    position: Tensor,
    scale: float | None,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """q [T, H, D] of one sequence, whose queries stand at `position` int64 [T]."""
    num_heads, head_dim = q.shape[1:]
    token = torch.arange(pages.shape[0] * cache.page_size, device=q.device)
    k, v = (_tokens(cache, side, pages, token < length) for side in "kv")  # [S, num_kv_heads, D]
    group = num_heads // cache.num_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = torch.einsum("thd,shd->hts", q.float(), k) * (1 / math.sqrt(head_dim) if scale is None else scale)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    seen = (token <= position.unsqueeze(1)) & (token < length)
    if window:
        seen &= token > position.unsqueeze(1) - window
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(-1, 1, 1).expand(-1, q.shape[0], 1)
        weights = torch.softmax(torch.cat((logits, sink), dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(logits, dim=-1)
    weights = torch.where(seen.any(1)[:, None], weights, 0.0)  # a query that sees nothing
    return torch.einsum("hts,shd->thd", weights, v).to(q.dtype)


def _tokens(cache: PagedCache, side: str, pages: Tensor, is_real: Tensor) -> Tensor:
    """fp32 [S, num_kv_heads, D]: keys or values in the order of tokens, zero where `is_real` [S] is not."""
    stored, block_scale, scale = (
        (cache.k, cache.k_block_scale, cache.k_scale) if side == "k" else (cache.v, cache.v_block_scale, cache.v_scale)
    )
    first_of_page = is_real[:: cache.page_size]
    index = torch.where(first_of_page, pages.long(), 0)  # entries past the length may point anywhere
    picked_scale = None if block_scale is None else block_scale.view(torch.uint8)[index].view(torch.float8_e4m3fn)
    raw = stored.view(torch.uint8)[index].view(stored.dtype) if stored.element_size() == 1 else stored[index]
    values = dequantize_pages(cache.format, raw, picked_scale, scale).flatten(0, 1)
    return torch.where(is_real[:, None, None], values, 0.0)
