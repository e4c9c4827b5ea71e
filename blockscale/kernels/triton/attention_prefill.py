"""Prefill attention: chunks of queries, several sequences packed, against paged keys and values, sm_80 and later.

The keys and values of the chunk itself are in the pages already, so that a chunk sees its past and itself in one walk
and exactly as later decode steps will see them. A tile holds all query heads of a KV head for a few consecutive
queries: a page is decoded once for up to 128 rows. The grid depends on shapes alone; a program finds its sequence in
`cu_seqlens` on the device.

Where there is nothing paged (a prompt on its own, 16 bits, no window, sinks or softcap), `attention_dense` hands over
to torch's scaled_dot_product_attention, whose kernels for that case are the vendors' own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockscale.errors import UsageError
from blockscale.kernels.attention_operands import check_attention, check_chunks
from blockscale.kernels.checks import check_dtype, check_same_device, check_shape, describe_tensor
from blockscale.kernels.device import describe
from blockscale.kernels.paged_cache import PagedCache
from blockscale.kernels.triton.attention_decode import capped
from blockscale.kernels.triton.kv_decode import (
    BITS16,
    FORMAT_CODES,
    FP8,
    NVFP4,
    NVFP4_UNIT,
    as_bytes,
    check_cache_aligned,
    code_order,
    decode_instructions,
    e4m3_values,
    element_of,
    fp16_query,
    load_pages,
    nvfp4_values,
    padded_head_dim,
    scale_alignment,
)

OP = "attention_prefill"


@triton.jit
def _find_sequence(cu_ptr, tile, num_sequences, QUERIES: tl.constexpr, MAX_SEQUENCES: tl.constexpr):
    """The sequence that a tile belongs to: sequence b owns tiles from cu[b] // QUERIES + b on."""
    b = tl.arange(0, MAX_SEQUENCES)
    first_tile = tl.load(cu_ptr + b, mask=b < num_sequences, other=0) // QUERIES + b
    return tl.sum(((first_tile <= tile) & (b < num_sequences)).to(tl.int32), 0) - 1


@triton.jit
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, k_block_ptr, v_block_ptr, k_scale_ptr, v_scale_ptr, table_ptr, length_ptr, cu_ptr, sink_ptr,
    out_ptr,
    scale, q_stride_t, q_stride_h, k_stride_page, k_stride_token, k_stride_head,
    v_stride_page, v_stride_token, v_stride_head, kb_stride_page, kb_stride_token, kb_stride_head,
    vb_stride_page, vb_stride_token, vb_stride_head, table_stride, num_heads, num_sequences,
    D: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINK: tl.constexpr, FORMAT: tl.constexpr, HOW: tl.constexpr,
    M: tl.constexpr, QUERIES: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr,
    MAX_SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Program (tile, kv head): M rows are QUERIES queries of one sequence times GROUP heads; T tokens a step."""
    HALF: tl.constexpr = PADDED // 2
    tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = _find_sequence(cu_ptr, tile, num_sequences, QUERIES, MAX_SEQUENCES)
    start = tl.load(cu_ptr + sequence)
    num_queries = tl.load(cu_ptr + sequence + 1) - start
    first_query = (tile - (start // QUERIES + sequence)) * QUERIES
    if first_query >= num_queries:
        return
    length = tl.load(length_ptr + sequence)
    row = tl.arange(0, M)
    query = first_query + row // GROUP
    is_row = (query < num_queries) & (row < QUERIES * GROUP)
    head = kv_head * GROUP + row % GROUP
    position = length - num_queries + query  # of the row's query in its sequence

    element = tl.arange(0, PADDED)
    is_element = is_row[:, None] & (element[None, :] < D)
    token_row = (start + query).to(tl.int64)
    q = tl.load(
        q_ptr + token_row[:, None] * q_stride_t + head[:, None] * q_stride_h + element[None, :],
        mask=is_element,
        other=0,
    )
    factor = tl.full([M], 1.0, tl.float32) * scale
    if FORMAT != BITS16:
        q, power = fp16_query(q)
        factor *= power * tl.load(k_scale_ptr)
    if FORMAT == NVFP4:
        factor *= NVFP4_UNIT
        q_even, q_odd = code_order(q)
        even = tl.zeros([M, HALF], tl.float32)
        odd = tl.zeros([M, HALF], tl.float32)
        tie = tl.broadcast_to(tl.arange(0, HALF)[None, None, :].to(tl.uint8), [1, T, HALF])
    else:
        acc = tl.zeros([M, PADDED], tl.float32)
        tie = tl.broadcast_to(element[None, None, :].to(tl.uint8), [1, T, PADDED])
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)

    k_ptr += kv_head * k_stride_head
    v_ptr += kv_head * v_stride_head
    k_block_ptr += kv_head * kb_stride_head
    v_block_ptr += kv_head * vb_stride_head
    table_ptr += sequence.to(tl.int64) * table_stride
    first_position = length - num_queries + first_query
    end = tl.minimum(first_position + QUERIES, length)
    begin = (tl.maximum(first_position - WINDOW + 1, 0) // T) * T if WINDOW > 0 else 0
    for step in tl.range(begin, end, T, num_stages=STAGES):
        token = step + tl.arange(0, T)
        is_used = token < end
        if WINDOW > 0:
            is_used = is_used & (token > first_position - WINDOW)
        page = tl.load(table_ptr + token // PAGE, mask=is_used, other=0).to(tl.int64)[None, :]
        slot = (token % PAGE)[None, :]
        k, k_block = load_pages(
            k_ptr, k_block_ptr, page, slot, is_used[None, :], k_stride_page, k_stride_token, kb_stride_page,
            kb_stride_token, D, PADDED, FORMAT, ALIGNED,
        )  # fmt: skip
        v, v_block = load_pages(
            v_ptr, v_block_ptr, page, slot, is_used[None, :], v_stride_page, v_stride_token, vb_stride_page,
            vb_stride_token, D, PADDED, FORMAT, ALIGNED,
        )  # fmt: skip
        if FORMAT == NVFP4:
            k_even, k_odd = nvfp4_values(k, k_block, k, HOW)
            logits = tl.dot(q_even, k_even.reshape([T, HALF]).T)
            logits = tl.dot(q_odd, k_odd.reshape([T, HALF]).T, logits)
        elif FORMAT == FP8:
            logits = tl.dot(q, e4m3_values(k, k, HOW).reshape([T, PADDED]).T)
        else:
            logits = tl.dot(q, k.reshape([T, PADDED]).T)
        logits = capped(logits * factor[:, None], SOFTCAP) * 1.4426950408889634
        is_seen = token[None, :] <= position[:, None]
        if WINDOW > 0:
            is_seen = is_seen & (position[:, None] - token[None, :] < WINDOW)
        logits = tl.where(is_seen, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # of a row that has seen no token yet
        shrink = tl.exp2(top - base)
        p = tl.exp2(logits - base[:, None])
        total = total * shrink + tl.sum(p, 1)
        top = new_top
        if FORMAT == NVFP4:
            v_even, v_odd = nvfp4_values(v, v_block, tie, HOW)
            p = p.to(tl.float16)
            even = tl.dot(p, v_even.reshape([T, HALF]), even * shrink[:, None])
            odd = tl.dot(p, v_odd.reshape([T, HALF]), odd * shrink[:, None])
        elif FORMAT == FP8:
            acc = tl.dot(p.to(tl.float16), e4m3_values(v, tie, HOW).reshape([T, PADDED]), acc * shrink[:, None])
        else:
            acc = tl.dot(p.to(v.dtype), v.reshape([T, PADDED]), acc * shrink[:, None])

    unit = 1.0
    if FORMAT == FP8:
        unit = tl.load(v_scale_ptr)
    if FORMAT == NVFP4:
        unit = tl.load(v_scale_ptr) * NVFP4_UNIT
    if HAS_SINK:
        sink = tl.load(sink_ptr + head, mask=is_row, other=0).to(tl.float32) * 1.4426950408889634
        both = tl.maximum(top, sink)
        shrink = tl.exp2(top - both)
        factor = unit * shrink / (total * shrink + tl.exp2(sink - both))
    else:
        factor = unit / total
    target = out_ptr + (token_row * num_heads + head)[:, None] * D
    if FORMAT == NVFP4:
        element = element_of(tl.arange(0, HALF))[None, :]
        mask = is_row[:, None] & (element < D)
        tl.store(target + element, (even * factor[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(target + element + 1, (odd * factor[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(target + element[None, :], (acc * factor[:, None]).to(out_ptr.dtype.element_ty), mask=is_element)


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
    tile: tuple[int, int, int] | None = None,
) -> Tensor:
    """[total queries, num_heads, D] like q: causal attention of chunks of queries to their sequences' pages.

    q           [total queries, num_heads, D], the cache's dtype, the sequences' chunks one after another
    page_table  int32 [batch, max_pages]; entries past a sequence's length are not read
    lengths     int32 [batch]: tokens in the pages, the chunk's own included: the chunk's queries are the last of them
    cu_seqlens  int32 [batch + 1]: where each chunk begins in q, and the total at the end; a chunk may be empty
    tile        rows and tokens of a tile and stages in flight, from the shapes unless given
    Other arguments and errors as in `attention_decode`. Rows past cu_seqlens[-1] are left as they were allocated.
    """
    check_attention(OP, q, cache, page_table, lengths, sinks, window, softcap)
    check_chunks(OP, q, lengths, cu_seqlens)
    check_cache_aligned(OP, cache)
    total, num_heads, head_dim = q.shape
    q = q if q.stride(2) == 1 else q.contiguous()
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    out = torch.empty((total, num_heads, head_dim), dtype=q.dtype, device=q.device)
    batch = lengths.shape[0]
    if total == 0 or batch == 0:
        return out
    device = describe(q.device)
    group = num_heads // cache.num_kv_heads
    padded = padded_head_dim(head_dim)
    has_warpgroups = device.capability is not None and device.capability[0] in (9, 10)
    rows, tokens, stages = tile or default_tile(total // batch * group, padded, has_warpgroups)
    rows = max(rows, triton.next_power_of_2(group))
    queries = rows // group
    warps = 4 if rows < 64 or (rows == 64 and padded <= 128) else 8

    k_block, v_block = (as_bytes(s if s is not None else cache.k) for s in (cache.k_block_scale, cache.v_block_scale))
    # Each sequence may end in a tile that is not full; spare programs leave at once
    grid = (total // queries + batch, cache.num_kv_heads)
    _prefill_kernel[grid](
        q, as_bytes(cache.k), as_bytes(cache.v), k_block, v_block,
        q if cache.k_scale is None else cache.k_scale, q if cache.v_scale is None else cache.v_scale,
        page_table, lengths, cu_seqlens, q if sinks is None else sinks, out,
        head_dim**-0.5 if scale is None else scale,
        q.stride(0), q.stride(1), *cache.k.stride()[:3], *cache.v.stride()[:3], *k_block.stride()[:3],
        *v_block.stride()[:3], page_table.stride(0), num_heads, batch,
        D=head_dim, PADDED=padded, GROUP=group, PAGE=cache.page_size, WINDOW=window, SOFTCAP=softcap,
        HAS_SINK=sinks is not None, FORMAT=FORMAT_CODES[cache.format],
        HOW=decode_instructions(cache, device, tokens, 32 * warps),
        M=rows, QUERIES=queries, T=tokens, STAGES=stages, ALIGNED=scale_alignment(k_block, v_block),
        MAX_SEQUENCES=triton.next_power_of_2(batch), num_warps=warps,
    )  # fmt: skip
    return out


def default_tile(rows: int, padded_dim: int, has_warpgroups: bool) -> tuple[int, int, int]:
    """(rows, tokens, stages) for about `rows` rows a sequence: wide tiles where there are rows to fill them.

    Products of warp groups (sm_90, sm_100) read tiles from shared memory; elsewhere tiles of 64 tokens spill.
    """
    if padded_dim > 128:
        return (64 if rows > 16 else 16), 32, 2
    return (
        (128 if rows >= 128 else 64 if rows > 16 else 16),
        (64 if has_warpgroups else 32),
        (5 if has_warpgroups else 2),
    )


def attention_dense(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """[tokens, num_heads, D]: causal attention of one sequence to itself, 16 bits, nothing paged.

    q [tokens, num_heads, D], k and v [tokens, num_kv_heads, D]. torch's scaled_dot_product_attention serves it: on
    this case alone its kernels (FlashAttention, cuDNN) have nothing that pages or packed sequences could add.
    """
    check_dtype(OP, "q", q, (torch.bfloat16, torch.float16))
    check_shape(OP, "k", k, (q.shape[0], None, q.shape[2]))
    check_shape(OP, "v", v, k.shape)
    check_same_device(OP, q=q, k=k, v=v)
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise UsageError(
            f"{OP}: q is {describe_tensor(q)}, k is {describe_tensor(k)}",
            hint="the number of query heads is a multiple of that of KV heads",
        )
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
