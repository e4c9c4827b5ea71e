"""Small GGUF files as llama.cpp's converter lays them out, with the weights that they stand for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

HIDDEN, FEED_FORWARD, LAYERS, HEADS, KV_HEADS = 64, 96, 2, 4, 2
TOKENS = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "▁", "ab", "▁a"]


@dataclass(frozen=True)
class Stored:
    """A tensor of the file: its name there, and the shape of the model's own."""

    name: str
    shape: tuple[int, ...]
    num_heads: int = 0  # of a rotary projection


def llama_tensors(*, is_tied: bool = False) -> dict[str, Stored]:
    """By the model's names."""
    vocabulary, head = len(TOKENS), HIDDEN // HEADS
    result = {
        "model.embed_tokens.weight": Stored("token_embd.weight", (vocabulary, HIDDEN)),
        "model.norm.weight": Stored("output_norm.weight", (HIDDEN,)),
    }
    if not is_tied:
        result["lm_head.weight"] = Stored("output.weight", (vocabulary, HIDDEN))
    for i in range(LAYERS):
        ours, theirs = f"model.layers.{i}.", f"blk.{i}."
        result |= {
            f"{ours}self_attn.q_proj.weight": Stored(f"{theirs}attn_q.weight", (HEADS * head, HIDDEN), HEADS),
            f"{ours}self_attn.k_proj.weight": Stored(f"{theirs}attn_k.weight", (KV_HEADS * head, HIDDEN), KV_HEADS),
            f"{ours}self_attn.v_proj.weight": Stored(f"{theirs}attn_v.weight", (KV_HEADS * head, HIDDEN)),
            f"{ours}self_attn.o_proj.weight": Stored(f"{theirs}attn_output.weight", (HIDDEN, HEADS * head)),
            f"{ours}mlp.gate_proj.weight": Stored(f"{theirs}ffn_gate.weight", (FEED_FORWARD, HIDDEN)),
            f"{ours}mlp.up_proj.weight": Stored(f"{theirs}ffn_up.weight", (FEED_FORWARD, HIDDEN)),
            f"{ours}mlp.down_proj.weight": Stored(f"{theirs}ffn_down.weight", (HIDDEN, FEED_FORWARD)),
            f"{ours}input_layernorm.weight": Stored(f"{theirs}attn_norm.weight", (HIDDEN,)),
            f"{ours}post_attention_layernorm.weight": Stored(f"{theirs}ffn_norm.weight", (HIDDEN,)),
        }
    return result


def phi3_tensors() -> dict[str, Stored]:
    """An architecture with fused projections, which is not read directly."""
    vocabulary, head = len(TOKENS), HIDDEN // HEADS
    result = {
        "model.embed_tokens.weight": Stored("token_embd.weight", (vocabulary, HIDDEN)),
        "model.norm.weight": Stored("output_norm.weight", (HIDDEN,)),
        "lm_head.weight": Stored("output.weight", (vocabulary, HIDDEN)),
    }
    for i in range(LAYERS):
        ours, theirs = f"model.layers.{i}.", f"blk.{i}."
        result |= {
            f"{ours}self_attn.qkv_proj.weight": Stored(
                f"{theirs}attn_qkv.weight", ((HEADS + 2 * KV_HEADS) * head, HIDDEN)
            ),
            f"{ours}self_attn.o_proj.weight": Stored(f"{theirs}attn_output.weight", (HIDDEN, HEADS * head)),
            f"{ours}mlp.gate_up_proj.weight": Stored(f"{theirs}ffn_up.weight", (2 * FEED_FORWARD, HIDDEN)),
            f"{ours}mlp.down_proj.weight": Stored(f"{theirs}ffn_down.weight", (HIDDEN, FEED_FORWARD)),
            f"{ours}input_layernorm.weight": Stored(f"{theirs}attn_norm.weight", (HIDDEN,)),
            f"{ours}post_attention_layernorm.weight": Stored(f"{theirs}ffn_norm.weight", (HIDDEN,)),
        }
    return result


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """As the converter writes rotary projections: of a head's rows, the two halves take turns."""
    head = weight.shape[0] // num_heads
    order = [h * head + half * (head // 2) + i for h in range(num_heads) for i in range(head // 2) for half in (0, 1)]
    return weight[order]


def write_gguf(
    path: Path,
    stored: Mapping[str, Stored],
    *,
    architecture: str = "llama",
    matrix_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: Mapping[str, np.ndarray] | None = None,
    has_tokenizer: bool = True,
    metadata: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> dict[str, Tensor]:
    """Writes the file and returns the bf16 weights it stands for, by the model's names.

    Matrices are stored as `matrix_type`, vectors as fp32."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(TOKENS))
    if has_tokenizer:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(TOKENS)
        writer.add_token_scores([-float(i) for i in range(len(TOKENS))])
        writer.add_token_types([2, 3, 3] + [1] * (len(TOKENS) - 3))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_pad_token_id(2)
    metadata(writer)
    weights = {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in stored.items():
        weight = torch.randn(tensor.shape, generator=generator).bfloat16()
        array = weight.float().numpy()
        if tensor.num_heads:
            array = permuted(array, tensor.num_heads)
        if array.ndim > 1 and matrix_type != gguf.GGMLQuantizationType.F32:
            packed = gguf.quants.quantize(array, matrix_type)
            writer.add_tensor(tensor.name, packed, raw_dtype=matrix_type)
            array = gguf.quants.dequantize(packed, matrix_type)
            if tensor.num_heads:  # whole rows are permuted: back by the inverse of the order
                inverse = np.argsort(permuted(np.arange(len(array)), tensor.num_heads))
                array = array[inverse]
            weight = torch.from_numpy(array.copy()).bfloat16()
        else:
            writer.add_tensor(tensor.name, np.ascontiguousarray(array))
        weights[name] = weight
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights
