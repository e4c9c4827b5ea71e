"""Configs of tiny models, two decoder layers or a few, by the name that tests know them under.

A name is the model type of transformers, or stands in `_MODEL_TYPES` beside it.
"""

from typing import Any

VOCABULARY = 128  # of the tiny models and of the tokenizer: one token an ASCII character
_IMAGE_TOKENS = {"image_token_id": 127, "video_token_id": 126}

_MODEL_TYPES = {"llama3": "llama", "smollm2": "llama", "nemotron_h4": "nemotron_h"}
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MLA = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_NEMOTRON = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 1,
    "chunk_size": 32,
}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_TEXT: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "smollm2": {"tie_word_embeddings": True, "num_attention_heads": 4, "num_key_value_heads": 1},
    "mistral": {"head_dim": 16, "sliding_window": 8},
    "mixtral": _EXPERTS,
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma2": {"head_dim": 16, "sliding_window": 8},
    "gemma4_text": {"head_dim": 16, "global_head_dim": 16, "vocab_size_per_layer_input": VOCABULARY},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen3_next": {
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "phi3": {},
    "phimoe": _EXPERTS,
    "olmo2": {},
    "cohere": {},
    "starcoder2": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "nemotron": {},
    "llama4_text": {"head_dim": 16, "intermediate_size_mlp": 96, **_EXPERTS},
    "deepseek_v3": {**_MLA, **_DEEPSEEK},
    "glm4": {"head_dim": 16},
    "glm4_moe": {
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 1,
    },
    "gpt_oss": {
        "intermediate_size": 64,
        "head_dim": 16,
        "sliding_window": 8,
        "rope_parameters": _ROPE,
        **_EXPERTS,
    },
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "block_size": 8, **_EXPERTS},
    "minimax_m2": {"head_dim": 16, "intermediate_size": 32, **_EXPERTS},
    "nemotron_h": {"layers_block_type": ["mamba", "moe"], **_NEMOTRON},
    "nemotron_h4": {
        "layers_block_type": ["mamba", "attention", "moe", "mlp"],
        "num_hidden_layers": 4,
        "head_dim": 16,
        **_NEMOTRON,
    },
    "bamba": {
        "mamba_d_head": 32,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        "mamba_chunk_size": 32,
        "attn_layer_indices": [1],
    },
    "jamba": {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    "falcon_h1": {
        "head_dim": 16,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_chunk_size": 32,
    },
}
_IMAGE = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
_MROPE = {"rope_type": "default", "mrope_section": [4, 2, 2]}
# Models that see images: their language model's config lies inside.
_SEEING: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**_SIZES, **_TEXT["gemma3_text"]},
        "vision_config": {**_IMAGE, "image_size": 28, "patch_size": 14},
        "image_token_index": 127,
    },
    "llama4": {
        "text_config": {**_SIZES, **_TEXT["llama4_text"], "interleave_moe_layer_step": 2},
        "vision_config": {
            **_IMAGE,
            "image_size": 28,
            "patch_size": 14,
            "vision_output_dim": 64,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
        },
        "image_token_index": 127,
    },
    "qwen2_5_vl": {
        "text_config": {**_SIZES, "rope_parameters": _MROPE},
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 64,
            "depth": 1,
            "num_heads": 4,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [0],
        },
        **_IMAGE_TOKENS,
    },
    "qwen3_vl": {
        "text_config": {**_SIZES, "head_dim": 16, "rope_parameters": _MROPE},
        "vision_config": {
            **_IMAGE,
            "depth": 1,
            "num_heads": 4,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0],
        },
        **_IMAGE_TOKENS,
    },
}


def config_class(name: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[_MODEL_TYPES.get(name, name)]


def tiny_config(name: str) -> Any:
    """A hidden size of 64, and of everything else as little as shows what is special about the family."""
    kind = config_class(name)
    return kind(**_SEEING[name]) if name in _SEEING else kind(**{**_SIZES, **_TEXT[name]})


def auto_class(name: str) -> Any:
    """The transformers class that builds such a model."""
    import transformers

    return transformers.AutoModelForImageTextToText if name in _SEEING else transformers.AutoModelForCausalLM
