"""Attention of new tokens to the latents that multi-head latent attention keeps (DeepSeek-V2, 2024, section 2.1).

A cached row holds a token's latent, from which keys and values of every head are projected, and a key part with the
position that all heads share. There are two ways to the same result:

    absorbed  the projection to keys goes into the query, that to values behind the attention: nothing is expanded, for
              sequences with one new token
    expanded  the latents become keys and values of some heads at a time: fewer products a pair of tokens, for
              sequences with several
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from blockscale.formats.nvfp4 import decode_packed
from blockscale.kernels.ops.attention import attention_mla
from blockscale.kernels.ops.quantize import quantize_kv
from blockscale.kernels.paged_cache import KVFormat, LatentCache, PagedCache

_EXPANDED_BYTES = 256 << 20  # of keys and values at a time


@dataclass(frozen=True)
class Spans:
    """How a batch is divided between the two ways; read from the device once a batch.

    single, single_tokens  int64 [S]: sequences with one new token, and where it stands
    several                (sequence, first new token, end of them, context length) of the others
    """

    single: Tensor
    single_tokens: Tensor
    several: tuple[tuple[int, int, int, int], ...]


def divide(cu_seqlens: Tensor, lengths: Tensor) -> Spans:
    """cu_seqlens int32 [B + 1], lengths int32 [B]."""
    starts, contexts = cu_seqlens.tolist(), lengths.tolist()
    counts = [end - begin for begin, end in pairwise(starts)]
    single = [b for b, count in enumerate(counts) if count == 1]
    several = [(b, starts[b], starts[b + 1], contexts[b]) for b, count in enumerate(counts) if count > 1]
    device = lengths.device
    return Spans(
        torch.tensor(single, dtype=torch.int64, device=device),
        torch.tensor([starts[b] for b in single], dtype=torch.int64, device=device),
        tuple(several),
    )


def write_latents(cache: LatentCache, rows: Tensor, slots: Tensor) -> None:
    """rows [T, latent_dim + rope_dim] to their places, int64 [T]; what lies outside the cache is skipped."""
    quantize_kv(_as_one_head(cache), rows.unsqueeze(1), rows.unsqueeze(1), slots)


def attend_absorbed(
    q: Tensor, up_k: Tensor, up_v: Tensor, cache: LatentCache, page_table: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """[S, H, V] like q [S, H, nope + rope]: the last token of each sequence attends to all of its tokens.

    up_k  [H, nope, latent_dim]
    up_v  [H, V, latent_dim]
    """
    nope = up_k.shape[1]
    q_latent = torch.bmm(q[..., :nope].transpose(0, 1), up_k).transpose(0, 1)
    q_cached = torch.cat((q_latent, q[..., nope:]), dim=-1)
    out = attention_mla(q_cached, cache, page_table, lengths, scale=scale)
    return torch.bmm(out.transpose(0, 1), up_v.transpose(1, 2)).transpose(0, 1)


def attend_expanded(
    q: Tensor, up_k: Tensor, up_v: Tensor, cache: LatentCache, pages: Tensor, length: int, scale: float
) -> Tensor:
    """[T, H, V] like q [T, H, nope + rope]: the last T of one sequence's `length` tokens attend to what is before them.

    pages  int32 [P] of that sequence
    """
    rows = read_latents(cache, pages, length).to(q.dtype)  # [length, latent + rope]
    latent, rope = rows[:, : cache.latent_dim], rows[:, cache.latent_dim :]
    num_tokens, num_heads, width = q.shape
    bytes_a_head = length * (width + up_v.shape[1]) * q.element_size()
    step = max(1, min(num_heads, _EXPANDED_BYTES // bytes_a_head))
    position = torch.arange(length - num_tokens, length, device=q.device)
    is_seen = torch.arange(length, device=q.device) <= position.unsqueeze(1)
    out = []
    for first in range(0, num_heads, step):
        heads = slice(first, first + step)
        k_nope, v = latent @ up_k[heads].transpose(1, 2), latent @ up_v[heads].transpose(1, 2)  # [h, length, ..]
        k = torch.cat((k_nope, rope.expand(len(k_nope), -1, -1)), dim=-1)
        part = q[:, heads].transpose(0, 1)
        out.append(functional.scaled_dot_product_attention(part, k, v, attn_mask=is_seen, scale=scale))
    return torch.cat(out).transpose(0, 1)


def attend(
    q: Tensor,
    up_k: Tensor,
    up_v: Tensor,
    cache: LatentCache,
    page_table: Tensor,
    lengths: Tensor,
    spans: Spans | None,
    scale: float,
) -> Tensor:
    """[T, H, V] like q [T, H, nope + rope] of a whole batch; `spans` is None where every sequence has one new token."""
    if spans is None:
        return attend_absorbed(q, up_k, up_v, cache, page_table, lengths, scale)
    out = q.new_zeros(*q.shape[:2], up_v.shape[1])
    if len(spans.single):
        alone = q[spans.single_tokens]
        table, context = page_table[spans.single], lengths[spans.single]
        out[spans.single_tokens] = attend_absorbed(alone, up_k, up_v, cache, table, context, scale)
    for b, begin, end, length in spans.several:
        out[begin:end] = attend_expanded(q[begin:end], up_k, up_v, cache, page_table[b], length, scale)
    return out


def read_latents(cache: LatentCache, pages: Tensor, length: int) -> Tensor:
    """fp32 [length, latent_dim + rope_dim]: what a sequence's rows stand for."""
    index = pages[: -(-length // cache.page_size)].long()
    stored = cache.pages.view(torch.uint8)[index].view(cache.pages.dtype).flatten(0, 1)[:length]
    if cache.format is KVFormat.BITS16:
        return stored.float()
    assert cache.scale is not None
    if cache.format is KVFormat.FP8:
        return stored.float() * cache.scale
    assert cache.block_scale is not None
    block_scale = cache.block_scale.view(torch.uint8)[index].view(torch.float8_e4m3fn).flatten(0, 1)[:length]
    return decode_packed(stored.contiguous(), block_scale.contiguous(), cache.scale)


def _as_one_head(cache: LatentCache) -> PagedCache:
    """The same memory as keys and values of one head, which are written as one."""
    pages = cache.pages.unsqueeze(2)
    block_scale = None if cache.block_scale is None else cache.block_scale.unsqueeze(2)
    return PagedCache(cache.format, pages, pages, block_scale, block_scale, cache.scale, cache.scale, cache.dtype)
