"""MXFP4 checkpoints and gpt-oss as NVFP4, and what cannot be cast."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.files import GOLDEN, changed, same
from checkpoint.files import tensors as read_tensors
from checkpoint.loader_rules import ENGINES
from checkpoint.tiny_int4 import AWQ, awq_parts, draw_linear
from faults.raw import split
from torch import Tensor

from blockscale import api
from blockscale.checkpoint.linear import W4A16, W8A8_DYNAMIC
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.errors import CheckpointError
from blockscale.host.model import load_model
from blockscale.quantization.recipe import Recipe, Rule

from .folders import config, linears, others, write
from .stored import E2M1

Find = Callable[[str], Path]
MODELOPT, CT = "modelopt", "compressed-tensors"
MXFP4 = GOLDEN / "ct_llama_mxfp4"


def schemes(folder: Path) -> dict[str, Any]:
    quantized = open_checkpoint(folder).quantized
    assert quantized is not None
    return {name: linear.scheme for name, linear in quantized.linears.items()}


@pytest.fixture(params=[MODELOPT, CT])
def to(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("source_dialect", [MODELOPT, CT])
def test_values_and_codes_stay(source_dialect: str, to: str, tmp_path: Path) -> None:
    """Bit for bit, from either dialect to either; fused weights share their global scale; engines take it."""
    source = MXFP4
    if source_dialect == MODELOPT:
        api.convert(MXFP4, tmp_path / "mxfp4", MODELOPT)
        source = tmp_path / "mxfp4"
    summary = api.convert(source, tmp_path / "out", to, format="nvfp4")
    assert (summary.exact, summary.errors, summary.num_linears) == (True, {}, 14)
    assert "activations that were MXFP4 stay in 16 bits" in summary.notices[0]
    before, after = linears(MXFP4), linears(tmp_path / "out")
    assert before.keys() == after.keys()
    for module, linear in after.items():
        assert torch.equal(linear.value, before[module].value)
        assert same(linear.packed, before[module].packed)
        assert linear.block_scale.dtype == torch.float8_e4m3fn
        assert linear.multipliers.keys() == {"global_scale"}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for group in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            assert len({after[f"{prefix}.{leaf}"].multipliers["global_scale"] for leaf in group}) == 1
    assert set(schemes(tmp_path / "out").values()) == {W4A16}
    assert all(same(tensor, others(MXFP4)[n]) for n, tensor in others(tmp_path / "out").items())
    takers = ("vLLM", "SGLang", "TensorRT-LLM") if to == MODELOPT else ("vLLM", "SGLang")
    for engine in takers:
        methods = ENGINES[engine](tmp_path / "out", GOLDEN / "base_llama")
        assert set(methods.values()) == {"NONE", "W4A16_NVFP4" if to == MODELOPT else "CT_NVFP4A16"}


def test_logits_stay(to: str, tmp_path: Path) -> None:
    api.convert(MXFP4, tmp_path / "out", to, format="nvfp4")
    ids = torch.arange(64).view(2, -1)
    first, second = (load_model(path, emulate_activations=False).logits(ids) for path in (MXFP4, tmp_path / "out"))
    assert torch.equal(first, second)


def test_a_group_in_several_shards(tmp_path: Path) -> None:
    source = changed("ct_llama_mxfp4", tmp_path)
    split(source, 5)
    api.convert(source, tmp_path / "out", MODELOPT, format="nvfp4")
    api.convert(MXFP4, tmp_path / "whole", MODELOPT, format="nvfp4")
    first, second = read_tensors(tmp_path / "out"), read_tensors(tmp_path / "whole")
    assert first.keys() == second.keys()
    assert all(same(tensor, second[n]) for n, tensor in first.items())


def test_a_spread_that_e4m3_cannot_hold_is_reported(to: str, tmp_path: Path) -> None:
    """gate and up share a global scale; blocks of up lie 2^30 below the largest of gate."""

    def spread(content: dict[str, Tensor]) -> None:
        content["model.layers.1.mlp.up_proj.weight_scale"] -= 30

    source = changed("ct_llama_mxfp4", tmp_path, tensors=spread)
    summary = api.convert(source, tmp_path / "out", to, format="nvfp4")
    assert not summary.exact
    assert summary.errors.keys() == {"model.layers.1.mlp.up_proj"}
    before, after = linears(source), linears(tmp_path / "out")
    for module, linear in after.items():
        difference = (linear.value - before[module].value).square().sum()
        error = (difference / before[module].value.square().sum()).sqrt().item()
        assert summary.errors.get(module, 0.0) == pytest.approx(error, rel=1e-6)
    assert json.loads((tmp_path / "out" / "blockscale.json").read_text())["errors"] == summary.errors


def test_other_formats_of_a_mixed_checkpoint_stay(tmp_path: Path, golden_checkpoint: Find) -> None:
    rules = (Rule("*.self_attn.*", weight="fp8-channel", activation="fp8-token"),)
    api.quantize(golden_checkpoint("base_llama"), tmp_path / "q", Recipe("m", "mxfp4", rules=rules, dialect=CT))
    summary = api.convert(tmp_path / "q", tmp_path / "out", CT, format="nvfp4")
    assert summary.exact
    found = schemes(tmp_path / "out")
    assert {s for n, s in found.items() if "self_attn" in n} == {W8A8_DYNAMIC}
    assert {s for n, s in found.items() if "mlp" in n} == {W4A16}
    before, after = read_tensors(tmp_path / "q"), read_tensors(tmp_path / "out")
    attention = [n for n in before if "self_attn" in n]
    assert len(attention) == 16
    assert all(same(before[n], after[n]) for n in attention)
    assert all(torch.equal(x.value, linears(tmp_path / "q")[n].value) for n, x in linears(tmp_path / "out").items())


# ---------------------------------------------------------------- gpt-oss


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory, tiny_model: Find) -> Path:
    """A tiny gpt-oss as it is released: experts in blocks and scales, biases and everything else in bf16."""
    folder = Path(shutil.copytree(tiny_model("gpt_oss"), tmp_path_factory.mktemp("oss") / "gpt_oss"))
    content = read_tensors(folder)
    generator = torch.Generator().manual_seed(8)
    for name in [n for n in content if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, k, n = content.pop(name).shape
        content[f"{name}_blocks"] = torch.randint(0, 256, (experts, n, k // 32, 16), generator=generator).byte()
        content[f"{name}_scales"] = torch.randint(118, 124, (experts, n, k // 32), generator=generator).byte()
    settings = {**config(folder), "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}}
    shutil.rmtree(folder)
    return write(folder, content, settings)


def test_gpt_oss_keeps_every_value(gpt_oss: Path, tmp_path: Path) -> None:
    """Stacks in the model's orientation, rows of gate and up interleaved as they were, biases untouched."""
    summary = api.convert(gpt_oss, tmp_path / "out", MODELOPT)
    assert (summary.exact, summary.num_linears) == (True, 4)
    source, found, stacks = read_tensors(gpt_oss), read_tensors(tmp_path / "out"), linears(tmp_path / "out")
    assert len(stacks) == 4
    for name, stack in stacks.items():
        blocks, scales = source[f"{name}_blocks"], source[f"{name}_scales"]
        codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # [E, N, K/32, 32]
        value = E2M1[codes.long()] * 2.0 ** (scales.double().unsqueeze(-1) - 127)
        assert torch.equal(stack.value, value.flatten(-2))
        assert same(stack.packed, blocks.flatten(-2))
        assert found[name].shape == (blocks.shape[0], blocks.shape[2] * 16, blocks.shape[1])  # [E, K/2, N]
    biases = [n for n in source if n.endswith("_bias")]
    assert len(biases) == 4
    plain = [n for n in source if not n.endswith(("_blocks", "_scales"))]
    assert all(same(found[n], source[n]) for n in plain)
    settings = config(tmp_path / "out")["quantization_config"]
    assert (settings["quant_method"], settings["quant_algo"]) == (MODELOPT, "W4A16_NVFP4")
    assert set(schemes(tmp_path / "out").values()) == {W4A16}


def test_gpt_oss_answers_as_before(gpt_oss: Path, tmp_path: Path) -> None:
    api.convert(gpt_oss, tmp_path / "out", MODELOPT)
    ids = torch.arange(48).view(2, -1)
    first, second = (load_model(path, emulate_activations=False).logits(ids) for path in (gpt_oss, tmp_path / "out"))
    assert first.abs().max() > 0.1
    assert torch.allclose(first, second, rtol=0, atol=1e-5 * first.abs().max())


def test_gpt_oss_has_no_place_in_compressed_tensors(gpt_oss: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no stacks of experts"):
        api.convert(gpt_oss, tmp_path / "out", CT)
    assert not (tmp_path / "out").exists()


def test_a_scale_that_is_nan(gpt_oss: Path, tmp_path: Path) -> None:
    content = read_tensors(gpt_oss)
    name = next(n for n in content if n.endswith("down_proj_scales"))
    content[name][1, 2, 0] = 255
    source = write(tmp_path / "in", content, config(gpt_oss))
    with pytest.raises(CheckpointError, match=r"down_proj_scales: NaN scale at \[1, 2, 0\]"):
        api.convert(source, tmp_path / "out", MODELOPT)
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- FP8 in tiles, and the rest


def test_fp8_in_tiles_is_quantized_anew(to: str, tmp_path: Path) -> None:
    """By the quantizer, whose bytes these are; the errors are against the FP8 values."""
    generator = torch.Generator().manual_seed(3)
    content: dict[str, Tensor] = {"model.embed_tokens.weight": torch.ones(8, 64).bfloat16()}
    for leaf in ("gate_proj", "up_proj"):
        weight = torch.randn(96, 64, generator=generator).to(torch.float8_e4m3fn)
        content[f"model.layers.0.mlp.{leaf}.weight"] = weight
        content[f"model.layers.0.mlp.{leaf}.weight_scale_inv"] = torch.rand(1, 1, generator=generator) + 0.1
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    source = write(tmp_path / "in", content, {"model_type": "x", "quantization_config": quantization})
    summary = api.convert(source, tmp_path / "out", to)
    api.quantize(source, tmp_path / "expected", "nvfp4-w4a16", dialect=to)
    found, expected = read_tensors(tmp_path / "out"), read_tensors(tmp_path / "expected")
    assert found.keys() == expected.keys()
    assert all(same(tensor, expected[n]) for n, tensor in found.items())
    assert "quantized anew" in summary.notices[0]
    assert not summary.exact
    for module, linear in linears(tmp_path / "out").items():
        scale = content[f"{module}.weight_scale_inv"].double()
        value = (content[f"{module}.weight"].double() * scale).bfloat16().double()
        error = ((linear.value - value).square().sum() / value.square().sum()).sqrt().item()
        assert summary.errors[module] == pytest.approx(error, rel=1e-3)


NOT_CAST: dict[str, tuple[str, str]] = {
    "NVFP4": ("modelopt_llama_nvfp4", "no weight is stored in MXFP4"),
    "FP8": ("ct_llama_fp8_dynamic", "no weight is stored in MXFP4"),
    "16 bits": ("base_llama", "no weight is stored in MXFP4"),
}


@pytest.mark.parametrize("case", NOT_CAST)
def test_there_must_be_something_to_cast(case: str, to: str, tmp_path: Path) -> None:
    name, message = NOT_CAST[case]
    with pytest.raises(CheckpointError, match=message) as refused:
        api.convert(GOLDEN / name, tmp_path / "out", to, format="nvfp4")
    assert refused.value.hint
    assert list(tmp_path.iterdir()) == []


def test_integers_have_to_be_quantized(to: str, tmp_path: Path) -> None:
    content = {f"model.{name}": tensor for name, tensor in awq_parts(draw_linear(32, 64, 32)).items()}
    source = write(tmp_path / "in", content, {"model_type": "x", "quantization_config": AWQ})
    with pytest.raises(CheckpointError, match="stored as awq, which no dialect has") as refused:
        api.convert(source, tmp_path / "out", to)
    assert "blockscale quantize" in refused.value.hint
