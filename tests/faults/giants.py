"""Checkpoints of the largest models, right to the byte in configs, headers, index and file sizes; their data are holes.

Shapes are those of Llama 3.1 405B and DeepSeek-R1, stored as Model Optimizer stores them; and a 16-bit Llama of any
number of layers, to be quantized. A sparse file takes a few megabytes of disk, for its header.
"""

import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .raw import INDEX, write_header, write_index

Entry = tuple[str, str, tuple[int, ...]]  # name, dtype, shape
ITEM_BYTES = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4}
SHARD_BYTES = 5 * 10**9
SCALE = 2.0**-12  # of weights, of inputs and of the cache

LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}
DEEPSEEK_R1 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "dtype": "bfloat16",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


# ---------------------------------------------------------------- folders


def llama_405b(folder: Path) -> Path:
    """NVFP4, W4A4, an FP8 cache; about 236 GB."""
    excluded = ["lm_head", "model.embed_tokens"]
    return _write(folder, _quantized(LLAMA_405B, excluded, "FP8"), _llama(LLAMA_405B))


def deepseek_r1(folder: Path) -> Path:
    """NVFP4 in the feed-forward, as its publisher has it: attention, routers and the draft layer in 16 bits."""
    layers = range(DEEPSEEK_R1["num_hidden_layers"])
    routers = [f"model.layers.{i}.mlp.gate" for i in layers if i >= DEEPSEEK_R1["first_k_dense_replace"]]
    attention = [f"model.layers.{i}.self_attn*" for i in layers]
    excluded = ["lm_head", "model.embed_tokens", *attention, *routers, f"model.layers.{len(layers)}*"]
    return _write(folder, _quantized(DEEPSEEK_R1, excluded, None), _deepseek(DEEPSEEK_R1))


def llama_16_bit(folder: Path, num_layers: int) -> Path:
    """Layers of Llama 3 70B in bf16, 1.71 GB each, behind a small vocabulary."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "vocab_size": 1024}
    config = {**LLAMA_405B, **sizes, "num_hidden_layers": num_layers}
    return _write(folder, {"config.json": config}, _llama(config, is_quantized=False))


def _quantized(config: dict[str, Any], excluded: list[str], cache: str | None) -> dict[str, Any]:
    producer = {"name": "modelopt", "version": "0.47.0"}
    arguments = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    groups = {"group_0": {"input_activations": arguments, "weights": arguments, "targets": ["Linear"]}}
    flat = {"config_groups": groups, "ignore": excluded, "quant_algo": "NVFP4"}
    if cache:
        flat["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    flat |= {"producer": producer, "quant_method": "modelopt"}
    nested = {"quant_algo": "NVFP4", "kv_cache_quant_algo": cache, "group_size": 16, "exclude_modules": excluded}
    return {
        "config.json": {**config, "quantization_config": flat},
        "hf_quant_config.json": {"producer": producer, "quantization": nested},
    }


def _write(folder: Path, configs: dict[str, Any], entries: Iterator[Entry]) -> Path:
    """Shards of SHARD_BYTES at most, in the order of the entries, and an index."""
    folder.mkdir(parents=True)
    for name, content in configs.items():
        (folder / name).write_text(json.dumps(content, indent=2))
    parts: list[list[Entry]] = [[]]
    filled = total = 0
    for entry in entries:
        size = num_bytes(entry)
        if filled + size > SHARD_BYTES and parts[-1]:
            parts.append([])
            filled = 0
        parts[-1].append(entry)
        filled += size
        total += size
    weight_map = {}
    for i, part in enumerate(parts, 1):
        file = f"model-{i:05d}-of-{len(parts):05d}.safetensors"
        _write_shard(folder / file, part)
        weight_map.update({name: file for name, _, _ in part})
    write_index(folder, weight_map, total)
    assert (folder / INDEX).stat().st_size > 0
    return folder


def _write_shard(path: Path, part: list[Entry]) -> None:
    """fp32 tensors lie in front, as the reference writer sorts by alignment. They alone are written: scales are no
    holes, since those that are zero would be a fault."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = scalars = 0
    for name, dtype, shape in sorted(part, key=lambda entry: entry[1] != "F32"):
        end = position + num_bytes((name, dtype, shape))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
        scalars = end if dtype == "F32" else scalars
    begin = write_header(path, header)
    with path.open("ab") as file:
        file.write(struct.pack("<f", SCALE) * (scalars // 4))
    os.truncate(path, begin + position)


def num_bytes(entry: Entry) -> int:
    return ITEM_BYTES[entry[1]] * math.prod(entry[2])


# ---------------------------------------------------------------- tensors


def _linear(name: str, n: int, k: int, is_quantized: bool) -> Iterator[Entry]:
    if not is_quantized:
        yield f"{name}.weight", "BF16", (n, k)
        return
    yield f"{name}.weight", "U8", (n, k // 2)
    yield f"{name}.weight_scale", "F8_E4M3", (n, k // 16)
    yield f"{name}.weight_scale_2", "F32", ()
    yield f"{name}.input_scale", "F32", ()


def _norm(name: str, size: int) -> Iterator[Entry]:
    yield f"{name}.weight", "BF16", (size,)


def _feed_forward(name: str, hidden: int, inner: int, is_quantized: bool) -> Iterator[Entry]:
    yield from _linear(f"{name}.gate_proj", inner, hidden, is_quantized)
    yield from _linear(f"{name}.up_proj", inner, hidden, is_quantized)
    yield from _linear(f"{name}.down_proj", hidden, inner, is_quantized)


def _ends(config: dict[str, Any]) -> Iterator[Entry]:
    yield from _norm("model.norm", config["hidden_size"])
    yield "lm_head.weight", "BF16", (config["vocab_size"], config["hidden_size"])


def _llama(config: dict[str, Any], is_quantized: bool = True) -> Iterator[Entry]:
    hidden, head = config["hidden_size"], config["head_dim"]
    keys = config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", "BF16", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        yield from _norm(f"{name}.input_layernorm", hidden)
        for leaf, rows in (("q_proj", config["num_attention_heads"] * head), ("k_proj", keys), ("v_proj", keys)):
            yield from _linear(f"{name}.self_attn.{leaf}", rows, hidden, is_quantized)
        if is_quantized:
            yield f"{name}.self_attn.k_proj.k_scale", "F32", ()
            yield f"{name}.self_attn.v_proj.v_scale", "F32", ()
        yield from _linear(f"{name}.self_attn.o_proj", hidden, config["num_attention_heads"] * head, is_quantized)
        yield from _norm(f"{name}.post_attention_layernorm", hidden)
        yield from _feed_forward(f"{name}.mlp", hidden, config["intermediate_size"], is_quantized)
    yield from _ends(config)


def _deepseek(config: dict[str, Any]) -> Iterator[Entry]:
    hidden, num_layers = config["hidden_size"], config["num_hidden_layers"]
    vocabulary = (config["vocab_size"], hidden)
    yield "model.embed_tokens.weight", "BF16", vocabulary
    for layer in range(num_layers + config["num_nextn_predict_layers"]):
        name, is_draft = f"model.layers.{layer}", layer >= num_layers
        if is_draft:
            yield f"{name}.embed_tokens.weight", "BF16", vocabulary
            yield from _norm(f"{name}.enorm", hidden)
            yield from _norm(f"{name}.hnorm", hidden)
            yield f"{name}.eh_proj.weight", "BF16", (hidden, 2 * hidden)
        yield from _norm(f"{name}.input_layernorm", hidden)
        yield from _latent_attention(f"{name}.self_attn", config)
        yield from _norm(f"{name}.post_attention_layernorm", hidden)
        if layer < config["first_k_dense_replace"]:
            yield from _feed_forward(f"{name}.mlp", hidden, config["intermediate_size"], True)
        else:
            yield from _experts(f"{name}.mlp", config, is_quantized=not is_draft)
        if is_draft:
            yield from _norm(f"{name}.shared_head.norm", hidden)
            yield f"{name}.shared_head.head.weight", "BF16", vocabulary
    yield from _ends(config)


def _latent_attention(name: str, config: dict[str, Any]) -> Iterator[Entry]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    yield f"{name}.q_a_proj.weight", "BF16", (q_rank, hidden)
    yield from _norm(f"{name}.q_a_layernorm", q_rank)
    yield f"{name}.q_b_proj.weight", "BF16", (heads * (nope + rope), q_rank)
    yield f"{name}.kv_a_proj_with_mqa.weight", "BF16", (kv_rank + rope, hidden)
    yield from _norm(f"{name}.kv_a_layernorm", kv_rank)
    yield f"{name}.kv_b_proj.weight", "BF16", (heads * (nope + value), kv_rank)
    yield f"{name}.o_proj.weight", "BF16", (hidden, heads * value)


def _experts(name: str, config: dict[str, Any], is_quantized: bool) -> Iterator[Entry]:
    hidden, inner, count = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    yield f"{name}.gate.weight", "BF16", (count, hidden)
    yield f"{name}.gate.e_score_correction_bias", "F32", (count,)
    for expert in range(count):
        yield from _feed_forward(f"{name}.experts.{expert}", hidden, inner, is_quantized)
    shared = inner * config["n_shared_experts"]
    yield from _feed_forward(f"{name}.shared_experts", hidden, shared, is_quantized)
