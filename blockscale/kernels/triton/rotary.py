"""What stands between the product of queries, keys and values and attention, in one pass: norms of queries and keys
where a model has them, rotary positions, and keys and values into their pages.

    normed  = x / sqrt(mean(x^2) + epsilon) * weight, rounded to the dtype of x
    turned  = normed * cos + (normed with its halves swapped) * sin    over the first R elements of a head

in fp32, rounded once each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockscale.kernels.between_operands import check_heads
from blockscale.kernels.paged_cache import KVFormat, PagedCache
from blockscale.kernels.triton.chain import chained, enter_chain
from blockscale.kernels.triton.kv_decode import FORMAT_CODES, FP8, NVFP4
from blockscale.kernels.triton.kv_quantize import fp8_bytes, quantize_kv
from blockscale.kernels.triton.quantize import check_can_run

OP = "rotate_into_cache"


@triton.jit
def _store(pages, at, x, scale, mask, FORMAT: tl.constexpr):
    if FORMAT == FP8:
        tl.store(pages + at, fp8_bytes(x, tl.load(scale)).to(tl.uint8), mask=mask)
    else:
        tl.store(pages + at, x.to(pages.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_slots", "num_heads", "num_kv_heads"])
def _rotary_kernel(
    heads, cos, sin, q_weight, k_weight, slots, q_out, k_out, k_pages, v_pages, k_scale, v_scale,
    token_stride, head_stride, k_page, k_place, k_head, v_page, v_place, v_head,
    num_slots, num_heads, num_kv_heads, epsilon,
    D: tl.constexpr, TURNED: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, PAGE: tl.constexpr,
    FORMAT: tl.constexpr, HAS_NORM: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (token, head): queries first, then keys, then values; HALF and REST are powers of two."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column, rest = tl.arange(0, HALF), TURNED + tl.arange(0, REST)
    in_half, in_rest = column < TURNED // 2, rest < D
    enter_chain(IS_CHAINED)
    x = heads + token * token_stride + head * head_stride
    low = tl.load(x + column, mask=in_half, other=0.0).to(tl.float32)
    high = tl.load(x + TURNED // 2 + column, mask=in_half, other=0.0).to(tl.float32)
    other = tl.load(x + rest, mask=in_rest, other=0.0).to(tl.float32)
    is_query, is_value = head < num_heads, head >= num_heads + num_kv_heads
    if not is_value:
        if HAS_NORM:
            weight = q_weight if is_query else k_weight
            total = tl.sum(low * low, 0) + tl.sum(high * high, 0) + tl.sum(other * other, 0)
            factor = tl.rsqrt(total / D + epsilon)
            dtype: tl.constexpr = heads.dtype.element_ty
            low = (low * factor * tl.load(weight + column, mask=in_half, other=0.0)).to(dtype).to(tl.float32)
            high = high * factor * tl.load(weight + TURNED // 2 + column, mask=in_half, other=0.0)
            high = high.to(dtype).to(tl.float32)
            other = (other * factor * tl.load(weight + rest, mask=in_rest, other=0.0)).to(dtype).to(tl.float32)
        turn = token * TURNED + column
        cos_low, sin_low = tl.load(cos + turn, mask=in_half, other=0.0), tl.load(sin + turn, mask=in_half, other=0.0)
        turn += TURNED // 2
        cos_high, sin_high = tl.load(cos + turn, mask=in_half, other=0.0), tl.load(sin + turn, mask=in_half, other=0.0)
        turned = low * cos_low + high * sin_low
        high = high * cos_high + low * sin_high
        low = turned
    if is_query:
        y = q_out + (token * num_heads + head) * D
        tl.store(y + column, low.to(q_out.dtype.element_ty), mask=in_half)
        tl.store(y + TURNED // 2 + column, high.to(q_out.dtype.element_ty), mask=in_half)
        tl.store(y + rest, other.to(q_out.dtype.element_ty), mask=in_rest)
    elif FORMAT == NVFP4:  # keys are quantized afterwards, values as they are
        if not is_value:
            y = k_out + (token * num_kv_heads + head - num_heads) * D
            tl.store(y + column, low.to(k_out.dtype.element_ty), mask=in_half)
            tl.store(y + TURNED // 2 + column, high.to(k_out.dtype.element_ty), mask=in_half)
            tl.store(y + rest, other.to(k_out.dtype.element_ty), mask=in_rest)
    else:
        slot = tl.load(slots + token)
        if (slot >= 0) & (slot < num_slots):
            page, place = slot // PAGE, slot % PAGE
            # what goes into the cache is rounded to 16 bits first, as the attention without a cache would see it
            low = low.to(heads.dtype.element_ty).to(tl.float32)
            high = high.to(heads.dtype.element_ty).to(tl.float32)
            if is_value:
                at = page * v_page + place * v_place + (head - num_heads - num_kv_heads) * v_head
                _store(v_pages, at + column, low, v_scale, in_half, FORMAT)
                _store(v_pages, at + TURNED // 2 + column, high, v_scale, in_half, FORMAT)
                _store(v_pages, at + rest, other, v_scale, in_rest, FORMAT)
            else:
                at = page * k_page + place * k_place + (head - num_heads) * k_head
                _store(k_pages, at + column, low, k_scale, in_half, FORMAT)
                _store(k_pages, at + TURNED // 2 + column, high, k_scale, in_half, FORMAT)
                _store(k_pages, at + rest, other, k_scale, in_rest, FORMAT)


def rotate_into_cache(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: PagedCache,
    slots: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    epsilon: float = 1e-6,
) -> Tensor:
    """Queries [T, H, D], turned; keys and values of the same tokens are in the cache afterwards.

    heads     [T, H + 2 KV, D] in the cache's dtype: queries, keys, values
    cos, sin  fp32 [T, 1, R], R even and at most D; of the second half of R too, the first half of `sin` negative
    slots     int64 [T]: page * page_size + place; negative ones and those past the cache are skipped
    norms     of queries and keys, fp32 [D] each

    FormatError for a dtype, shape, stride or device that does not fit.
    """
    check_heads(OP, heads, cos, sin, cache, slots, norms)
    num_kv_heads, size, turned = cache.num_kv_heads, cache.head_dim, cos.shape[-1]
    num_tokens, num_heads = heads.shape[0], heads.shape[1] - 2 * num_kv_heads
    check_can_run(OP, heads, _rotary_kernel)
    heads = heads if heads.stride(2) == 1 else heads.contiguous()
    q = torch.empty(num_tokens, num_heads, size, dtype=heads.dtype, device=heads.device)
    if num_tokens == 0:
        return q
    is_fp4 = cache.format is KVFormat.NVFP4
    k = torch.empty(num_tokens, num_kv_heads, size, dtype=q.dtype, device=q.device) if is_fp4 else q
    k_pages, v_pages = (p.view(torch.uint8) if cache.format is KVFormat.FP8 else p for p in (cache.k, cache.v))
    q_weight, k_weight = norms or (cos, cos)
    with torch.cuda.device_of(heads):
        _rotary_kernel[(num_tokens, num_heads + 2 * num_kv_heads)](
            heads, cos, sin, q_weight, k_weight, slots, q, k, k_pages, v_pages,
            cos if cache.k_scale is None else cache.k_scale, cos if cache.v_scale is None else cache.v_scale,
            heads.stride(0), heads.stride(1), *k_pages.stride()[:3], *v_pages.stride()[:3],
            cache.num_pages * cache.page_size, num_heads, num_kv_heads, epsilon,
            D=size, TURNED=turned, HALF=triton.next_power_of_2(turned // 2),
            REST=triton.next_power_of_2(max(size - turned, 1)), PAGE=cache.page_size,
            FORMAT=FORMAT_CODES[cache.format], HAS_NORM=norms is not None,
            num_warps=1, enable_fp_fusion=False, **chained(heads.device),
        )  # fmt: skip
    if is_fp4:
        quantize_kv(cache, k, heads[:, num_heads + num_kv_heads :], slots)
    return q
