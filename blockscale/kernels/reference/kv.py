"""Keys and values of new tokens into the pages of a cache, in plain torch."""

import torch
from torch import Tensor

from blockscale.formats import fp8
from blockscale.formats.spec import FP8
from blockscale.kernels.checks import check_dtype, check_same_device, check_shape
from blockscale.kernels.paged_cache import KVFormat, PagedCache
from blockscale.kernels.reference.quantize import NAN_BYTE, quantize_nvfp4


def quantize_kv(cache: PagedCache, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """k, v [T, num_kv_heads, D] -> their places in the pages; places that are not named keep what they hold.

    slots  int64 [T]: page * page_size + place in the page; what lies outside the cache is skipped
    """
    op = "quantize_kv"
    check_dtype(op, "slots", slots, (torch.int64,))
    check_shape(op, "slots", slots, (None,))
    for name, x in (("k", k), ("v", v)):
        check_dtype(op, name, x, (cache.dtype, torch.float32))
        check_shape(op, name, x, (slots.shape[0], cache.num_kv_heads, cache.head_dim))
    check_same_device(op, cache=cache.k, k=k, v=v, slots=slots)
    is_real = (slots >= 0) & (slots < cache.num_pages * cache.page_size)
    page, place = slots[is_real] // cache.page_size, slots[is_real] % cache.page_size
    _write(cache, k[is_real], cache.k, cache.k_block_scale, cache.k_scale, (page, place))
    _write(cache, v[is_real], cache.v, cache.v_block_scale, cache.v_scale, (page, place))


def _write(
    cache: PagedCache,
    x: Tensor,
    pages: Tensor,
    block_scale: Tensor | None,
    scale: Tensor | None,
    at: tuple[Tensor, Tensor],
) -> None:
    if cache.format is KVFormat.BITS16:
        pages[at] = x.to(pages.dtype)
        return
    assert scale is not None
    if cache.format is KVFormat.FP8:
        codes = fp8.encode_values(x, scale, FP8).view(torch.uint8)
        pages.view(torch.uint8)[at] = torch.where(x.isfinite(), codes, NAN_BYTE).to(torch.uint8)
        return
    assert block_scale is not None
    packed, scales, _ = quantize_nvfp4(x, scale)
    pages[at] = packed
    block_scale.view(torch.uint8)[at] = scales.view(torch.uint8)
