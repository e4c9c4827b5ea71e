"""A model's config as llama.cpp's hyperparameters, and what its graphs do not compute."""

import math
from pathlib import Path
from typing import Any

import gguf

from blockscale.conversion.gguf.families import FAMILIES, Families, Family
from blockscale.conversion.gguf.rows import Geometry
from blockscale.errors import CheckpointError

_SILU, _GELU_TANH = "silu", "gelu_pytorch_tanh"
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}  # llama.cpp knows the models with another attention scale by these
_MAX_SIZE = 2**31 - 1
_SWIGLU_LIMIT = 7.0  # of gpt-oss, fixed in llama.cpp


def read_config(path: Path) -> Any:
    """The text model's transformers config, defaults filled in. CheckpointError for one that transformers refuses."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config()
    except Exception as e:  # transformers raises what its parsing trips over
        reason = " ".join(str(e).split()) or type(e).__name__
        raise CheckpointError(f"{path}: transformers cannot read the config: {reason}", hint="mend config.json") from e


def find_families(config: Any) -> Families:
    if config.model_type not in FAMILIES:
        raise CheckpointError(
            f"architecture '{config.model_type}' is not written as GGUF", hint="supported: " + ", ".join(FAMILIES)
        )
    return FAMILIES[config.model_type]


def size(config: Any, name: str) -> int:
    """CheckpointError for a field that is missing, or no positive integer."""
    return checked_size(getattr(config, name, None), name)


def checked_size(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MAX_SIZE:
        raise CheckpointError(f"config.json: {name} is {value!r}, not a size", hint="copy the model's own config.json")
    return value


def number(config: Any, name: str) -> float:
    """CheckpointError for a field that is missing, or no positive number."""
    value = getattr(config, name, None)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise CheckpointError(
            f"config.json: {name} is {value!r}, not a positive number", hint="copy the model's own config.json"
        )
    return float(value)


def geometry_of(config: Any, num_tokens: int) -> Geometry:
    """`num_tokens`: rows of the embedding."""
    hidden, num_heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    has_groups, has_own_heads, has_experts = (
        getattr(config, name, None) is not None for name in ("num_key_value_heads", "head_dim", "num_local_experts")
    )
    return Geometry(
        num_layers=size(config, "num_hidden_layers"),
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=size(config, "num_key_value_heads") if has_groups else num_heads,
        head_dim=size(config, "head_dim") if has_own_heads else hidden // num_heads,
        num_experts=size(config, "num_local_experts") if has_experts else 0,
        num_tokens=num_tokens,
    )


def check_graph(config: Any, family: Family, geometry: Geometry) -> list[str]:
    """CheckpointError where llama.cpp would compute something else than the model; notices where it does so only
    beyond some length of text."""
    gemma = family.architecture in _GEMMA_27B_LAYERS
    expected: dict[str, Any] = {"hidden_activation" if gemma else "hidden_act": _GELU_TANH if gemma else _SILU}
    if gemma:
        is_27b = geometry.num_layers == _GEMMA_27B_LAYERS[family.architecture]
        expected["query_pre_attn_scalar"] = geometry.hidden // geometry.num_heads if is_27b else geometry.head_dim
        expected["use_bidirectional_attention"] = False
    if family.architecture == "gemma2":
        number(config, "attn_logit_softcapping")
        number(config, "final_logit_softcapping")
        expected["tie_word_embeddings"] = True
    if family.architecture == "gemma3":
        expected["attn_logit_softcapping"] = None
    if family.architecture == "qwen3moe":
        expected |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if family.architecture == "gpt-oss":
        expected["swiglu_limit"] = _SWIGLU_LIMIT
    for name, value in expected.items():
        found = getattr(config, name, value)
        if found != value and not (value is False and not found):
            raise CheckpointError(
                f"config.json: {name} is {found!r}; llama.cpp's graph of '{family.architecture}' computes {value!r}",
                hint="this model cannot be run by llama.cpp",
            )
    window = getattr(config, "sliding_window", None)
    if window and not has_window(family) and getattr(config, "use_sliding_window", True):
        return [f"llama.cpp does not limit attention to the model's {window} tokens: longer texts are read otherwise"]
    return []


def has_window(family: Family) -> bool:
    """Whether the graph has layers that see a sliding window only."""
    return family.architecture in ("gemma2", "gemma3", "gpt-oss")


def add_hyperparameters(writer: gguf.GGUFWriter, config: Any, family: Family, geometry: Geometry) -> None:
    writer.add_block_count(geometry.num_layers)
    writer.add_context_length(size(config, "max_position_embeddings"))
    writer.add_embedding_length(geometry.hidden)
    writer.add_feed_forward_length(size(config, "intermediate_size"))
    writer.add_head_count(geometry.num_heads)
    writer.add_head_count_kv(geometry.num_kv_heads)
    writer.add_key_length(geometry.head_dim)
    writer.add_value_length(geometry.head_dim)
    writer.add_layer_norm_rms_eps(number(config, "rms_norm_eps"))
    writer.add_vocab_size(geometry.num_tokens)
    if geometry.num_experts:
        writer.add_expert_count(geometry.num_experts)
        writer.add_expert_used_count(size(config, "num_experts_per_tok"))
    if family.architecture == "qwen3moe":
        writer.add_expert_feed_forward_length(size(config, "moe_intermediate_size"))
    if family.architecture == "gpt-oss":
        writer.add_expert_feed_forward_length(size(config, "intermediate_size"))
    if has_window(family):
        writer.add_sliding_window(size(config, "sliding_window"))
        writer.add_sliding_window_pattern(_window_pattern(config, geometry))
    if family.architecture == "gemma2":
        writer.add_attn_logit_softcapping(number(config, "attn_logit_softcapping"))
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(number(config, "final_logit_softcapping"))


def _window_pattern(config: Any, geometry: Geometry) -> list[bool]:
    """Which layers see a window only."""
    kinds = getattr(config, "layer_types", None)
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != geometry.num_layers or not set(kinds) <= set(known):
        raise CheckpointError(
            f"config.json: layer_types are not {geometry.num_layers} of {' and '.join(known)}",
            hint="copy the model's own config.json",
        )
    return [kind == known[0] for kind in kinds]
