"""Keys and values of new tokens into the pages of a cache, rounded to what it stores: 16 bits, FP8 or NVFP4.

    quantize_kv(cache, k, v, slots)     slots int64 [T]: page * page_size + place in the page; negative ones are skipped

FP8 is E4M3 of x / scale, saturated, NVFP4 is `quantize` along the head dimension with the cache's scale as the global
scale: the bytes of `formats` for finite input. NaN and Inf become NaN (FP8: that element, NVFP4: its block of 16), and
stay in their token and head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.kernels import checks
from blockscale.kernels.paged_cache import BLOCK, KVFormat, PagedCache
from blockscale.kernels.triton.chain import chained, enter_chain
from blockscale.kernels.triton.kv_decode import BITS16, FORMAT_CODES, FP8
from blockscale.kernels.triton.nvfp4_blocks import (
    LARGEST_GLOBAL_SCALE,
    load_halves,
    quantize_halves,
    store_halves,
    to_e4m3,
    widened,
)
from blockscale.kernels.triton.quantize import check_can_run


@triton.jit
def fp8_bytes(x, scale):
    """int32 E4M3 codes of x / scale, half to even, saturating; 0x7F where x is not finite. Any shape."""
    q = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    _, code = to_e4m3(tl.minimum(tl.abs(q), 448.0))
    sign = (q.to(tl.uint32, bitcast=True) >> 24).to(tl.int32) & 0x80
    return tl.where((tl.abs(x) < float("inf")) & (q == q), code | sign, 0x7F)


@triton.jit
def _write_side(
    values,
    pages,
    block_scale,
    scale,
    token,
    slot,
    values_token,
    values_head,
    page_stride,
    place_stride,
    head_stride,
    scale_page_stride,
    scale_place_stride,
    scale_head_stride,
    num_heads,
    PAGE_SIZE: tl.constexpr,
    BLOCKS_A_HEAD: tl.constexpr,
    BLOCKS: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
):
    page, place = slot // PAGE_SIZE, slot % PAGE_SIZE
    block = tl.arange(0, BLOCKS)  # of the token: heads one after another
    head, part = (block // BLOCKS_A_HEAD).to(tl.int64), block % BLOCKS_A_HEAD
    mask = head < num_heads
    low, high = load_halves(values, token * values_token + head * values_head + part * 16, mask)
    low, high = widened(low), widened(high)
    target = page * page_stride + place * place_stride + head * head_stride
    if FORMAT == BITS16:
        store_halves(pages, target + part * 16, low, high, mask)
    elif FORMAT == FP8:
        factor = tl.load(scale)
        at = pages + (target + part * 16)[:, None] + tl.arange(0, 8)[None, :]
        tl.store(at, fp8_bytes(low, factor).to(tl.uint8), mask=mask[:, None])
        tl.store(at + 8, fp8_bytes(high, factor).to(tl.uint8), mask=mask[:, None])
    else:
        low_word, high_word, code = quantize_halves(low, high, tl.load(scale), False, LARGEST)
        at = pages + (target + part * 2)[:, None] + tl.arange(0, 2)[None, :]
        tl.store(at, tl.join(low_word, high_word), mask=mask[:, None])
        scale_at = page * scale_page_stride + place * scale_place_stride + head * scale_head_stride + part
        tl.store(block_scale + scale_at, code.to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["num_slots", "num_heads"])
def _kv_kernel(
    k,
    v,
    slots,
    k_pages,
    v_pages,
    k_block_scale,
    v_block_scale,
    k_scale,
    v_scale,
    k_token,
    k_head,
    v_token,
    v_head,
    k_page,
    k_place,
    k_page_head,
    v_page,
    v_place,
    v_page_head,
    k_scale_page,
    k_scale_place,
    k_scale_head,
    v_scale_page,
    v_scale_place,
    v_scale_head,
    num_slots,
    num_heads,
    PAGE_SIZE: tl.constexpr,
    BLOCKS_A_HEAD: tl.constexpr,
    BLOCKS: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    """A token a program, keys in the first half of the grid's second dimension, values in the other."""
    enter_chain(IS_CHAINED)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if (slot >= 0) & (slot < num_slots):
        if tl.program_id(1) == 0:
            _write_side(
                *(k, k_pages, k_block_scale, k_scale, token, slot, k_token, k_head, k_page, k_place, k_page_head),
                *(k_scale_page, k_scale_place, k_scale_head, num_heads),
                *(PAGE_SIZE, BLOCKS_A_HEAD, BLOCKS, FORMAT, LARGEST),
            )
        else:
            _write_side(
                *(v, v_pages, v_block_scale, v_scale, token, slot, v_token, v_head, v_page, v_place, v_page_head),
                *(v_scale_page, v_scale_place, v_scale_head, num_heads),
                *(PAGE_SIZE, BLOCKS_A_HEAD, BLOCKS, FORMAT, LARGEST),
            )


def quantize_kv(cache: PagedCache, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Writes k, v [T, num_kv_heads, D] (the cache's dtype, or fp32) into the cache's pages.

    slots  int64 [T]: page * page_size + place in the page. Negative ones, and those past the last page, are skipped.

    FormatError for a shape, dtype, stride or device that does not fit.
    """
    op = "quantize_kv"
    shape = (None, cache.num_kv_heads, cache.head_dim)
    for name, x in (("k", k), ("v", v)):
        checks.check_shape(op, name, x, shape)
        checks.check_dtype(op, name, x, (cache.dtype, torch.float32))
    checks.check_dtype(op, "v", v, (k.dtype,))
    checks.check_shape(op, "v", v, k.shape)
    checks.check_shape(op, "slots", slots, (k.shape[0],))
    checks.check_dtype(op, "slots", slots, (torch.int64,))
    checks.check_contiguous(op, "slots", slots)
    checks.check_same_device(op, cache=cache.k, k=k, v=v, slots=slots)
    check_can_run(op, k, _kv_kernel)
    if k.shape[0] == 0:
        return
    k, v = _inner_contiguous(k), _inner_contiguous(v)
    k_pages, v_pages = _pages(op, "k", cache.format, cache.k), _pages(op, "v", cache.format, cache.v)
    k_block_scale, v_block_scale = _bytes(cache.k_block_scale), _bytes(cache.v_block_scale)
    blocks_a_head = cache.head_dim // BLOCK
    blocks = triton.next_power_of_2(cache.num_kv_heads * blocks_a_head)
    with torch.cuda.device_of(k):
        _kv_kernel[(k.shape[0], 2)](
            *(k, v, slots, k_pages, v_pages),
            *(k_pages if k_block_scale is None else k_block_scale, v_pages if v_block_scale is None else v_block_scale),
            *(k_pages if cache.k_scale is None else cache.k_scale, v_pages if cache.v_scale is None else cache.v_scale),
            *(k.stride()[:2] + v.stride()[:2] + k_pages.stride()[:3] + v_pages.stride()[:3]),
            *((0, 0, 0) if k_block_scale is None else k_block_scale.stride()[:3]),
            *((0, 0, 0) if v_block_scale is None else v_block_scale.stride()[:3]),
            cache.num_pages * cache.page_size,
            cache.num_kv_heads,
            PAGE_SIZE=cache.page_size,
            BLOCKS_A_HEAD=blocks_a_head,
            BLOCKS=blocks,
            FORMAT=FORMAT_CODES[cache.format],
            LARGEST=LARGEST_GLOBAL_SCALE[k.dtype],
            num_warps=min(max(blocks // 32, 1), 16),
            enable_fp_fusion=False,
            **chained(k.device),
        )


def _inner_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _bytes(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.view(torch.uint8)


def _pages(op: str, name: str, fmt: KVFormat, pages: Tensor) -> Tensor:
    """What the kernel stores into: 16-bit numbers, bytes, or words of eight codes."""
    if fmt is KVFormat.BITS16:
        return pages
    if fmt is KVFormat.FP8:
        return pages.view(torch.uint8)
    if any(s % 4 for s in pages.stride()[:3]) or pages.storage_offset() % 4:
        raise FormatError(
            f"{op}: pages of {name} have strides {pages.stride()}",
            hint="packed heads must begin at multiples of 4 bytes",
        )
    return pages.view(torch.int32)
