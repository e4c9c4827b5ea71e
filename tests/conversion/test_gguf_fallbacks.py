"""What a GGUF file cannot hold as it is stored, or llama.cpp would not compute with: folded or decoded, and said."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockscale import api
from blockscale.checkpoint.reader import open_checkpoint
from tests.conversion.gguf_models import (
    HEADS,
    add_byte_level_tokenizer,
)
from tests.conversion.gguf_reading import MakeModel, Quantized, decoded, neighbours, write


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_gemmas_norm_takes_in_the_scale_that_its_graph_ignores(
    name: str, gguf_quantized: Quantized, tmp_path: Path
) -> None:
    folder = gguf_quantized(name, "nvfp4-w4a16")
    checkpoint = open_checkpoint(folder)
    summary, file = write(folder, tmp_path / "x.gguf")
    for i in range(2):
        norm = 1 + checkpoint.kept[f"model.layers.{i}.pre_feedforward_layernorm.weight"].read().float()
        factor = file.values[f"blk.{i}.ffn_norm.weight"].double() / norm
        assert factor.max() - factor.min() < 1e-6 * factor.mean()
        for leaf in ("gate", "up"):
            assert f"blk.{i}.ffn_{leaf}.scale" not in file.values
            assert file.kinds[f"blk.{i}.ffn_{leaf}.weight"] == "NVFP4"
            product = file.values[f"blk.{i}.ffn_{leaf}.weight"].double() * factor.mean()
            expected = decoded(checkpoint, f"model.layers.{i}.mlp.{leaf}_proj").double()
            assert torch.allclose(product, expected, rtol=1e-6, atol=0)
        down = decoded(checkpoint, f"model.layers.{i}.mlp.down_proj")
        assert torch.equal(file.values[f"blk.{i}.ffn_down.weight"], down.bfloat16().float())
        assert torch.equal(file.weight(f"blk.{i}.attn_q"), decoded(checkpoint, f"model.layers.{i}.self_attn.q_proj"))
        other = 1 + checkpoint.kept[f"model.layers.{i}.input_layernorm.weight"].read().float()
        assert torch.equal(file.values[f"blk.{i}.attn_norm.weight"], other)
    assert [n for n in summary.notices if "ignores their global scale (blk.0.ffn_down" in n]


def test_gemmas_scales_without_room_are_decoded(gguf_quantized: Quantized, tmp_path: Path) -> None:
    folder = shutil.copytree(gguf_quantized("gemma3", "nvfp4-w4a16"), tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    key = next(k for k in stored if k.startswith("model.layers.0.mlp.gate_proj") and k.endswith("weight_scale"))
    stored[key].view(torch.uint8)[0, 0] = 1  # the smallest subnormal
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(folder)
    summary, file = write(folder, tmp_path / "x.gguf")
    assert file.kinds["blk.0.ffn_gate.weight"] == file.kinds["blk.0.ffn_up.weight"] == "BF16"
    assert file.kinds["blk.1.ffn_gate.weight"] == "NVFP4"
    expected = decoded(checkpoint, "model.layers.0.mlp.up_proj").bfloat16().float()
    assert torch.equal(file.values["blk.0.ffn_up.weight"], expected)
    norm = 1 + checkpoint.kept["model.layers.0.pre_feedforward_layernorm.weight"].read().float()
    assert torch.equal(file.values["blk.0.ffn_norm.weight"], norm)
    assert "4 quantized weights" in summary.notices[0]


def test_gpt_oss_in_nvfp4_has_experts_without_codes(gguf_quantized: Quantized, tmp_path: Path) -> None:
    summary, file = write(gguf_quantized("gpt_oss", "nvfp4-w4a16"), tmp_path / "x.gguf")
    assert file.kinds["blk.0.attn_q.weight"] == "NVFP4"
    assert file.kinds["blk.0.ffn_gate_exps.weight"] == "BF16"
    assert "graph of 'gpt-oss' ignores their global scale" in summary.notices[0]


def test_a_bias_that_would_be_scaled_keeps_its_weight_from_4_bits(gguf_quantized: Quantized, tmp_path: Path) -> None:
    folder = gguf_quantized("llama-biases", "nvfp4-w4a16")
    checkpoint = open_checkpoint(folder)
    summary, file = write(folder, tmp_path / "x.gguf")
    assert "would add their bias before it scales (blk.0.ffn_gate" in summary.notices[0]
    assert file.kinds["blk.0.attn_q.weight"] == "NVFP4"  # where the bias comes after the scale
    bias = checkpoint.kept["model.layers.0.self_attn.q_proj.bias"].read().float()
    assert torch.equal(file.values["blk.0.attn_q.bias"], neighbours(bias, HEADS))
    gate = decoded(checkpoint, "model.layers.0.mlp.gate_proj").bfloat16().float()
    assert torch.equal(file.values["blk.0.ffn_gate.weight"], gate)


def test_columns_that_fill_no_block_are_decoded(gguf_model: MakeModel, tmp_path: Path) -> None:
    """A feed-forward width of 96 is a multiple of 16, not of 64."""
    import transformers

    config = json.loads((gguf_model("llama") / "config.json").read_text())
    config["intermediate_size"] = 96
    small = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).bfloat16()
    small.save_pretrained(tmp_path / "model")
    add_byte_level_tokenizer(tmp_path / "model")
    api.quantize(tmp_path / "model", tmp_path / "q", "nvfp4-w4a16")
    summary, file = write(tmp_path / "q", tmp_path / "x.gguf", kept="q8_0")
    assert file.kinds["blk.0.ffn_down.weight"] == "Q8_0"
    assert file.kinds["blk.0.ffn_up.weight"] == "NVFP4"
    (notice,) = summary.notices
    assert summary.num_decoded == 2
    assert "2 quantized weights are decoded to Q8_0: 96 columns are no multiple of GGML's 64" in notice


def test_awqs_input_scales_go_into_the_decoded_columns(gguf_golden: MakeModel, tmp_path: Path) -> None:
    folder = gguf_golden("modelopt_llama_nvfp4_awq_lite")
    checkpoint = open_checkpoint(folder)
    summary, file = write(folder, tmp_path / "x.gguf")
    module = "model.layers.0.self_attn.o_proj"
    scale = load_file(folder / "model.safetensors")[f"{module}.pre_quant_scale"].float()
    expected = (decoded(checkpoint, module) * scale).bfloat16().float()
    assert torch.equal(file.values["blk.0.attn_output.weight"], expected)
    assert "pre_quant_scale" in summary.notices[0]


@pytest.mark.parametrize("name", ["ct_llama_fp8_dynamic", "modelopt_llama_fp8", "modelopt_llama_w4a8_nvfp4_fp8"])
def test_what_ggml_lacks_is_decoded(name: str, gguf_golden: MakeModel, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(gguf_golden(name))
    summary, file = write(gguf_golden(name), tmp_path / "x.gguf")
    assert summary.notices[0].startswith("14 quantized weights are decoded to BF16: GGML has no ")
    expected = decoded(checkpoint, "model.layers.0.mlp.down_proj").bfloat16().float()
    assert torch.equal(file.values["blk.0.ffn_down.weight"], expected)


def test_a_mixed_checkpoint_is_written_layer_by_layer(gguf_golden: MakeModel, tmp_path: Path) -> None:
    summary, file = write(gguf_golden("modelopt_llama_mixed_fp8attn_nvfp4mlp_fp8kv"), tmp_path / "x.gguf")
    assert file.kinds["blk.0.attn_q.weight"] == "BF16"
    assert file.kinds["blk.0.ffn_up.weight"] == "NVFP4"
    assert any("key-value cache" in notice for notice in summary.notices)


@pytest.mark.parametrize(("kept", "kind"), [("bf16", "BF16"), ("f16", "F16"), ("q8_0", "Q8_0"), (None, "BF16")])
def test_kept_matrices_become_what_is_asked_for(
    kept: str | None, kind: str, gguf_model: MakeModel, tmp_path: Path
) -> None:
    summary, file = write(gguf_model("qwen3"), tmp_path / "x.gguf", kept=kept)
    assert summary.num_weights == {kind: 16, "F32": 9}
    assert file.kinds["blk.0.attn_q_norm.weight"] == "F32"


def test_a_half_precision_model_stays_so(gguf_model: MakeModel, tmp_path: Path) -> None:
    folder = shutil.copytree(gguf_model("llama"), tmp_path / "model")
    tensors = {k: v.half() for k, v in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    _, file = write(folder, tmp_path / "x.gguf")
    assert file.kinds["blk.0.ffn_up.weight"] == "F16"
    assert torch.equal(file.values["blk.0.ffn_up.weight"], tensors["model.layers.0.mlp.up_proj.weight"].float())
