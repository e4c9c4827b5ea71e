"""Stacks of experts taken apart, for a dialect that stores one linear an expert and projection.

Only where the names that loaders expect are known: Llama 4's, whose gate_up_proj holds gate above up. gpt-oss
interleaves the two and has biases, and no loader reads its experts one by one.
Source: llm-compressor's modeling/llama4.py, vLLM's models/llama4.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from blockscale.checkpoint.linear import QuantizedLinear
from blockscale.checkpoint.structure import text_config
from blockscale.errors import CheckpointError

_GATE_ABOVE_UP = ("llama4", "llama4_text")
_LEAVES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def unstack(name: str, linear: QuantizedLinear, config: Mapping[str, Any]) -> dict[str, QuantizedLinear]:
    """`a.experts.gate_up_proj` [E, N, K] -> `a.experts.0.gate_proj` [N/2, K] and so on, views of the same tensors.

    Works on meta tensors. CheckpointError for a model whose separate experts have no known names.
    """
    experts, dot, leaf = name.rpartition(".")
    num_experts, num_rows, k = linear.weight.shape
    leaves = _LEAVES.get(leaf, ())
    if text_config(config).get("model_type") not in _GATE_ABOVE_UP or not leaves or num_rows % len(leaves):
        raise CheckpointError(
            f"{name}: compressed-tensors has no stacks of experts, and how its loaders name this model's experts one "
            "by one is not known",
            hint="keep it in the modelopt dialect, or take --to bf16",
        )
    rows = num_rows // len(leaves)
    weight = linear.weight
    return {
        f"{experts}{dot}{expert}.{part}": replace(
            linear,
            weight=replace(
                weight,
                packed=weight.packed[expert, i * rows : (i + 1) * rows],
                block_scale=weight.block_scale[expert, i * rows : (i + 1) * rows],
                shape=(rows, k),
            ),
        )
        for expert in range(num_experts)
        for i, part in enumerate(leaves)
    }
