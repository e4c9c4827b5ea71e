"""Weights with the magnitudes of real ones, quantized and stored by hand, and ways to store them wrongly."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from blockscale.checkpoint.source import Source, open_source
from blockscale.formats.layout import swizzle
from blockscale.formats.spec import MXFP4, NVFP4, NVFP4_BLOCK32, Format
from blockscale.formats.tensor import encode
from blockscale.inspection.reading import Reading, read_folder

from .changed_folders import written

Tensors = dict[str, Tensor]
_ALGORITHM = {NVFP4: "W4A16_NVFP4", MXFP4: "W4A16_MXFP4", NVFP4_BLOCK32: "W4A8_NVFP4_FP8"}


def drawn(n: int, k: int, seed: int = 0, spread: float = 0.3) -> Tensor:
    """bf16 [N, K]: rows and columns differ in magnitude by e^(`spread` times a normal number)."""
    generator = torch.Generator().manual_seed(seed)
    weight = 0.02 * torch.randn(n, k, generator=generator)
    rows, cols = torch.randn(n, 1, generator=generator), torch.randn(1, k, generator=generator)
    return (weight * (spread * rows).exp() * (spread * cols).exp()).bfloat16()


def stored(weights: Tensors, fmt: Format = NVFP4) -> Tensors:
    """As Model Optimizer names it."""
    tensors = {}
    for name, weight in weights.items():
        quantized = encode(weight, fmt)
        tensors[f"{name}.weight"] = quantized.packed
        tensors[f"{name}.weight_scale"] = quantized.block_scale
        if quantized.global_scale is not None:
            tensors[f"{name}.weight_scale_2"] = quantized.global_scale
        if fmt is NVFP4_BLOCK32:
            tensors[f"{name}.input_scale"] = torch.tensor(0.01)
    return tensors


def reading_of(parent: Path, tensors: Tensors, fmt: Format = NVFP4) -> Reading:
    settings = {"quant_method": "modelopt", "quant_algo": _ALGORITHM[fmt], "group_size": fmt.block_size}
    return read_folder(written(parent / "quantized", tensors, {"quantization_config": settings}))


def source_of(parent: Path, weights: Tensors) -> Source:
    return open_source(written(parent / "source", {f"{name}.weight": w for name, w in weights.items()}, {}))


# ---------------------------------------------------------------- wrong ways


def swap_nibbles(tensors: Tensors, name: str) -> None:
    packed = tensors[f"{name}.weight"]
    tensors[f"{name}.weight"] = (packed << 4) | (packed >> 4)


def swizzle_scales(tensors: Tensors, name: str) -> None:
    """In place where whole tiles are filled, else in the padded shape."""
    scale = tensors[f"{name}.weight_scale"]
    rows, cols = (-(-n // unit) * unit for n, unit in zip(scale.shape, (128, 4), strict=True))
    tensors[f"{name}.weight_scale"] = swizzle(scale.view(torch.uint8)).view(rows, cols).view(scale.dtype)


def both(tensors: Tensors, name: str) -> None:
    swap_nibbles(tensors, name)
    swizzle_scales(tensors, name)


def on_bytes(tensors: Tensors, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Of the block scales."""
    scale = tensors[f"{name}.weight_scale"]
    tensors[f"{name}.weight_scale"] = change(scale.view(torch.uint8)).contiguous().view(scale.dtype)
