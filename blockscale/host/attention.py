"""Attention whose keys and values can be looked at, or rounded, on their way into the cache.

Registered with transformers' own attention interface under one name, and chosen by a model's config; a layer that
has no `kv_transform` behaves as scaled dot product attention does.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from blockscale.checkpoint.linear import KVScales
from blockscale.formats import fp8, nvfp4
from blockscale.formats.spec import FP8

NAME = "blockscale_kv"
KVTransform = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # keys, values [B, heads, T, D]


def register() -> str:
    """Makes the implementation known to transformers; returns its name. Safe to call again."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    transform: KVTransform | None = getattr(module, "kv_transform", None)
    if transform is not None:
        key, value = transform(key, value)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def kv_rounding(scales: KVScales, kv_format: str) -> KVTransform:
    """Rounds keys and values as a quantized cache would hold them."""

    def round_fp8(x: Tensor, scale: Tensor) -> Tensor:
        return fp8.decode_values(fp8.encode_values(x, scale, FP8), scale, FP8)

    def round_nvfp4(x: Tensor, scale: Tensor) -> Tensor:
        block_scale = nvfp4.block_scale_from_amax(nvfp4.block_amax(x), scale)
        return nvfp4.decode_packed(nvfp4.encode_packed(x, block_scale, scale), block_scale, scale)

    rounding = {"fp8": round_fp8, "nvfp4": round_nvfp4}[kv_format]

    def transform(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return rounding(key, scales.key).to(key.dtype), rounding(value, scales.value).to(value.dtype)

    return transform
