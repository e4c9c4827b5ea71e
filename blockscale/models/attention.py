"""Attention of a batch's new tokens to the paged cache, which gets their keys and values first.

On GPUs it is the ops of `kernels.ops.attention`. On the CPU the arithmetic is here, fp32, a sequence at a time, so that
a sequence's numbers do not depend on those beside it: a lone query reads its pages where they lie, several queries at
once go to torch's own attention.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from blockscale.kernels.cpu import decode as cpu_decode
from blockscale.kernels.ops.attention import attention_decode, attention_prefill
from blockscale.kernels.ops.quantize import quantize_kv
from blockscale.kernels.paged_cache import KVFormat, PagedCache, dequantize_pages
from blockscale.models.batch import Batch


@dataclass(frozen=True)
class Span:
    """One sequence's part of a batch, on the host.

    begin, end  its new tokens
    length      tokens of the sequence, the new ones included
    pages       int64 [ceil(length / page_size)]
    first       the first page where the pages follow one another, else None
    """

    begin: int
    end: int
    length: int
    pages: Tensor
    first: int | None


@dataclass(frozen=True)
class Plan:
    """What all layers' attention needs to know of a batch, found out once.

    spans  on the CPU alone
    page, place  int64 [T]: the slots taken apart, on the CPU alone
    """

    batch: Batch
    spans: tuple[Span, ...] | None = None
    page: Tensor | None = None
    place: Tensor | None = None


@dataclass(frozen=True)
class Rule:
    """How a layer attends.

    window   tokens that a query sees, itself included; 0 for all
    softcap  logits become softcap * tanh(logits / softcap); 0 for none
    sinks    fp32 [H]: a logit a head in the denominator alone
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None


def make_plan(batch: Batch, page_size: int) -> Plan:
    if batch.token_ids.device.type != "cpu":
        return Plan(batch)
    bounds, lengths = batch.cu_seqlens.tolist(), batch.lengths.tolist()
    spans = []
    for row, ((begin, end), length) in enumerate(zip(pairwise(bounds), lengths, strict=True)):
        ids = batch.page_table[row, : -(-length // page_size)].tolist()
        follows = bool(ids) and ids[-1] - ids[0] == len(ids) - 1 and all(b - a == 1 for a, b in pairwise(ids))
        spans.append(Span(begin, end, length, torch.tensor(ids, dtype=torch.int64), ids[0] if follows else None))
    return Plan(batch, tuple(spans), batch.slots // page_size, batch.slots % page_size)


def attend(q: Tensor, k: Tensor, v: Tensor, cache: PagedCache, plan: Plan, rule: Rule) -> Tensor:
    """[T, H, D] like q; k and v [T, num_kv_heads, D] of the same tokens are written to the cache first."""
    if plan.spans is None:
        quantize_kv(cache, k.contiguous(), v.contiguous(), plan.batch.slots)
        return attend_to_cache(q.contiguous(), cache, plan.batch, rule)
    if cache.format is KVFormat.BITS16:
        if not cpu_decode.write_pages(cache, k, v, plan.batch.slots):
            cache.k[plan.page, plan.place] = k.to(cache.dtype)
            cache.v[plan.page, plan.place] = v.to(cache.dtype)
    else:
        quantize_kv(cache, k.float(), v.float(), plan.batch.slots)
    if plan.batch.is_decode:
        found = _in_c(q, cache, plan.batch.page_table, plan.batch.lengths, rule)
        if found is not None:
            return found
    if len(plan.spans) == 1:
        return _attend_one(q, cache, plan.spans[0], rule).to(q.dtype)
    out = torch.empty_like(q)
    for span in plan.spans:
        if span.end > span.begin:
            out[span.begin : span.end] = _attend_one(q[span.begin : span.end], cache, span, rule)
    return out


def attend_to_cache(q: Tensor, cache: PagedCache, batch: Batch, rule: Rule) -> Tensor:
    """[T, H, D] like q, on a GPU: the new tokens' keys and values are in the cache."""
    table, lengths, scale = batch.page_table, batch.lengths, rule.scale
    window, softcap, sinks = rule.window, rule.softcap, rule.sinks
    if batch.is_decode:
        return attention_decode(q, cache, table, lengths, scale=scale, window=window, softcap=softcap, sinks=sinks)
    bounds = batch.cu_seqlens
    return attention_prefill(q, cache, table, lengths, bounds, scale=scale, window=window, softcap=softcap, sinks=sinks)


def _in_c(q: Tensor, cache: PagedCache, table: Tensor, lengths: Tensor, rule: Rule) -> Tensor | None:
    """One new token a sequence, by the kernel where it serves these operands."""
    return cpu_decode.attention_decode(
        q, cache, table, lengths, scale=rule.scale, window=rule.window, softcap=rule.softcap, sinks=rule.sinks
    )


def _attend_one(q: Tensor, cache: PagedCache, span: Span, rule: Rule) -> Tensor:
    """fp32 [n, H, D] of one sequence's n new tokens, queries [n, H, D]."""
    num = span.end - span.begin
    if num * span.length <= _FEW:
        lengths = torch.arange(span.length - num + 1, span.length + 1, dtype=torch.int32)
        found = _in_c(q, cache, span.pages.int().expand(num, -1), lengths, rule)
        if found is not None:
            return found
    size = cache.page_size
    oldest = max(span.length - num - rule.window + 1, 0) if rule.window else 0  # the first token that any of them sees
    skipped = oldest // size
    k = _pages(cache, span, skipped, is_key=True)  # [P, num_kv_heads, page_size, D] fp32
    v = _pages(cache, span, skipped, is_key=False)
    if num == 1:
        return _lone(q[0].float(), k, v, span.length - skipped * size, oldest - skipped * size, rule)
    return _several(q.float(), k, v, span.length - skipped * size, rule)


# Queries times tokens that are attended to one query after the other. More are quicker as torch's products, whose
# threads then spin for a while in the way of the kernels' own.
_FEW = 1 << 16


def _pages(cache: PagedCache, span: Span, skipped: int, *, is_key: bool) -> Tensor:
    """fp32 [P, num_kv_heads, page_size, D]: what the sequence's pages from `skipped` on stand for, in memory of its
    own."""
    stored, block_scale, scale = (
        (cache.k, cache.k_block_scale, cache.k_scale) if is_key else (cache.v, cache.v_block_scale, cache.v_scale)
    )

    def pick(pages: Tensor) -> Tensor:
        if span.first is not None:
            return pages[span.first + skipped : span.first + len(span.pages)]
        index = span.pages[skipped:]
        is_byte = pages.element_size() == 1  # float8 has no gather everywhere
        return pages.view(torch.uint8)[index].view(pages.dtype) if is_byte else pages[index]

    picked = pick(stored).transpose(1, 2)
    scales = None if block_scale is None else pick(block_scale).transpose(1, 2)
    return dequantize_pages(cache.format, picked, scales, scale)


def _lone(q: Tensor, k: Tensor, v: Tensor, length: int, oldest: int, rule: Rule) -> Tensor:
    """[1, H, D]: q [H, D] attends to tokens oldest .. length - 1 of the pages k, v [P, num_kv_heads, page_size, D]."""
    num_heads, head_dim = q.shape
    num_pages, kv_heads, size, _ = k.shape
    group = num_heads // kv_heads
    logits = torch.matmul(k, (q * rule.scale).view(kv_heads, group, head_dim).transpose(1, 2))  # [P, kv, size, group]
    logits = logits.permute(1, 3, 0, 2).reshape(kv_heads, group, num_pages * size)
    if rule.softcap:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    if length < num_pages * size:
        logits[..., length:] = -torch.inf
    if oldest:
        logits[..., :oldest] = -torch.inf
    if rule.sinks is None:
        weights = torch.softmax(logits, dim=-1)
    else:
        sinks = rule.sinks.float().view(kv_heads, group, 1)
        weights = torch.softmax(torch.cat((logits, sinks), dim=-1), dim=-1)[..., :-1]
    weights = weights.view(kv_heads, group, num_pages, size).permute(2, 0, 1, 3)  # [P, kv, group, size]
    if length < num_pages * size:
        v[-1, :, length - (num_pages - 1) * size :] = 0.0  # 0 * NaN of an earlier owner would be NaN
    return torch.matmul(weights, v).sum(0).view(1, num_heads, head_dim)


def _several(q: Tensor, k: Tensor, v: Tensor, length: int, rule: Rule) -> Tensor:
    """[n, H, D]: queries q [n, H, D] are the last n of `length` tokens."""
    num, num_heads, _ = q.shape
    k, v = (side.transpose(0, 1).flatten(1, 2)[:, :length] for side in (k, v))  # [num_kv_heads, length, D]
    position = torch.arange(length - num, length).unsqueeze(1)
    token = torch.arange(length)
    is_seen = token <= position
    if rule.window:
        is_seen &= token > position - rule.window
    if not rule.softcap and rule.sinks is None:
        queries = q.transpose(0, 1).unsqueeze(0)
        out = functional.scaled_dot_product_attention(
            queries, k.unsqueeze(0), v.unsqueeze(0), attn_mask=is_seen, scale=rule.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)
    group = num_heads // k.shape[0]
    out = torch.empty_like(q)
    step = max(1, _LOGITS // (num * length * group))
    for first in range(0, k.shape[0], step):
        heads = slice(first * group, (first + step) * group)
        out[:, heads] = _capped(q[:, heads], k[first : first + step], v[first : first + step], is_seen, rule, heads)
    return out


_LOGITS = 1 << 25  # fp32 logits held at once


def _capped(q: Tensor, k: Tensor, v: Tensor, is_seen: Tensor, rule: Rule, heads: slice) -> Tensor:
    """[n, h, D], with softcap or sinks, of some heads."""
    group = q.shape[1] // k.shape[0]
    logits = torch.einsum("nkgd,ksd->kgns", q.unflatten(1, (-1, group)), k) * rule.scale
    if rule.softcap:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    logits = logits.masked_fill(~is_seen, -math.inf)
    if rule.sinks is not None:
        sinks = rule.sinks[heads].float().view(-1, group, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat((logits, sinks), dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., : is_seen.shape[1]]
    return torch.einsum("kgns,ksd->nkgd", weights, v).flatten(1, 2)
