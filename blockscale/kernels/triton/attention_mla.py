"""Decode of multi-head latent attention (DeepSeek): every head reads the same latent, as key and as value.

    logits[h, t] = scale * (q_latent[h] . latent[t] + q_rope[h] . rope[t])
    out[b, h]    = sum_t softmax(logits[h])_t * latent[t]

The projections that lead into the latent and out of it are absorbed into q and into what follows (DeepSeek-V2, 2024,
section 2.1.2). With 128 heads to a token this is as much arithmetic as reading, so heads fill the rows of the tensor
cores and a tile of latents, once decoded, serves both products. Splits and their sum are those of decode attention.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockscale.errors import UsageError
from blockscale.kernels.attention_operands import check_latent
from blockscale.kernels.checks import check_aligned
from blockscale.kernels.device import describe
from blockscale.kernels.paged_cache import KVFormat, LatentCache
from blockscale.kernels.triton.attention_decode import combine
from blockscale.kernels.triton.kv_decode import (
    BITS16,
    FORMAT_CODES,
    FP8,
    NVFP4,
    NVFP4_UNIT,
    as_bytes,
    code_order,
    e4m3_values,
    element_of,
    fp16_query,
    load_pages,
    nvfp4_values,
    ptx_of,
    scale_alignment,
)

OP = "attention_mla"


@triton.jit
def _mla_kernel(
    q_ptr, pages_ptr, block_ptr, scale_ptr, table_ptr, length_ptr, out_ptr, partial_ptr, state_ptr,
    scale, q_stride_b, q_stride_h, stride_page, stride_token, block_stride_page, block_stride_token, table_stride,
    num_heads,
    LATENT: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, FORMAT: tl.constexpr, HOW: tl.constexpr,
    M: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr, IS_SPLIT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Program (block of M heads, sequence, split); T tokens a step."""
    HALF: tl.constexpr = LATENT // 2
    ROPE_OFFSET: tl.constexpr = HALF if FORMAT == NVFP4 else LATENT  # in stored elements
    head = tl.program_id(0) * M + tl.arange(0, M)
    is_head = head < num_heads
    sequence = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(length_ptr + sequence)
    per_split = tl.cdiv(tl.cdiv(length, tl.num_programs(2)), T) * T
    low_token = split * per_split
    high_token = tl.minimum(low_token + per_split, length)

    row = q_ptr + sequence * q_stride_b + head[:, None].to(tl.int64) * q_stride_h
    q = tl.load(row + tl.arange(0, LATENT)[None, :], mask=is_head[:, None], other=0)
    q_rope = tl.load(row + LATENT + tl.arange(0, ROPE)[None, :], mask=is_head[:, None], other=0)
    factor = tl.full([M], 1.0, tl.float32) * scale
    if FORMAT != BITS16:
        unit = tl.load(scale_ptr)
        if FORMAT == NVFP4:
            unit *= NVFP4_UNIT
        q, power = fp16_query(q)
        q_rope, rope_power = fp16_query(q_rope)
        factor *= power * unit
        # brought to the latent part's power of two in fp32, after its product
        rope_factor = tl.full([M], 1.0, tl.float32) * scale * rope_power * unit
    else:
        unit = 1.0
        rope_factor = factor
    if FORMAT == NVFP4:
        q_even, q_odd = code_order(q)
        rope_even, rope_odd = code_order(q_rope)
        even = tl.zeros([M, HALF], tl.float32)
        odd = tl.zeros([M, HALF], tl.float32)
        tie = tl.broadcast_to(tl.arange(0, HALF)[None, None, :].to(tl.uint8), [1, T, HALF])
    else:
        acc = tl.zeros([M, LATENT], tl.float32)
        tie = tl.broadcast_to(tl.arange(0, LATENT)[None, None, :].to(tl.uint8), [1, T, LATENT])
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)

    table_ptr += sequence * table_stride
    for step in tl.range(low_token, high_token, T, num_stages=STAGES):
        token = step + tl.arange(0, T)
        is_used = token < high_token
        page = tl.load(table_ptr + token // PAGE, mask=is_used, other=0).to(tl.int64)[None, :]
        slot = (token % PAGE)[None, :]
        stored, block = load_pages(
            pages_ptr, block_ptr, page, slot, is_used[None, :], stride_page, stride_token, block_stride_page,
            block_stride_token, LATENT, LATENT, FORMAT, ALIGNED,
        )  # fmt: skip
        rope, rope_block = load_pages(
            pages_ptr + ROPE_OFFSET, block_ptr + LATENT // 16, page, slot, is_used[None, :], stride_page, stride_token,
            block_stride_page, block_stride_token, ROPE, ROPE, FORMAT, ALIGNED,
        )  # fmt: skip
        if FORMAT == NVFP4:
            v_even, v_odd = nvfp4_values(stored, block, tie, HOW)
            v_even = v_even.reshape([T, HALF])
            v_odd = v_odd.reshape([T, HALF])
            logits = tl.dot(q_odd, v_odd.T, tl.dot(q_even, v_even.T))
            k_even, k_odd = nvfp4_values(rope, rope_block, rope, HOW)
            more = tl.dot(rope_even, k_even.reshape([T, ROPE // 2]).T)
            more = tl.dot(rope_odd, k_odd.reshape([T, ROPE // 2]).T, more)
        elif FORMAT == FP8:
            v = e4m3_values(stored, tie, HOW).reshape([T, LATENT])
            logits = tl.dot(q, v.T)
            more = tl.dot(q_rope, e4m3_values(rope, rope, HOW).reshape([T, ROPE]).T)
        else:
            v = stored.reshape([T, LATENT])
            logits = tl.dot(q, v.T)
            more = tl.dot(q_rope, rope.reshape([T, ROPE]).T)
        logits = (logits * factor[:, None] + more * rope_factor[:, None]) * 1.4426950408889634
        logits = tl.where(is_used[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - base)
        p = tl.exp2(logits - base[:, None])
        total = total * shrink + tl.sum(p, 1)
        top = new_top
        if FORMAT == NVFP4:
            p = p.to(tl.float16)
            even = tl.dot(p, v_even, even * shrink[:, None])
            odd = tl.dot(p, v_odd, odd * shrink[:, None])
        elif FORMAT == FP8:
            acc = tl.dot(p.to(tl.float16), v, acc * shrink[:, None])
        else:
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])

    if IS_SPLIT:
        line = (sequence * num_heads + head) * tl.num_programs(2) + split
        tl.store(state_ptr + line * 2, top, mask=is_head)
        tl.store(state_ptr + line * 2 + 1, total, mask=is_head)
        is_head = is_head & (low_token < high_token)
        target = partial_ptr + line[:, None] * LATENT
        factor = tl.full([M], 1.0, tl.float32) * unit
    else:
        target = out_ptr + (sequence * num_heads + head)[:, None] * LATENT
        factor = tl.where(length > 0, unit / total, 0.0)
    if FORMAT == NVFP4:
        element = element_of(tl.arange(0, HALF))[None, :]
        tl.store(target + element, (even * factor[:, None]).to(target.dtype.element_ty), mask=is_head[:, None])
        tl.store(target + element + 1, (odd * factor[:, None]).to(target.dtype.element_ty), mask=is_head[:, None])
    else:
        element = tl.arange(0, LATENT)[None, :]
        tl.store(target + element, (acc * factor[:, None]).to(target.dtype.element_ty), mask=is_head[:, None])


def attention_mla(
    q: Tensor,
    cache: LatentCache,
    page_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    splits: int | None = None,
    cut: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """[batch, num_heads, latent_dim] like q: one token a sequence, to be projected by the caller.

    q           [batch, num_heads, latent_dim + rope_dim], the cache's dtype, last dimension contiguous or copied
    page_table  int32 [batch, max_pages]; lengths int32 [batch], as in `attention_decode`
    scale       of the logits: the model's own, which the latent's width does not tell
    splits      of each context, from the shapes unless given
    cut         heads and tokens of a tile, warps and stages, from the shapes unless given
    """
    check_latent(OP, q, cache, page_table, lengths)
    check_aligned(OP, "the cache", cache.pages, 16)
    if splits is not None and splits < 1:
        raise UsageError(f"{OP}: {splits} splits", hint="give at least one")
    batch, num_heads, _ = q.shape
    q = q if q.stride(2) == 1 else q.contiguous()
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    out = torch.empty((batch, num_heads, cache.latent_dim), dtype=q.dtype, device=q.device)
    if batch == 0 or num_heads == 0:
        return out
    device = describe(q.device)
    rows, tokens, warps, stages = cut or tile(num_heads, device.shared_memory_bytes)
    blocks = -(-num_heads // rows)
    splits = splits or max(1, min(device.num_sms // (batch * blocks), -(-page_table.shape[1] * cache.page_size // 256)))
    partial, state = out, out  # not touched without splits
    if splits > 1:
        partial = torch.empty((batch, num_heads, splits, cache.latent_dim), dtype=torch.float32, device=q.device)
        state = torch.empty((batch, num_heads, splits, 2), dtype=torch.float32, device=q.device)
    block = as_bytes(cache.pages if cache.block_scale is None else cache.block_scale)
    # PTX needs four neighbouring bytes a thread, of the part with positions too
    is_shared_out = tokens * cache.rope_dim // 2 >= 4 * 32 * warps
    is_wide = cache.format is not KVFormat.NVFP4 or (
        is_shared_out and not any(stride % 16 for stride in cache.pages.stride()[:2])
    )
    _mla_kernel[(blocks, batch, splits)](
        q, as_bytes(cache.pages), block, q if cache.scale is None else cache.scale, page_table, lengths, out, partial,
        state, scale, q.stride(0), q.stride(1), *cache.pages.stride()[:2], *block.stride()[:2], page_table.stride(0),
        num_heads,
        LATENT=cache.latent_dim, ROPE=cache.rope_dim, PAGE=cache.page_size, FORMAT=FORMAT_CODES[cache.format],
        HOW=ptx_of(device, is_wide), M=rows, T=tokens, STAGES=stages, IS_SPLIT=splits > 1,
        ALIGNED=scale_alignment(block, block), num_warps=warps,
    )  # fmt: skip
    if splits > 1:
        combine(partial, state, lengths, None, out)
    return out


def tile(num_heads: int, shared_memory_bytes: int) -> tuple[int, int, int, int]:
    """(heads, tokens, warps, stages): 64 heads of queries and two tiles of 64 latents fit Hopper's shared memory."""
    if num_heads > 16 and shared_memory_bytes > 200 << 10:
        return 64, 64, 8, 2
    return 16, 32 if shared_memory_bytes > 110 << 10 else 16, 4, 2
