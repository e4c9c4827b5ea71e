"""Models that exist as names, shapes and a config only: all that a plan looks at."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from blockscale.checkpoint.header import TensorInfo
from blockscale.checkpoint.source import Source, SourceTensor

H = 64  # hidden size


def source(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.bfloat16, **config: Any) -> Source:
    """A source of those tensors, all of one dtype; the rest is its config."""
    tensors = {}
    for name, shape in shapes.items():
        num_bytes = dtype.itemsize * torch.Size(shape).numel()
        info = TensorInfo(name, dtype, shape, Path("model.safetensors"), 0, num_bytes)
        tensors[name] = SourceTensor(name, dtype, shape, (info,))
    return Source(Path("model"), config, tensors, ())


def weights(prefix: str, *leaves: str, k: int = H) -> dict[str, tuple[int, int]]:
    """`leaves` below `prefix` as [H, k] weights."""
    return {f"{prefix}.{leaf}.weight": (H, k) for leaf in leaves}


def attention(layer: int, root: str = "model.layers") -> dict[str, tuple[int, int]]:
    return weights(f"{root}.{layer}.self_attn", "q_proj", "k_proj", "v_proj", "o_proj")


def mlp(layer: int, root: str = "model.layers") -> dict[str, tuple[int, int]]:
    return weights(f"{root}.{layer}.mlp", "gate_proj", "up_proj", "down_proj")


def ends() -> dict[str, tuple[int, ...]]:
    return {"model.embed_tokens.weight": (128, H), "model.norm.weight": (H,), "lm_head.weight": (128, H)}


def llama(layers: int = 2) -> dict[str, tuple[int, ...]]:
    """A dense decoder."""
    result: dict[str, tuple[int, ...]] = ends()
    for layer in range(layers):
        result |= attention(layer) | mlp(layer)
        result[f"model.layers.{layer}.input_layernorm.weight"] = (H,)
    return result


def moe(experts: int = 4, router: str = "mlp.gate") -> dict[str, tuple[int, ...]]:
    """One decoder layer of routed experts."""
    result: dict[str, tuple[int, ...]] = ends() | attention(0)
    result[f"model.layers.0.{router}.weight"] = (experts, H)
    for expert in range(experts):
        result |= weights(f"model.layers.0.mlp.experts.{expert}", "gate_proj", "up_proj", "down_proj")
    return result
