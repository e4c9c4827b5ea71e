"""Decode attention: one query a sequence against its paged keys and values, sm_80 and later.

    out[b, h] = sum_t softmax(scale * q[b, h] . k[t] [softcap] [with a sink])_t * v[t]      t in the window of b

One program serves the query heads that share a KV head, so that each page is read once. Keys and values are the
16-row operand of the tensor cores and the heads the 8-column one; every warp walks over tokens of its own and keeps
its own running maximum, so that warps meet only once, at the end. Long contexts are cut into splits whose partial
results a second kernel adds in fixed order. The grid depends on shapes alone: lengths are read on the device, which
makes the call safe in a CUDA graph and its result the same every time.

Online softmax after Milakov and Gimelshein (2018); splits after Dao et al., "Flash-Decoding" (2023).
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockscale.kernels.attention_operands import check_attention
from blockscale.kernels.checks import check_shape
from blockscale.kernels.device import Device, describe
from blockscale.kernels.paged_cache import KVFormat, PagedCache
from blockscale.kernels.triton.chain import chained, enter_chain
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
    same_values,
    scale_alignment,
)

OP = "attention_decode"
LOG2_E = math.log2(math.e)


@triton.jit
def capped(logits, SOFTCAP: tl.constexpr):
    """cap * tanh(logits / cap) by way of exp2; the identity for a cap of 0."""
    if SOFTCAP > 0.0:
        logits = SOFTCAP * (1.0 - 2.0 / (tl.exp2(logits * (2.8853900817779268 / SOFTCAP)) + 1.0))
    return logits


@triton.jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, k_block_ptr, v_block_ptr, k_scale_ptr, v_scale_ptr, table_ptr, length_ptr, sink_ptr,
    out_ptr, partial_ptr, state_ptr,
    scale, q_stride_b, q_stride_h, k_stride_page, k_stride_token, k_stride_head,
    v_stride_page, v_stride_token, v_stride_head, kb_stride_page, kb_stride_token, kb_stride_head,
    vb_stride_page, vb_stride_token, vb_stride_head, table_stride, num_heads,
    D: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINK: tl.constexpr, FORMAT: tl.constexpr, HOW: tl.constexpr,
    W: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr, IS_SPLIT: tl.constexpr,
    ALIGNED: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (kv head and block of its query heads, sequence, split). W warps take T tokens each per step."""
    HALF: tl.constexpr = PADDED // 2
    BLOCKS: tl.constexpr = (GROUP + N - 1) // N
    kv_head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    sequence = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    in_group = (tl.program_id(0) % BLOCKS) * N + tl.arange(0, N)
    is_head = in_group < GROUP
    head = kv_head * GROUP + in_group
    enter_chain(IS_CHAINED)

    end = tl.load(length_ptr + sequence)
    first = tl.maximum(end - WINDOW, 0) if WINDOW > 0 else 0
    begin = (first // T) * T
    per_split = tl.cdiv(tl.cdiv(end - begin, tl.num_programs(2)), T) * T
    low_token = begin + split * per_split
    high_token = tl.minimum(low_token + per_split, end)

    element = tl.arange(0, PADDED)
    is_element = is_head[:, None] & (element[None, :] < D)
    q = tl.load(q_ptr + sequence * q_stride_b + head[:, None] * q_stride_h + element[None, :], mask=is_element, other=0)
    factor = tl.full([N], 1.0, tl.float32) * scale
    if FORMAT != BITS16:
        q, power = fp16_query(q)
        factor *= power * tl.load(k_scale_ptr)
    if FORMAT == NVFP4:
        factor *= NVFP4_UNIT
        q_even, q_odd = code_order(q)
        q_even = tl.broadcast_to(q_even.permute(1, 0)[None, :, :], [W, HALF, N])
        q_odd = tl.broadcast_to(q_odd.permute(1, 0)[None, :, :], [W, HALF, N])
        even = tl.zeros([W, HALF, N], tl.float32)
        odd = tl.zeros([W, HALF, N], tl.float32)
        tie = tl.broadcast_to(tl.arange(0, HALF)[None, None, :].to(tl.uint8), [W, T, HALF])
    else:
        q = tl.broadcast_to(q.permute(1, 0)[None, :, :], [W, PADDED, N])
        acc = tl.zeros([W, PADDED, N], tl.float32)
        tie = tl.broadcast_to(element[None, None, :].to(tl.uint8), [W, T, PADDED])
    top = tl.full([W, N], float("-inf"), tl.float32)
    total = tl.zeros([W, T, N], tl.float32)  # a sum per slot, added up at the end

    k_ptr += kv_head * k_stride_head
    v_ptr += kv_head * v_stride_head
    k_block_ptr += kv_head * kb_stride_head
    v_block_ptr += kv_head * vb_stride_head
    table_ptr += sequence * table_stride
    warp = tl.arange(0, W)
    slot_in_step = tl.arange(0, T)
    for step in tl.range(low_token, high_token, W * T, num_stages=STAGES):
        start = step + warp * T  # T divides pages: a warp's tokens lie in one page
        token = start[:, None] + slot_in_step[None, :]
        is_used = token < high_token
        if WINDOW > 0:
            is_used = is_used & (token >= first)
        page = tl.load(table_ptr + start // PAGE, mask=start < high_token, other=0).to(tl.int64)[:, None]
        slot = (start % PAGE)[:, None] + slot_in_step[None, :]
        k, k_block = load_pages(
            k_ptr, k_block_ptr, page, slot, is_used, k_stride_page, k_stride_token, kb_stride_page, kb_stride_token,
            D, PADDED, FORMAT, ALIGNED,
        )  # fmt: skip
        v, v_block = load_pages(
            v_ptr, v_block_ptr, page, slot, is_used, v_stride_page, v_stride_token, vb_stride_page, vb_stride_token,
            D, PADDED, FORMAT, ALIGNED,
        )  # fmt: skip

        if FORMAT == NVFP4:
            k_even, k_odd = nvfp4_values(k, k_block, k, HOW)
            logits = tl.dot(k_even, q_even)
            logits = tl.dot(k_odd, q_odd, logits)
        elif FORMAT == FP8:
            logits = tl.dot(e4m3_values(k, k, HOW), q)
        else:
            logits = tl.dot(k, q)
        logits = capped(logits * factor[None, None, :], SOFTCAP) * 1.4426950408889634
        logits = tl.where(is_used[:, :, None], logits, float("-inf"))  # [W, T, N]
        new_top = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # of a warp that has seen no token yet
        shrink = tl.exp2(top - base)
        p = tl.exp2(logits - base[:, None, :])
        total = total * shrink[:, None, :] + p
        top = new_top
        if FORMAT == NVFP4:
            v_even, v_odd = nvfp4_values(v, v_block, tie, HOW)
            p = p.to(tl.float16)
            even = tl.dot(v_even.permute(0, 2, 1), p, even * shrink[:, None, :])
            odd = tl.dot(v_odd.permute(0, 2, 1), p, odd * shrink[:, None, :])
        elif FORMAT == FP8:
            values = e4m3_values(v, tie, HOW).permute(0, 2, 1)
            acc = tl.dot(values, p.to(tl.float16), acc * shrink[:, None, :])
        else:
            acc = tl.dot(same_values(v, tie, HOW).permute(0, 2, 1), p.to(v.dtype), acc * shrink[:, None, :])

    # the warps meet
    best = tl.max(top, 0)
    weight = tl.exp2(top - tl.where(best == float("-inf"), 0.0, best)[None, :])  # [W, N]
    mass = tl.sum(tl.sum(total, 1) * weight, 0)  # [N]
    unit = 1.0
    if FORMAT == FP8:
        unit = tl.load(v_scale_ptr)
    if FORMAT == NVFP4:
        unit = tl.load(v_scale_ptr) * NVFP4_UNIT
    if IS_SPLIT:
        row = (sequence * num_heads + head) * tl.num_programs(2) + split
        tl.store(state_ptr + row * 2, best, mask=is_head)
        tl.store(state_ptr + row * 2 + 1, mass, mask=is_head)
        is_head = is_head & (low_token < high_token)  # the combination reads no rows of empty splits
        target = partial_ptr + row[None, :] * D
        factor = tl.full([N], 1.0, tl.float32) * unit
    else:
        if HAS_SINK:
            sink = tl.load(sink_ptr + head, mask=is_head, other=0).to(tl.float32) * 1.4426950408889634
            both = tl.maximum(best, sink)
            shrink = tl.exp2(best - both)
            mass = mass * shrink + tl.exp2(sink - both)
            factor = unit * shrink / mass
        else:
            factor = unit / mass
        factor = tl.where(end > 0, factor, 0.0)
        target = out_ptr + (sequence * num_heads + head)[None, :] * D
    if FORMAT == NVFP4:
        even = tl.sum(even * weight[:, None, :], 0) * factor[None, :]
        odd = tl.sum(odd * weight[:, None, :], 0) * factor[None, :]
        element = element_of(tl.arange(0, HALF))[:, None]
        mask = is_head[None, :] & (element < D)
        tl.store(target + element, even.to(target.dtype.element_ty), mask=mask)
        tl.store(target + element + 1, odd.to(target.dtype.element_ty), mask=mask)
    else:
        acc = tl.sum(acc * weight[:, None, :], 0) * factor[None, :]
        mask = is_head[None, :] & (element[:, None] < D)
        tl.store(target + element[:, None], acc.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _combine_kernel(
    partial_ptr, state_ptr, length_ptr, sink_ptr, out_ptr, num_heads, num_splits,
    D: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, HAS_SINK: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (head, sequence, COLUMNS of D): the splits' sums brought to one maximum and added in fixed order."""
    sequence = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0)
    row = sequence * num_heads + head
    element = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    best = float("-inf")
    if HAS_SINK:
        best = tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634
    mass = 1.0 if HAS_SINK else 0.0
    acc = tl.zeros([COLUMNS], tl.float32)
    enter_chain(IS_CHAINED)
    length = tl.load(length_ptr + sequence)
    for first in tl.range(0, num_splits, STEP):
        split = first + tl.arange(0, STEP)
        is_split = split < num_splits
        state = state_ptr + (row * num_splits + split) * 2
        top = tl.load(state, mask=is_split, other=float("-inf"))
        share = tl.load(state + 1, mask=is_split, other=0.0)
        is_filled = (top != float("-inf")) | (share != 0.0)  # NaN compares unequal and is kept
        mask = is_filled[:, None] & (element[None, :] < D)
        part = tl.load(partial_ptr + (row * num_splits + split)[:, None] * D + element[None, :], mask=mask, other=0.0)
        new_best = tl.maximum(best, tl.max(top, 0))
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink = tl.exp2(best - base)
        weight = tl.exp2(top - base)
        mass = mass * shrink + tl.sum(share * weight, 0)
        acc = acc * shrink + tl.sum(part * weight[:, None], 0)
        best = new_best
    out = tl.where(length > 0, acc / mass, 0.0)
    tl.store(out_ptr + row * D + element, out.to(out_ptr.dtype.element_ty), mask=element < D)


@dataclass(frozen=True)
class DecodePlan:
    """How a decode call is cut: `tokens` a warp and step, `warps`, `stages` in flight, `splits` of each context."""

    tokens: int
    warps: int
    stages: int
    splits: int


@dataclass(frozen=True)
class Cut:
    """A step's shape and how many programs of it a multiprocessor of sm_90 holds (its registers say so)."""

    tokens: int
    warps: int
    stages: int
    resident: int


# Measured on an H200, head dimension 128, 64 query heads on 8, 32k tokens (benchmarks/kernels_attention.py).
# Five stages are what gives Triton two tiles in flight: the page table is looked up two stages before the pages.
_NARROW_PAGES = {
    KVFormat.BITS16: Cut(16, 4, 5, 2),
    KVFormat.FP8: Cut(16, 2, 5, 6),
    KVFormat.NVFP4: Cut(16, 1, 5, 12),
}
_WIDE_PAGES = {  # of 32 tokens or more
    KVFormat.BITS16: Cut(16, 4, 5, 2),
    KVFormat.FP8: Cut(32, 2, 5, 4),
    KVFormat.NVFP4: Cut(32, 1, 5, 8),
}
_MANY_ROWS = Cut(16, 4, 2, 1)  # head dimensions over 128, or more than 8 query heads: twice the registers
_COMBINED_COLUMNS = 32
_MOST_ROUNDS = 4
_MIN_SPLIT_TOKENS = 256  # below this a split costs more in starting and combining than it saves


def plan_decode(cache: PagedCache, max_tokens: int, batch: int, group: int, device: Device) -> DecodePlan:
    """From shapes alone: as many splits as fill the device once, none shorter than a few steps."""
    heads = head_columns(group)
    cut = (_WIDE_PAGES if cache.page_size >= 32 else _NARROW_PAGES)[cache.format]
    if cache.head_dim > 128 or heads > 8:
        cut = _MANY_ROWS
    programs = batch * cache.num_kv_heads * -(-group // heads)
    slots = device.num_sms * cut.resident if device.type == "cuda" else 1
    most = -(-max_tokens // _MIN_SPLIT_TOKENS)
    splits = max(1, min(slots // programs, most))
    if slots // programs <= 1:  # programs that leave a part of the device idle, once or in a last round
        splits = _even(programs, slots, min(most, _MOST_ROUNDS))
    return DecodePlan(cut.tokens, cut.warps, cut.stages, splits)


def _even(programs: int, slots: int, most: int) -> int:
    """The fewest splits that come within a tenth of the least idle time of up to `most`."""

    def share(splits: int) -> float:
        return programs * splits / (-(-programs * splits // slots) * slots)

    counts = range(1, most + 1)
    best = max(map(share, counts))
    return next(n for n in counts if share(n) >= 0.9 * best)


def head_columns(group: int) -> int:
    """Columns that a program gives to the query heads of a KV head; larger groups take several programs."""
    return 16 if group > 8 else 8


def combine(partial: Tensor, state: Tensor, lengths: Tensor, sinks: Tensor | None, out: Tensor) -> None:
    """Sums [batch, heads, splits, D] and (maximum, mass) [batch, heads, splits, 2] into out [batch, heads, D]."""
    batch, num_heads, splits, width = partial.shape
    # Few columns a program: the sum waits for memory alone, so that programs should be many
    _combine_kernel[(num_heads, batch, -(-width // _COMBINED_COLUMNS))](
        partial, state, lengths, lengths if sinks is None else sinks, out, num_heads, splits,
        D=width, COLUMNS=_COMBINED_COLUMNS, STEP=min(64, triton.next_power_of_2(splits)),
        HAS_SINK=sinks is not None, num_warps=4, **chained(out.device),
    )  # fmt: skip


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
    plan: DecodePlan | None = None,
) -> Tensor:
    """[batch, num_heads, D] like q: attention of one token a sequence to its pages.

    q           [batch, num_heads, D], the cache's dtype; any strides but 1 in the last dimension
    page_table  int32 [batch, max_pages]; entries past a sequence's length are not read
    lengths     int32 [batch]: tokens to attend to, the query's own included; at most max_pages * page_size.
                A sequence of length 0 gives zeros
    scale       of the logits, 1 / sqrt(D) unless given
    window      tokens each query sees, itself included; 0 for all
    softcap     logits become softcap * tanh(logits / softcap); 0 for none
    sinks       [num_heads] float: a logit a head that takes part in the denominator alone
    plan        how to cut the work; from the shapes unless given

    Raises FormatError and UsageError for operands that do not fit together. Values are not looked at: a length beyond
    the table, or an entry beyond the cache, reads foreign memory.
    """
    check_attention(OP, q, cache, page_table, lengths, sinks, window, softcap)
    check_cache_aligned(OP, cache)
    check_shape(OP, "q", q, (lengths.shape[0], None, None))
    batch, num_heads, head_dim = q.shape
    q = q if q.stride(2) == 1 else q.contiguous()
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    out = torch.empty((batch, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if batch == 0:
        return out
    device = describe(q.device)
    group = num_heads // cache.num_kv_heads
    plan = plan or plan_decode(cache, page_table.shape[1] * cache.page_size, batch, group, device)
    columns = head_columns(group)
    partial, state = out, out  # not touched without splits
    if plan.splits > 1:
        rows = batch, num_heads, plan.splits
        partial = torch.empty((*rows, head_dim), dtype=torch.float32, device=q.device)
        state = torch.empty((*rows, 2), dtype=torch.float32, device=q.device)

    # Operands that a format does without are never read: any tensor stands in
    k_block, v_block = (as_bytes(s if s is not None else cache.k) for s in (cache.k_block_scale, cache.v_block_scale))
    padded = padded_head_dim(head_dim)
    grid = (cache.num_kv_heads * -(-group // columns), batch, plan.splits)
    _decode_kernel[grid](
        q, as_bytes(cache.k), as_bytes(cache.v), k_block, v_block,
        q if cache.k_scale is None else cache.k_scale, q if cache.v_scale is None else cache.v_scale,
        page_table, lengths, q if sinks is None else sinks, out, partial, state,
        head_dim**-0.5 if scale is None else scale,
        q.stride(0), q.stride(1), *cache.k.stride()[:3], *cache.v.stride()[:3], *k_block.stride()[:3],
        *v_block.stride()[:3], page_table.stride(0), num_heads,
        D=head_dim, PADDED=padded, GROUP=group, N=columns, PAGE=cache.page_size, WINDOW=window, SOFTCAP=softcap,
        HAS_SINK=sinks is not None, FORMAT=FORMAT_CODES[cache.format],
        HOW=decode_instructions(cache, device, plan.tokens, 32),
        W=plan.warps, T=plan.tokens, STAGES=plan.stages, IS_SPLIT=plan.splits > 1,
        ALIGNED=scale_alignment(k_block, v_block), num_warps=plan.warps, **chained(q.device),
    )  # fmt: skip
    if plan.splits > 1:
        combine(partial, state, lengths, sinks, out)
    return out
