"""Whole GGUF files, read back: every value in its place, codes and scales bit for bit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockscale.checkpoint.gguf_import import import_gguf
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.formats.packing import pack_nibbles
from tests.conversion.gguf_models import (
    EXPERTS,
    FEED_FORWARD,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    MODELS,
    NUM_TOKENS,
    add_byte_level_tokenizer,
)
from tests.conversion.gguf_reading import MakeModel, Quantized, decoded, neighbours, write


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_a_16bit_model_comes_back_through_the_importer(
    name: str, gguf_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The importer knows names by gguf's table and the model's skeleton, and undoes what converters do."""
    monkeypatch.setenv("BLOCKSCALE_CACHE", str(tmp_path / "cache"))
    folder = plain_rope(gguf_model(name), tmp_path / "model")
    write(folder, tmp_path / "model.gguf")
    again = import_gguf(tmp_path / "model.gguf")
    own = load_file(folder / "model.safetensors")
    other = load_file(again / "model.safetensors")
    assert own.keys() == other.keys()
    for key in own:
        if "norm" in key and name.startswith("gemma"):  # 1 + w is rounded to fp32, and w to bf16 on the way back
            assert torch.allclose(own[key].float(), other[key].float(), atol=1e-7)
        else:
            assert torch.equal(own[key], other[key]), key


def plain_rope(source: Path, target: Path) -> Path:
    """A copy without rotary scaling, some of which the importer refuses."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    for parameters in (config["rope_parameters"], *config["rope_parameters"].values()):
        if isinstance(parameters, dict) and "rope_type" in parameters:
            theta = parameters["rope_theta"]
            parameters.clear()
            parameters.update(rope_type="default", rope_theta=theta)
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("recipe", ["nvfp4-w4a16", "mxfp4"])
def test_codes_and_scales_of_a_llama_are_the_checkpoints_in_rotary_order(
    recipe: str, gguf_quantized: Quantized, tmp_path: Path
) -> None:
    folder = gguf_quantized("llama", recipe)
    checkpoint = open_checkpoint(folder)
    summary, file = write(folder, tmp_path / "x.gguf")
    kind = "NVFP4" if recipe.startswith("nvfp4") else "MXFP4"
    assert summary.num_weights == {kind: 14, "BF16": 2, "F32": 5}
    assert (summary.num_decoded, summary.notices) == (0, ())
    for i in range(2):
        ours, theirs = f"model.layers.{i}.", f"blk.{i}."
        for leaf, name, heads in (
            ("self_attn.q_proj", "attn_q", HEADS),
            ("self_attn.k_proj", "attn_k", KV_HEADS),
            ("self_attn.v_proj", "attn_v", 0),
            ("self_attn.o_proj", "attn_output", 0),
            ("mlp.gate_proj", "ffn_gate", 0),
            ("mlp.up_proj", "ffn_up", 0),
            ("mlp.down_proj", "ffn_down", 0),
        ):
            expected = decoded(checkpoint, ours + leaf)
            expected = neighbours(expected, heads) if heads else expected
            assert file.kinds[f"{theirs}{name}.weight"] == kind
            assert torch.equal(file.weight(theirs + name), expected), name
            assert (f"{theirs}{name}.scale" in file.values) == (kind == "NVFP4")
    assert torch.equal(file.values["token_embd.weight"], decoded(checkpoint, "model.embed_tokens"))
    assert torch.equal(file.values["output.weight"], decoded(checkpoint, "lm_head"))


def test_global_and_input_scales_are_copied(gguf_golden: MakeModel, tmp_path: Path) -> None:
    folder = gguf_golden("modelopt_llama_nvfp4")
    stored = load_file(folder / "model.safetensors")
    _, file = write(folder, tmp_path / "x.gguf")
    module = "model.layers.1.mlp.down_proj"
    for ours, theirs in (("weight_scale_2", "scale"), ("input_scale", "input_scale")):
        assert file.values[f"blk.1.ffn_down.{theirs}"].tolist() == [stored[f"{module}.{ours}"].item()]
    assert "general.tensor_extra.name" not in file.fields


def test_a_scale_of_one_is_written_too(gguf_golden: MakeModel, tmp_path: Path) -> None:
    folder = gguf_golden("modelopt_llama_nvfp4")
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.0.mlp.down_proj.weight_scale_2"] = torch.tensor(1.0)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    _, file = write(folder, tmp_path / "x.gguf")
    assert file.values["blk.0.ffn_down.scale"].tolist() == [1.0]


@pytest.mark.parametrize(
    "name",
    ["ct_llama_nvfp4", "ct_llama_nvfp4a16", "modelopt_llama_w4a16_nvfp4", "ct_llama_mxfp4", "modelopt_llama_nvfp4"],
)
def test_checkpoints_of_the_peers_are_copied_exactly(name: str, gguf_golden: MakeModel, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(gguf_golden(name))
    _, file = write(gguf_golden(name), tmp_path / "x.gguf")
    for leaf, slot in (("mlp.gate_proj", "ffn_gate"), ("self_attn.o_proj", "attn_output")):
        assert torch.equal(file.weight(f"blk.1.{slot}"), decoded(checkpoint, f"model.layers.1.{leaf}"))


def test_experts_are_stacked_with_a_scale_each(gguf_golden: MakeModel, tmp_path: Path) -> None:
    folder = gguf_golden("modelopt_qwen3moe_nvfp4")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "norm_topk_prob": True}))
    checkpoint = open_checkpoint(folder)
    _, file = write(folder, tmp_path / "x.gguf")
    count = config["num_local_experts"]
    for leaf, name in (("gate_proj", "ffn_gate_exps"), ("up_proj", "ffn_up_exps")):
        modules = [f"model.layers.0.mlp.experts.{e}.{leaf}" for e in range(count)]
        assert file.values[f"blk.0.{name}.scale"].shape == (count,)
        assert len(set(file.values[f"blk.0.{name}.scale"].tolist())) > 1
        assert torch.equal(file.weight(f"blk.0.{name}"), torch.stack([decoded(checkpoint, m) for m in modules]))
        assert file.values[f"blk.0.{name}.input_scale"].shape == (count,)
    down = [decoded(checkpoint, f"model.layers.0.mlp.experts.{e}.down_proj") for e in range(count)]  # of 32 columns
    assert torch.equal(file.values["blk.0.ffn_down_exps.weight"], torch.stack(down).bfloat16().float())
    assert file.kinds["blk.0.ffn_gate_inp.weight"] == "F32"
    assert file.fields["qwen3moe.expert_count"] == count
    assert file.fields["qwen3moe.expert_used_count"] == config["num_experts_per_tok"]
    assert file.fields["qwen3moe.expert_feed_forward_length"] == config["moe_intermediate_size"]


def test_mixtrals_experts_go_by_their_roles(gguf_quantized: Quantized, tmp_path: Path) -> None:
    folder = gguf_quantized("mixtral", "nvfp4-w4a16")
    checkpoint = open_checkpoint(folder)
    _, file = write(folder, tmp_path / "x.gguf")
    for leaf, name in (("w1", "ffn_gate_exps"), ("w3", "ffn_up_exps"), ("w2", "ffn_down_exps")):
        modules = [f"model.layers.1.block_sparse_moe.experts.{e}.{leaf}" for e in range(EXPERTS)]
        assert torch.equal(file.weight(f"blk.1.{name}"), torch.stack([decoded(checkpoint, m) for m in modules]))


def test_qwen2_is_written_as_llama_where_scales_need_it(gguf_quantized: Quantized, tmp_path: Path) -> None:
    folder = gguf_quantized("qwen2", "nvfp4-w4a16")
    checkpoint = open_checkpoint(folder)
    summary, file = write(folder, tmp_path / "x.gguf")
    assert summary.architecture == file.fields["general.architecture"] == "llama"
    assert "architecture 'llama'" in summary.notices[0]
    for leaf, heads in (("q", HEADS), ("k", KV_HEADS)):
        module = f"model.layers.0.self_attn.{leaf}_proj"
        assert torch.equal(file.weight(f"blk.0.attn_{leaf}"), neighbours(decoded(checkpoint, module), heads))
        bias = checkpoint.kept[f"{module}.bias"].read().float()
        assert torch.equal(file.values[f"blk.0.attn_{leaf}.bias"], neighbours(bias, heads))
    assert "output.weight" not in file.values  # tied
    assert write(gguf_quantized("qwen2", "mxfp4"), tmp_path / "y.gguf")[0].architecture == "qwen2"


def test_phi3s_fused_weights_are_split_by_rows(gguf_quantized: Quantized, tmp_path: Path) -> None:
    folder = gguf_quantized("phi3", "nvfp4-w4a16")
    checkpoint = open_checkpoint(folder)
    summary, file = write(folder, tmp_path / "x.gguf")
    assert summary.architecture == "llama"
    qkv = decoded(checkpoint, "model.layers.1.self_attn.qkv_proj")
    q, k, v = qkv.split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM])
    assert torch.equal(file.weight("blk.1.attn_q"), neighbours(q, HEADS))
    assert torch.equal(file.weight("blk.1.attn_k"), neighbours(k, KV_HEADS))
    assert torch.equal(file.weight("blk.1.attn_v"), v)
    gate, up = decoded(checkpoint, "model.layers.1.mlp.gate_up_proj").chunk(2)
    assert torch.equal(file.weight("blk.1.ffn_gate"), gate)
    assert torch.equal(file.weight("blk.1.ffn_up"), up)
    partial, file = write(gguf_quantized("phi3-partial", "nvfp4-w4a16"), tmp_path / "y.gguf")
    assert partial.architecture == "phi3"  # llama's graph turns whole heads
    assert file.kinds["blk.0.ffn_up.weight"] == "NVFP4"
    assert file.kinds["blk.0.ffn_down.weight"] == "BF16"


def write_gpt_oss_as_published(source: Path, target: Path) -> tuple[Path, dict[str, Tensor]]:
    """Its experts as MXFP4 blocks and scales, and the bf16 weights [E, rows, K] that those stand for."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(11)
    meant = {}
    for i in range(2):
        for leaf in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{i}.mlp.experts.{leaf}"
            experts, columns, rows = tensors.pop(name).shape
            codes = torch.randint(0, 16, (experts, rows, columns), generator=generator).to(torch.uint8)
            scales = torch.randint(118, 124, (experts, rows, columns // 32), generator=generator).to(torch.uint8)
            tensors[f"{name}_blocks"] = pack_nibbles(codes).view(experts, rows, columns // 32, 16)
            tensors[f"{name}_scales"] = scales
            table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
            meant[name] = table[codes.long()] * (2.0 ** (scales.float() - 127)).repeat_interleave(32, -1)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (target / "config.json").write_text(json.dumps(config))
    return target, meant


def test_gpt_oss_keeps_its_own_mxfp4(gguf_model: MakeModel, tmp_path: Path) -> None:
    folder, meant = write_gpt_oss_as_published(gguf_model("gpt_oss"), tmp_path / "model")
    kept = load_file(folder / "model.safetensors")
    summary, file = write(folder, tmp_path / "x.gguf")
    assert summary.num_weights["MXFP4"] == 6
    for i in range(2):
        stem = f"model.layers.{i}.mlp.experts."
        gate_up, bias = meant[f"{stem}gate_up_proj"], kept[f"{stem}gate_up_proj_bias"].float()
        for name, start in (("gate", 0), ("up", 1)):
            assert torch.equal(file.values[f"blk.{i}.ffn_{name}_exps.weight"], gate_up[:, start::2])
            assert torch.equal(file.values[f"blk.{i}.ffn_{name}_exps.bias"], bias[:, start::2])
        assert torch.equal(file.values[f"blk.{i}.ffn_down_exps.weight"], meant[f"{stem}down_proj"])
        sinks = kept[f"model.layers.{i}.self_attn.sinks"].float()
        assert torch.equal(file.values[f"blk.{i}.attn_sinks.weight"], sinks)
    assert file.fields["gpt-oss.attention.sliding_window_pattern"] == [True, False]
    assert "general.tensor_extra.name" not in file.fields


def test_every_model_is_written_in_every_recipe(gguf_quantized: Quantized, tmp_path: Path) -> None:
    for name in MODELS:
        summary, file = write(gguf_quantized(name, "nvfp4-w4a16"), tmp_path / f"{name}.gguf")
        assert summary.num_weights["NVFP4"] > 0
        for tensor, kind in file.kinds.items():
            values = file.values[tensor]
            assert torch.isfinite(values).all()
            if kind == "NVFP4" and "exps" not in tensor:
                assert values.shape[-1] % 64 == 0


def test_a_vision_model_is_written_without_its_tower(tmp_path: Path) -> None:
    import transformers

    text = {
        "vocab_size": NUM_TOKENS,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "query_pre_attn_scalar": HEAD_DIM,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    vision = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    vision |= {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, image_token_index=127)
    transformers.Gemma3ForConditionalGeneration(config).bfloat16().save_pretrained(tmp_path / "model")
    add_byte_level_tokenizer(tmp_path / "model")
    summary, file = write(tmp_path / "model", tmp_path / "x.gguf")
    assert summary.architecture == "gemma3"
    assert "vision tower are left out" in summary.notices[0]
    assert not [name for name in file.values if "vision" in name]
    assert file.values["token_embd.weight"].shape == (NUM_TOKENS, HIDDEN)


def test_experts_stacked_in_the_checkpoint_give_the_same_file(gguf_model: MakeModel, tmp_path: Path) -> None:
    source = gguf_model("qwen3_moe")
    folder = shutil.copytree(source, tmp_path / source.name)
    tensors = load_file(folder / "model.safetensors")
    for i in range(2):
        stem = f"model.layers.{i}.mlp.experts"
        leaves = {
            leaf: torch.stack([tensors.pop(f"{stem}.{e}.{leaf}_proj.weight") for e in range(EXPERTS)])
            for leaf in ("gate", "up", "down")
        }
        tensors[f"{stem}.gate_up_proj"] = torch.cat((leaves["gate"], leaves["up"]), dim=1)
        tensors[f"{stem}.down_proj"] = leaves["down"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write(source, tmp_path / "apart.gguf")
    write(folder, tmp_path / "stacked.gguf")
    assert (tmp_path / "apart.gguf").read_bytes() == (tmp_path / "stacked.gguf").read_bytes()
