"""Paged caches with every byte that must not be read poisoned, and attention over them in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.formats.nvfp4 import block_amax, block_scale_from_amax, encode_packed
from blockscale.kernels.paged_cache import KVFormat, PagedCache, allocate, dequantize_pages

# A byte that makes NaN: of E4M3, and twice of bfloat16 and float16 (0x7F7F is a finite bfloat16)
POISON = {KVFormat.BITS16: 0xFF, KVFormat.FP8: 0x7F, KVFormat.NVFP4: 0x7F}


@dataclass(frozen=True)
class Case:
    """Operands of one call; `cache` is read through `page_table` [batch, max_pages] and `lengths` [batch]."""

    q: Tensor
    cache: PagedCache
    page_table: Tensor
    lengths: Tensor


def make_case(
    fmt: KVFormat,
    lengths: list[int],
    *,
    num_queries: int | None = None,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    device: str = "cpu",
    k_scale: float = 0.02,
    v_scale: float = 0.004,
) -> Case:
    """Random queries and tokens, pages out of order, one page that nobody owns; unused slots hold POISON."""
    generator = torch.Generator().manual_seed(seed)
    max_pages = max(1, -(-max(lengths) // page_size)) + 1
    order = torch.randperm(len(lengths) * max_pages + 1, generator=generator).to(torch.int32)
    page_table = order[:-1].view(len(lengths), max_pages)
    cache = allocate(fmt, len(order), page_size, num_kv_heads, head_dim, k_scale=k_scale, v_scale=v_scale, dtype=dtype)
    for tensor in (cache.k, cache.v, cache.k_block_scale, cache.v_block_scale):
        if tensor is not None:
            tensor.view(torch.uint8).fill_(POISON[fmt])
    for b, length in enumerate(lengths):
        token = torch.arange(length)
        page, slot = page_table[b, token // page_size].long(), token % page_size
        for pages, block_scale, scale in (
            (cache.k, cache.k_block_scale, cache.k_scale),
            (cache.v, cache.v_block_scale, cache.v_scale),
        ):
            x = torch.randn(length, num_kv_heads, head_dim, generator=generator)
            if fmt is KVFormat.BITS16:
                pages[page, slot] = x.to(dtype)
            elif fmt is KVFormat.FP8:
                pages.view(torch.uint8)[page, slot] = (
                    (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
                )
            elif length:
                scales = block_scale_from_amax(block_amax(x), scale)
                pages[page, slot] = encode_packed(x, scales, scale)
                block_scale.view(torch.uint8)[page, slot] = scales.view(torch.uint8)
        page_table[b, -(-length // page_size) :] = 1 << 30  # entries past the end are never looked up
    q = torch.randn(num_queries or len(lengths), num_heads, head_dim, generator=generator).to(dtype)
    case = Case(q, cache, page_table, torch.tensor(lengths, dtype=torch.int32))
    return case if device == "cpu" else to_device(case, device)


def to_device(case: Case, device: str) -> Case:
    def move(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(device)

    c = case.cache
    parts = (move(t) for t in (c.k, c.v, c.k_block_scale, c.v_block_scale, c.k_scale, c.v_scale))
    cache = PagedCache(c.format, *parts, c.dtype)
    return Case(case.q.to(device), cache, case.page_table.to(device), case.lengths.to(device))


def tokens_of(case: Case, b: int) -> tuple[Tensor, Tensor]:
    """Keys and values of sequence b, float64 [length, num_kv_heads, D]."""
    c = case.cache
    token = torch.arange(int(case.lengths[b]), device=case.lengths.device)
    page, slot = case.page_table[b, token // c.page_size].long(), token % c.page_size
    sides = ((c.k, c.k_block_scale, c.k_scale), (c.v, c.v_block_scale, c.v_scale))
    k, v = (dequantize_pages(c.format, x[page, slot][:, None], s if s is None else s[page, slot][:, None], g)[:, 0]
            for x, s, g in sides)  # fmt: skip
    return k.double(), v.double()


def attend(
    q: Tensor, k: Tensor, v: Tensor, first_position: int, *, scale: float | None = None, window: int = 0,
    softcap: float = 0.0, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """float64 [queries, num_heads, D] of queries at `first_position` and after, and what its error is measured by.

    The second result is sum_t p_t |v_t|: what rounding each probability to one unit can change.
    """
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    k = k.repeat_interleave(num_heads // num_kv_heads, 1)
    v = v.repeat_interleave(num_heads // num_kv_heads, 1)
    logits = torch.einsum("qhd,thd->hqt", q.double(), k) * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    position = first_position + torch.arange(q.shape[0], device=q.device)[:, None]
    token = torch.arange(k.shape[0], device=q.device)[None, :]
    seen = (token <= position) & ((position - token < window) if window else True)
    logits = logits.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        logits = torch.cat((logits, sinks.double()[:, None, None].expand(-1, q.shape[0], 1)), 2)
    p = torch.softmax(logits, 2)[:, :, : k.shape[0]]
    p = p.masked_fill(~seen, 0.0)
    return torch.einsum("hqt,thd->qhd", p, v), torch.einsum("hqt,thd->qhd", p, v.abs())


def decode_reference(case: Case, **options: object) -> tuple[Tensor, Tensor]:
    """float64 [batch, num_heads, D] and the bound of `attend`; zeros where a length is 0."""
    out = torch.zeros(case.q.shape, dtype=torch.float64, device=case.q.device)
    bound = torch.zeros_like(out)
    for b, length in enumerate(case.lengths.tolist()):
        if length:
            k, v = tokens_of(case, b)
            out[b : b + 1], bound[b : b + 1] = attend(case.q[b : b + 1], k, v, length - 1, **options)
    return out, bound


def prefill_reference(case: Case, cu_seqlens: list[int], **options: object) -> tuple[Tensor, Tensor]:
    """float64 [total queries, num_heads, D] and the bound: queries are the last of their sequences' tokens."""
    out = torch.zeros(case.q.shape, dtype=torch.float64, device=case.q.device)
    bound = torch.zeros_like(out)
    for b, length in enumerate(case.lengths.tolist()):
        first, last = cu_seqlens[b], cu_seqlens[b + 1]
        if last > first:
            k, v = tokens_of(case, b)
            out[first:last], bound[first:last] = attend(case.q[first:last], k, v, length - (last - first), **options)
    return out, bound


def error_units(out: Tensor, reference: Tensor, bound: Tensor, fmt: KVFormat) -> float:
    """Largest error over what arithmetic allows: one rounding of every probability and one of the result.

    bfloat16 probabilities round at 2^-8, fp16 ones at 2^-11 and at 2^-25 absolutely (they are at most 1); the result
    rounds at 2^-8 or 2^-11. fp32 sums and the exponential add a few 2^-20. Finite everywhere or infinite.
    """
    p_eps = 2.0**-8 if fmt is KVFormat.BITS16 and out.dtype == torch.bfloat16 else 2.0**-11
    out_eps = 2.0**-8 if out.dtype == torch.bfloat16 else 2.0**-11
    allowed = bound * (p_eps + 2.0**-16) + reference.abs() * out_eps + 2.0**-24 * (1 + bound)
    ratio = ((out.double() - reference).abs() / allowed).max().item() if out.numel() else 0.0
    return ratio if torch.isfinite(out).all() else float("inf")
