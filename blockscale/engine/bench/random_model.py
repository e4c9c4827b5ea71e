"""A named architecture with random weights: a checkpoint of headers alone, whose weights are drawn on the device.

The folder has a config, headers and, in place of weights, a hole in the file, which takes no room on the disk and
reads as zeros. The engine loads it as it loads any checkpoint; then every weight is drawn anew where it lies, in the
layout that it has there. What a kernel takes depends on shapes, and what a GPU draws on values that are not zero.
"""

import dataclasses
import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockscale.checkpoint.dialects import modelopt
from blockscale.checkpoint.header import DTYPE_BYTES
from blockscale.checkpoint.linear import W4A16
from blockscale.checkpoint.target import disk_errors
from blockscale.errors import UsageError
from blockscale.formats.spec import NVFP4
from blockscale.kernels.bench.linear import random_weight
from blockscale.kernels.linears import PREPARE
from blockscale.kernels.prepare import Layout, PreparedWeight
from blockscale.planning.models.model import presets

WEIGHTS = ("nvfp4", "bf16")
_TINY = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}
_ONE = {"BF16": b"\x80\x3f", "F32": b"\x00\x00\x80\x3f"}
NAMES = ("tiny", "llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b")
# What presets leave out, since plans do not need it.
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "rms_norm_eps": 1e-5,
}
_QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "rms_norm_eps": 1e-6,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
_STACK_SCALES = (48, 72)  # bytes of E4M3: a few binades around one


def random_config(name: str) -> dict[str, Any]:
    """A Hugging Face config. UsageError for a name that is none of NAMES."""
    if name not in NAMES:
        raise UsageError(f"no random model '{name}'", hint="there are " + ", ".join(NAMES))
    config = dict(_TINY if name == "tiny" else presets()[name])
    config.pop("aliases", None)
    beside = _QWEN if config["model_type"] == "qwen3_moe" else _LLAMA
    common = {"hidden_act": "silu", "attention_bias": False, "dtype": "bfloat16", "eos_token_id": None}
    heads = {"head_dim": config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])}
    return {**config, **beside, **common, **heads}


def write_hollow(folder: Path, config: Mapping[str, Any], weights: str = "nvfp4") -> None:
    """Writes config.json and model.safetensors into `folder`. Norms and global scales are written out, as ones;
    matrices are a hole.

    config   as `random_config` gives it; its numbers may be others
    weights  "nvfp4" (16 bits for embedding, head and routers, as checkpoints have it), or "bf16"
    """
    if weights not in WEIGHTS:
        raise UsageError(f"no random weights in '{weights}'", hint="there are " + ", ".join(WEIGHTS))
    linears, kept = dict(_linears(config)), dict(_kept(config))
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {n: ("BF16", shape) for n, shape in kept.items()}
    for module, (n, k) in linears.items():
        if weights == "bf16":
            tensors[f"{module}.weight"] = ("BF16", (n, k))
            continue
        tensors[f"{module}.weight"] = ("U8", (n, k // 2))
        tensors[f"{module}.weight_scale"] = ("F8_E4M3", (n, k // 16))
        tensors[f"{module}.weight_scale_2"] = ("F32", ())
    files = {"config.json": json.dumps(dict(config))}
    if weights == "nvfp4":
        excluded = sorted({name.removesuffix(".weight") for name in kept if not name.endswith("norm.weight")})
        files = modelopt.config_files(config, dict.fromkeys(linears, W4A16), excluded, None)
    with disk_errors(folder):
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
        _write_shard(folder / "model.safetensors", tensors)


def _write_shard(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: not _is_small(item[0])):  # side by side
        begin, end = end, end + DTYPE_BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, entry in header.items():  # those that are written come first, one after the other
            if _is_small(name):
                file.write(_ONE[entry["dtype"]] * math.prod(entry["shape"]))
        file.truncate(start + end)


def _is_small(name: str) -> bool:
    """A norm, or a global scale."""
    return name.removesuffix(".weight").endswith(("norm", "_scale_2"))


def _linears(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Module -> [N, K] of what is quantized."""
    hidden, size = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    num_experts = config.get("num_experts", 0)
    width = config["moe_intermediate_size"] if num_experts else config["intermediate_size"]
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}"
        for name, shape in (("q", (q, hidden)), ("k", (kv, hidden)), ("v", (kv, hidden)), ("o", (hidden, q))):
            yield f"{base}.self_attn.{name}_proj", shape
        below = [f"{base}.mlp.experts.{i}" for i in range(num_experts)] or [f"{base}.mlp"]
        for mlp in below:
            yield f"{mlp}.gate_proj", (width, hidden)
            yield f"{mlp}.up_proj", (width, hidden)
            yield f"{mlp}.down_proj", (hidden, width)


def _kept(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensor -> shape of what stays in 16 bits."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}"
        yield f"{base}.input_layernorm.weight", (hidden,)
        yield f"{base}.post_attention_layernorm.weight", (hidden,)
        if config["model_type"] == "qwen3_moe":
            yield f"{base}.self_attn.q_norm.weight", (config["head_dim"],)
            yield f"{base}.self_attn.k_norm.weight", (config["head_dim"],)
            yield f"{base}.mlp.gate.weight", (config["num_experts"], hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def draw_weights(model: object, seed: int = 0) -> int:
    """Draws every matrix of a loaded hollow model anew, in place, and returns their bytes.

    Found are prepared weights, and tensors of two or more dimensions and floats that are zero throughout, wherever
    dataclasses, lists, tuples, mappings, modules of torch and the program's own objects hold them.
    """
    torch.manual_seed(seed)
    seen: set[int] = set()
    num_bytes = 0
    with torch.inference_mode():
        for part in _parts(model, set()):
            tensors = (part.packed, part.block_scale) if isinstance(part, PreparedWeight) else (part,)
            if tensors[0].data_ptr() in seen:  # a head that is the embedding
                continue
            seen.add(tensors[0].data_ptr())
            if isinstance(part, PreparedWeight):
                _draw_packed(part)
                num_bytes += part.num_bytes
            elif part.is_floating_point() and part.dim() > 1 and not part.any():
                part.normal_(0.0, part.shape[-1] ** -0.5)
                num_bytes += part.numel() * part.element_size()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # kernels read weights before they wait for the kernel ahead of them
    return num_bytes


def _draw_packed(weight: PreparedWeight) -> None:
    if len(weight.shape) == 2:
        plain = random_weight(weight.n, weight.k, weight.format, weight.dtype, weight.device)
        made = PREPARE[weight.layout](plain)
        weight.packed.copy_(made.packed)
        weight.block_scale.copy_(made.block_scale)
        weight.global_scale.copy_(made.global_scale.expand_as(weight.global_scale))
    elif weight.layout is Layout.ROW_MAJOR and weight.format == NVFP4:
        weight.packed.random_(0, 256)
        weight.block_scale.random_(*_STACK_SCALES)
        weight.global_scale.fill_(0.3 * weight.k**-0.5)
    else:
        raise UsageError(f"a stack of experts in {weight.layout.value} cannot be drawn", hint="use --random with NVFP4")


def _parts(value: object, walked: set[int]) -> Iterator[Tensor | PreparedWeight]:
    if isinstance(value, Tensor | PreparedWeight):
        yield value
        return
    if id(value) in walked or isinstance(value, str | bytes | int | float | type(None)):
        return
    walked.add(id(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside: list[object] = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, list | tuple):
        inside = list(value)
    elif isinstance(value, torch.nn.Module):
        inside = [*value.parameters(), *value.buffers(), *vars(value).values()]
    elif type(value).__module__.startswith("blockscale."):
        inside = list(vars(value).values())
    else:
        return
    for part in inside:
        yield from _parts(part, walked)
