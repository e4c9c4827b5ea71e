"""Attention whose keys and values can be looked at, or rounded, on their way into the cache.

Registered with transformers' own attention interface and chosen by a model's config. It stands before whatever
implementation the model would use by itself (scaled dot product, or its own eager function, which alone knows its sinks
and soft caps); a layer that has no `kv_transform` behaves exactly as before.
"""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from blockscale.algorithms.straight_through import straight_through
from blockscale.checkpoint.linear import KVScales
from blockscale.errors import ModelError
from blockscale.formats import fp8, nvfp4
from blockscale.formats.spec import FP8

KVTransform = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # keys, values [B, heads, T, D]


def register(base: str) -> str:
    """Makes an implementation known that stands before `base` ("sdpa" or "eager"); returns its name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

    functions = {"sdpa": (_before_sdpa, sdpa_mask), "eager": (_before_eager, eager_mask)}
    if base not in functions:
        raise ModelError(
            f"the KV cache cannot be looked at under attention implementation '{base}'", hint="leave --kv-cache out"
        )
    name, (function, mask) = f"blockscale_kv_{base}", functions[base]
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, mask)
    return name


def _before_sdpa(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, *_transformed(module, key, value), mask, **kwargs)


def _before_eager(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    eager = sys.modules[type(module).__module__].eager_attention_forward  # each model file has its own
    return eager(module, query, *_transformed(module, key, value), mask, **kwargs)


def _transformed(module: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    transform: KVTransform | None = getattr(module, "kv_transform", None)
    return (key, value) if transform is None else transform(key, value)


def kv_rounding(scales: KVScales, kv_format: str) -> KVTransform:
    """Rounds keys and values as a quantized cache would hold them. Gradients pass straight through."""

    def round_fp8(x: Tensor, scale: Tensor) -> Tensor:
        return fp8.decode_values(fp8.encode_values(x, scale, FP8), scale, FP8)

    def round_nvfp4(x: Tensor, scale: Tensor) -> Tensor:
        block_scale = nvfp4.block_scale_from_amax(nvfp4.block_amax(x), scale)
        return nvfp4.decode_packed(nvfp4.encode_packed(x, block_scale, scale), block_scale, scale)

    rounding = {"fp8": round_fp8, "nvfp4": round_nvfp4}[kv_format]

    def transform(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        rounded = [rounding(x.detach(), s).to(x.dtype) for x, s in ((key, scales.key), (value, scales.value))]
        return straight_through(key, rounded[0]), straight_through(value, rounded[1])

    return transform
