"""Any checkpoint as a plain model: every weight is the nearest 16-bit number to what is stored."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.files import GOLDEN, changed, names, same
from checkpoint.files import tensors as read_tensors
from checkpoint.tiny_int4 import AWQ, GPTQ, awq_parts, draw_linear, gptq_parts
from torch import Tensor

from blockscale import api
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.checkpoint.source import open_source
from blockscale.errors import CheckpointError, NonFiniteError
from blockscale.host.model import load_model

from .folders import config, linears, others, write
from .test_convert import llama4_like

Find = Callable[[str], Path]
QUANTIZED = [*names("modelopt"), *names("ct")]
SIGNIFICANT = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}


def base_of(name: str) -> dict[str, Tensor]:
    return read_tensors(GOLDEN / ("base_qwen3moe" if "qwen3moe" in name else "base_llama"))


def check_nearest(found: Tensor, exact: Tensor, num_roundings_before: int = 2) -> None:
    """Within half a unit in the last place of the dtype, plus what fp32 lost on the way."""
    bound = 2.0 ** -SIGNIFICANT[found.dtype] + num_roundings_before * 2.0**-24
    assert ((found.double() - exact).abs() <= exact.abs() * bound).all()


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_model_that_it_was_made_from(name: str, tmp_path: Path) -> None:
    """Its tensors, by name, dtype and shape, with the values that the codes stand for; and a config without a word."""
    summary = api.convert(GOLDEN / name, tmp_path / "out", "bf16")
    found, base, stored = read_tensors(tmp_path / "out"), base_of(name), linears(GOLDEN / name)
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {n: (t.dtype, t.shape) for n, t in base.items()}
    for module, linear in stored.items():
        check_nearest(found[f"{module}.weight"], linear.value)
    assert all(same(found[n], tensor) for n, tensor in others(GOLDEN / name).items())
    plain = config(GOLDEN / name)
    plain.pop("quantization_config")
    assert config(tmp_path / "out") == plain
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    assert open_checkpoint(tmp_path / "out").quantized is None
    assert summary.num_linears == len(stored)
    has_cache = name.endswith("fp8kv")
    assert any("KV cache" in notice for notice in summary.notices) == has_cache


@pytest.mark.parametrize("name", ["modelopt_llama_nvfp4_awq_lite", "ct_llama_mxfp4", "modelopt_qwen3moe_nvfp4"])
def test_errors_are_those_of_the_rounding(name: str, tmp_path: Path) -> None:
    summary = api.convert(GOLDEN / name, tmp_path / "out", "bf16")
    found = read_tensors(tmp_path / "out")
    for module, linear in linears(GOLDEN / name).items():
        difference = found[f"{module}.weight"].double() - linear.value
        error = (difference.square().sum() / linear.value.square().sum()).sqrt().item()
        assert summary.errors.get(module, 0.0) == pytest.approx(error, rel=1e-3)
    assert summary.exact == (name == "ct_llama_mxfp4")  # powers of two: nothing to round


def test_a_pre_quant_scale_is_multiplied_in(tmp_path: Path) -> None:
    """Along K, so that x W^T is (x * s) Wq^T."""
    name = "modelopt_llama_nvfp4_awq_lite"
    stored = linears(GOLDEN / name)
    scaled = [module for module, linear in stored.items() if linear.pre_quant_scale is not None]
    assert len(scaled) == 2
    api.convert(GOLDEN / name, tmp_path / "out", "bf16")
    x = torch.randn(3, 64, dtype=torch.float64)
    for module in scaled:
        linear = stored[module]
        assert linear.pre_quant_scale is not None
        unscaled = linear.unscaled * linear.multipliers["global_scale"]
        expected = (x * linear.pre_quant_scale.double()) @ unscaled.T
        found = x @ read_tensors(tmp_path / "out")[f"{module}.weight"].double().T
        assert ((found - expected).abs() <= x.abs() @ linear.value.abs().T * (2.0**-8 + 2.0**-22)).all()


def test_a_plain_model_runs_as_the_checkpoint_does(tmp_path: Path) -> None:
    """MXFP4's values are bf16 numbers, so nothing differs but where they lie."""
    api.convert(GOLDEN / "ct_llama_mxfp4", tmp_path / "out", "bf16")
    ids = torch.arange(32).view(1, -1)
    packed = load_model(GOLDEN / "ct_llama_mxfp4", emulate_activations=False).logits(ids)
    assert torch.allclose(load_model(tmp_path / "out").logits(ids), packed, rtol=0, atol=1e-5 * packed.abs().max())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_checkpoints_own_type(dtype: torch.dtype, tmp_path: Path) -> None:
    name = str(dtype).removeprefix("torch.")
    source = changed("modelopt_llama_nvfp4", tmp_path, config=lambda c: c.update(dtype=name, torch_dtype=name))
    summary = api.convert(source, tmp_path / "out", "bf16")
    found = read_tensors(tmp_path / "out")
    for module, linear in linears(source).items():
        assert found[f"{module}.weight"].dtype == dtype
        check_nearest(found[f"{module}.weight"], linear.value)
    assert all(error < 2.0 ** -SIGNIFICANT[dtype] + 2.0**-24 for error in summary.errors.values())


def test_values_beyond_the_type_are_an_error(tmp_path: Path) -> None:
    def enlarge(content: dict[str, Tensor]) -> None:
        content["model.layers.0.mlp.up_proj.weight_scale_2"].fill_(1e5)

    source = changed("modelopt_llama_nvfp4", tmp_path, tensors=enlarge, config=lambda c: c.update(dtype="float16"))
    with pytest.raises(CheckpointError, match=r"up_proj: .* is no number of torch\.float16"):
        api.convert(source, tmp_path / "out", "bf16")
    assert not (tmp_path / "out").exists()


def test_stacks_keep_the_models_orientation(tmp_path: Path) -> None:
    source = llama4_like(tmp_path / "stacks")
    api.convert(source, tmp_path / "out", "bf16")
    found, stored = read_tensors(tmp_path / "out"), linears(source)
    assert found.keys() == {"lm_head.weight", *stored}
    for name, linear in stored.items():
        assert found[name].shape == linear.value.transpose(-1, -2).shape  # [E, K, N]
        check_nearest(found[name], linear.value.transpose(-1, -2))


# ---------------------------------------------------------------- sources that no dialect has


def source_of(folder: Path, content: dict[str, Tensor], quantization: dict[str, Any]) -> Path:
    plain = {"model.norm.weight": torch.ones(8).bfloat16(), "model.a.bias": torch.ones(4).bfloat16()}
    settings = {"model_type": "x", "quantization_config": quantization, "hidden_size": 64}
    return write(folder, {**content, **plain}, settings, quantize_config="{}")


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_integers(method: str, tmp_path: Path) -> None:
    linear = draw_linear(32, 64, 32)
    parts, quantization = (awq_parts, AWQ) if method == "awq" else (gptq_parts, GPTQ)
    content = {f"model.{name}": tensor for name, tensor in parts(linear).items()}
    summary = api.convert(source_of(tmp_path / "in", content, quantization), tmp_path / "out", "bf16")
    found = read_tensors(tmp_path / "out")
    assert found.keys() == {"model.a.weight", "model.norm.weight", "model.a.bias"}
    assert same(found["model.a.weight"], linear.value)
    assert config(tmp_path / "out") == {"model_type": "x", "hidden_size": 64}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
        "blockscale.json",
    }
    assert (summary.num_linears, summary.exact) == (1, True)


def test_fp8_in_tiles(tmp_path: Path) -> None:
    weight = torch.randn(200, 130).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 2) + 0.01
    content = {"model.a.weight": weight, "model.a.weight_scale_inv": scale}
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    api.convert(source_of(tmp_path / "in", content, quantization), tmp_path / "out", "bf16")
    found = read_tensors(tmp_path / "out")
    assert "model.a.weight_scale_inv" not in found
    tiles = scale.double().repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :130]
    check_nearest(found["model.a.weight"], weight.double() * tiles, num_roundings_before=1)
    assert "quantization_config" not in config(tmp_path / "out")


def gpt_oss_content(scales: int = 120) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    return {
        f"{name}_blocks": torch.randint(0, 256, (2, 8, 2, 16), generator=generator).to(torch.uint8),
        f"{name}_scales": torch.full((2, 8, 2), scales, dtype=torch.uint8),
        f"{name}_bias": torch.ones(2, 8).bfloat16(),
    }


def test_gpt_oss(tmp_path: Path) -> None:
    source = source_of(tmp_path / "in", gpt_oss_content(), {"quant_method": "mxfp4"})
    summary = api.convert(source, tmp_path / "out", "bf16")
    found = read_tensors(tmp_path / "out")
    view = open_source(source).tensors
    assert found.keys() == view.keys()
    assert all(same(tensor, view[n].read()) for n, tensor in found.items())
    assert found["model.layers.0.mlp.experts.gate_up_proj"].shape == (2, 64, 8)
    assert (summary.num_linears, summary.exact) == (1, True)


def test_a_source_that_decodes_to_nan_is_an_error(tmp_path: Path) -> None:
    source = source_of(tmp_path / "in", gpt_oss_content(scales=255), {"quant_method": "mxfp4"})
    with pytest.raises(NonFiniteError, match="gate_up_proj: nan"):
        api.convert(source, tmp_path / "out", "bf16")
    assert not (tmp_path / "out").exists()


def test_a_plain_model_is_copied(tmp_path: Path, tiny_model: Find) -> None:
    summary = api.convert(tiny_model("llama"), tmp_path / "out", "bf16")
    assert "16 bits already" in summary.notices[0]
    before, after = read_tensors(tiny_model("llama")), read_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(same(tensor, after[n]) for n, tensor in before.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config(tiny_model("llama"))
