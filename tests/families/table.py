"""The families, by what is special about the names and the structure of each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .published import with_draft_layer, with_draft_root, with_mxfp4_experts, without_computed_buffers

_ATTENTION = {"q_proj": 2, "k_proj": 2, "v_proj": 2, "o_proj": 2}
_DENSE = {**_ATTENTION, "gate_proj": 2, "up_proj": 2, "down_proj": 2}
_EXPERTS_OF_8 = {"gate_proj": 8, "up_proj": 8, "down_proj": 8}
_W123_OF_8 = {"w1": 8, "w2": 8, "w3": 8}


@dataclass(frozen=True)
class Family:
    """A tiny model of it.

    model      its name in `tiny_configs`
    linears    what is quantized: last part of the name -> how many there are
    publish    what its makers' files have beside what transformers writes, or instead
    has_stacks compressed-tensors has no place for the experts as they are stored
    """

    name: str
    model: str
    linears: Mapping[str, int]
    publish: Callable[[Path, Path], Path] | None = None
    has_stacks: bool = False

    def __str__(self) -> str:
        return self.name


FAMILIES = (
    Family("Llama 3", "llama3", _DENSE),
    Family("SmolLM2", "smollm2", _DENSE),
    Family("Qwen2.5", "qwen2", _DENSE),
    Family("Qwen3", "qwen3", _DENSE),
    Family("Mistral", "mistral", _DENSE),
    Family("Gemma 3 text", "gemma3_text", _DENSE),
    Family("Gemma 3", "gemma3", _DENSE),
    Family("Phi-4", "phi3", {"qkv_proj": 2, "o_proj": 2, "gate_up_proj": 2, "down_proj": 2}),
    Family("GLM-4", "glm4", {**_ATTENTION, "gate_up_proj": 2, "down_proj": 2}),
    Family("Qwen2.5-VL", "qwen2_5_vl", _DENSE),
    Family("Qwen3-VL", "qwen3_vl", _DENSE),
    Family("Mixtral", "mixtral", {**_ATTENTION, **_W123_OF_8}),
    Family("Qwen3-MoE", "qwen3_moe", {**_ATTENTION, **_EXPERTS_OF_8}),
    Family("gpt-oss", "gpt_oss", {**_ATTENTION, "gate_up_proj": 2, "down_proj": 2}, has_stacks=True),
    Family(
        "gpt-oss in MXFP4",
        "gpt_oss",
        {**_ATTENTION, "gate_up_proj": 2, "down_proj": 2},
        with_mxfp4_experts,
        has_stacks=True,
    ),
    Family(
        "DeepSeek-V3",  # a dense layer, then one of 8 experts and a shared one
        "deepseek_v3",
        {"q_a_proj": 2, "q_b_proj": 2, "kv_a_proj_with_mqa": 2, "o_proj": 2}
        | {"gate_proj": 10, "up_proj": 10, "down_proj": 10},
        with_draft_layer,
    ),
    Family(
        "Llama 4",  # a dense layer, then one of a stack and a shared expert
        "llama4",
        {**_ATTENTION, "gate_proj": 2, "up_proj": 2, "down_proj": 3, "gate_up_proj": 1},
        has_stacks=True,
    ),
    Family("GLM-4.5", "glm4_moe", {**_ATTENTION, "gate_proj": 6, "up_proj": 6, "down_proj": 6}, with_draft_layer),
    Family(
        "MiniMax-01",  # a layer of linear attention, then one of the usual kind
        "minimax",
        {**dict.fromkeys(_ATTENTION, 1), **_W123_OF_8, "qkv_proj": 1, "output_gate": 1, "out_proj": 1},
        without_computed_buffers,
    ),
    Family("MiniMax-M2", "minimax_m2", {**_ATTENTION, **_W123_OF_8}),
    Family(
        "Qwen3-Next",  # a layer of linear attention, then one of the usual kind; 4 experts and a shared one in each
        "qwen3_next",
        {**dict.fromkeys(_ATTENTION, 1), "gate_proj": 10, "up_proj": 10, "down_proj": 10}
        | {"in_proj_qkvz": 1, "in_proj_ba": 1, "out_proj": 1},
        with_draft_root,
    ),
    Family(
        "Nemotron-H",  # a state-space layer, attention, 4 experts and a shared one, a layer without experts
        "nemotron_h4",
        {**dict.fromkeys(_ATTENTION, 1), "in_proj": 1, "out_proj": 1, "up_proj": 6, "down_proj": 6},
    ),
)
BY_NAME = {family.name: family for family in FAMILIES}

# What may stay in 16 bits, by the last part of a module's name. Everything else must be packed.
KEPT = {
    *("lm_head", "embed_tokens", "embeddings", "kv_b_proj", "conv1d"),
    *("gate", "router", "shared_expert_gate"),
}
KEPT_BELOW = ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "model.layers.2.", "mtp.")
