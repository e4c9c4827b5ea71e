"""The paged caches of a decoder: one a layer, of keys and values or of latents."""

from collections.abc import Mapping

import torch

from blockscale.checkpoint.linear import KVScales
from blockscale.errors import UsageError
from blockscale.kernels.paged_cache import KVFormat, LatentCache, PagedCache, allocate
from blockscale.models.config import DecoderConfig

Cache = PagedCache | LatentCache
_BITS = {KVFormat.BITS16: 16.0, KVFormat.FP8: 8.0, KVFormat.NVFP4: 4.5}


def cache_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a cache of 16 bits holds under a model that computes in `dtype`: fp32's range asks for bfloat16."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


def page_bytes(config: DecoderConfig, page_size: int, kv_format: KVFormat) -> int:
    """Bytes of a page of `page_size` tokens, of all layers together."""
    if config.latent is not None:
        elements = config.latent.latent_dim + config.latent.rope_dim
    else:
        elements = 2 * config.num_kv_heads * config.head_dim
    return int(config.num_layers * page_size * elements * _BITS[kv_format] / 8)


def allocate_caches(
    config: DecoderConfig,
    num_pages: int,
    page_size: int,
    kv_format: KVFormat,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    scales: Mapping[int, KVScales] | None = None,
) -> list[Cache]:
    """Empty caches, one a layer.

    dtype   bfloat16 or float16: what they stand for
    scales  by layer; a layer without has scales of 1. Caches of 16 bits have none
    """
    caches: list[Cache] = []
    for i in range(config.num_layers):
        own = (scales or {}).get(i)
        k_scale, v_scale = (1.0, 1.0) if own is None else (float(own.key), float(own.value))
        if config.latent is None:
            sizes = (kv_format, num_pages, page_size, config.num_kv_heads, config.head_dim)
            cache = allocate(*sizes, k_scale=k_scale, v_scale=v_scale, dtype=dtype, device=str(device))
            caches.append(cache)
            continue
        width = config.latent.latent_dim + config.latent.rope_dim
        one = allocate(kv_format, num_pages, page_size, 1, width, k_scale=k_scale, dtype=dtype, device=str(device))
        block_scale = None if one.k_block_scale is None else one.k_block_scale.squeeze(2)
        caches.append(LatentCache(kv_format, one.k.squeeze(2), block_scale, one.k_scale, config.latent.rope_dim, dtype))
    return caches


def with_format(kv_format: KVFormat | None, stored: str | None) -> KVFormat:
    """The format asked for, or the checkpoint's own, or 16 bits. UsageError for one that is not known."""
    if kv_format is not None:
        return kv_format
    known = {None: KVFormat.BITS16, "fp8": KVFormat.FP8, "nvfp4": KVFormat.NVFP4}
    if stored not in known:
        raise UsageError(f"the checkpoint asks for a KV cache in '{stored}'", hint="choose 16 bits, FP8 or NVFP4")
    return known[stored]
