"""What a GGUF file says of its model."""

from pathlib import Path

import pytest
import torch

from tests.conversion.gguf_models import (
    FEED_FORWARD,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    NUM_TOKENS,
    TEMPLATE,
)
from tests.conversion.gguf_reading import MakeModel, Quantized, write


def test_the_file_says_what_llama_cpp_needs(gguf_quantized: Quantized, tmp_path: Path) -> None:
    summary, file = write(gguf_quantized("llama", "nvfp4-w4a16"), tmp_path / "x.gguf")
    expected = {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "llama-nvfp4-w4a16",
        "general.file_type": 39,
        "general.quantization_version": 2,
        "llama.block_count": 2,
        "llama.context_length": 512,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FEED_FORWARD,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.key_length": HEAD_DIM,
        "llama.attention.value_length": HEAD_DIM,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.rope.freq_base": 10_000.0,
        "llama.vocab_size": NUM_TOKENS,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.chat_template": TEMPLATE,
        "tokenizer.ggml.add_bos_token": False,
    }
    assert {key: file.fields[key] for key in expected} == expected
    assert file.fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    assert len(file.fields["tokenizer.ggml.tokens"]) == NUM_TOKENS
    assert summary.num_bytes == (tmp_path / "x.gguf").stat().st_size


def test_weights_only_linears_keep_wide_activations(gguf_quantized: Quantized, tmp_path: Path) -> None:
    _, file = write(gguf_quantized("qwen3", "nvfp4-w4a16"), tmp_path / "x.gguf")
    names = file.fields["general.tensor_extra.name"]
    assert len(names) == 14
    assert {file.kinds[name] for name in names} == {"NVFP4"}
    assert file.fields["general.tensor_extra.prec_a4"] == [False] * 14


def test_llama3s_rotary_factors_are_those_of_transformers(gguf_model: MakeModel, tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.from_pretrained(gguf_model("llama"))
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    _, file = write(gguf_model("llama"), tmp_path / "x.gguf")
    factors = file.values["rope_freqs.weight"]
    assert factors.max() == 4
    assert factors.min() == 1
    assert torch.allclose(factors.double(), plain / stretched.double(), rtol=1e-6)


def test_other_rotary_scalings_are_said_in_metadata(gguf_model: MakeModel, tmp_path: Path) -> None:
    linear = write(gguf_model("llama-linear-rope"), tmp_path / "a.gguf")[1].fields
    assert (linear["llama.rope.scaling.type"], linear["llama.rope.scaling.factor"]) == ("linear", 4.0)
    yarn = write(gguf_model("qwen2-yarn"), tmp_path / "b.gguf")[1].fields
    assert (yarn["qwen2.rope.scaling.type"], yarn["qwen2.rope.scaling.factor"]) == ("yarn", 4.0)
    assert yarn["qwen2.rope.scaling.original_context_length"] == 128
    gemma = write(gguf_model("gemma3"), tmp_path / "c.gguf")[1].fields
    assert (gemma["gemma3.rope.freq_base"], gemma["gemma3.rope.freq_base_swa"]) == (100_000.0, 10_000.0)
    assert gemma["gemma3.rope.scaling.factor"] == 8.0
    assert gemma["gemma3.attention.sliding_window_pattern"] == [False, True]
    long = write(gguf_model("phi3-longrope"), tmp_path / "d.gguf")[1]
    assert long.fields["phi3.rope.scaling.attn_factor"] == pytest.approx(1.224745, rel=1e-6)
    assert long.values["rope_factors_long.weight"][1] == 1.5
    assert long.values["rope_factors_short.weight"][1] == pytest.approx(1.1)
