"""What a checkpoint holds: compared with the safetensors library, with the models that the files were made from, and
with what the rest of blockscale reads. Needs nothing."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.tiny_int4 import AWQ, GPTQ, awq_parts, draw_linear, gptq_parts
from torch import Tensor

import blockscale
from blockscale import api
from blockscale.checkpoint.reader import bits_per_parameter, open_checkpoint
from blockscale.errors import CheckpointError
from blockscale.inspection.contents import inspect_folder, short_name
from blockscale.inspection.inventory import Inspection, Layer, Range, range_of

from .changed_folders import GOLDEN, base_of, copied, edit_json, edit_settings, golden_names, tensors_of, written

# Of the weights, and of what goes into them, by the end of a folder's name.
FORMATS = {
    "_llama_nvfp4": ("nvfp4", "nvfp4"),
    "_qwen3moe_nvfp4": ("nvfp4", "nvfp4"),
    "_nvfp4_fp8kv": ("nvfp4", "nvfp4"),
    "_four_over_six": ("nvfp4", "nvfp4"),
    "_awq_lite": ("nvfp4", "nvfp4"),
    "_w4a16_nvfp4": ("nvfp4", None),
    "_nvfp4a16": ("nvfp4", None),
    "_w4a8_nvfp4_fp8": ("nvfp4-block32", "fp8"),
    "_llama_fp8": ("fp8", "fp8"),
    "_fp8_dynamic": ("fp8-channel", "fp8-token"),
    "_mxfp4": ("mxfp4", "mxfp4"),
}


def layer(inspection: Inspection, name: str) -> Layer:
    return next(found for found in inspection.layers if found.name == name)


def single(inspection: Inspection, name: str) -> Any:
    return next(linear for linear in inspection.linears if linear.weight.name == name)


# ---------------------------------------------------------------- totals


@pytest.mark.parametrize("name", golden_names())
def test_totals_to_the_byte(name: str) -> None:
    found, stored = inspect_folder(GOLDEN / name), tensors_of(GOLDEN / name)
    base = tensors_of(GOLDEN / base_of(name))
    assert found.num_bytes == sum(t.numel() * t.element_size() for t in stored.values())
    assert found.num_parameters == sum(t.numel() for t in base.values())
    assert found.bits_per_parameter == 8 * found.num_bytes / found.num_parameters
    assert found.bits_per_parameter == bits_per_parameter(open_checkpoint(GOLDEN / name))
    cache_bytes = sum(t.numel() * t.element_size() for n, t in stored.items() if n.endswith(("k_scale", "v_scale")))
    assert sum(total.num_bytes for total in found.by_format) + cache_bytes == found.num_bytes
    assert sum(total.num_parameters for total in found.by_format) == found.num_parameters


@pytest.mark.parametrize("name", golden_names(quantized=True))
def test_every_tensor_is_in_one_place(name: str) -> None:
    found, stored = inspect_folder(GOLDEN / name), tensors_of(GOLDEN / name)
    in_linears = [info.name for linear in found.linears for info in linear.weight.tensors]
    cache = [n for n in stored if n.endswith(("k_scale", "v_scale"))]
    assert sorted([*in_linears, *(k.name for k in found.kept), *cache]) == sorted(stored)
    assert found.faults == ()
    assert found.notices == ()


def test_bits_of_quantized_layers() -> None:
    """4-bit codes, 8 bits a 16 of them, and two fp32 scales a linear."""
    found = inspect_folder(GOLDEN / "modelopt_llama_nvfp4")
    num_linears = sum(1 for _ in found.linears)
    num = sum(linear.num_parameters for linear in found.linears)
    assert found.quantized_bits_per_parameter == 4.5 + 64 * num_linears / num
    assert inspect_folder(GOLDEN / "base_llama").quantized_bits_per_parameter is None


# ---------------------------------------------------------------- layers


@pytest.mark.parametrize("name", [n for n in golden_names(quantized=True) if "mixed" not in n])
def test_formats(name: str) -> None:
    expected = next(formats for ending, formats in FORMATS.items() if name.endswith(ending))
    assert {(x.format, x.activation) for x in inspect_folder(GOLDEN / name).layers} == {expected}


def test_a_mixed_checkpoint() -> None:
    found = inspect_folder(GOLDEN / "modelopt_llama_mixed_fp8attn_nvfp4mlp_fp8kv")
    assert {x.format for x in found.layers if "self_attn" in x.name} == {"fp8"}
    assert {x.format for x in found.layers if "mlp" in x.name} == {"nvfp4"}


@pytest.mark.parametrize("name", ["modelopt_llama_nvfp4", "ct_llama_nvfp4", "base_llama"])
def test_fused_weights_are_one_layer(name: str) -> None:
    found = inspect_folder(GOLDEN / name)
    parts = ("self_attn.q+k+v_proj", "self_attn.o_proj", "mlp.gate+up_proj", "mlp.down_proj")
    assert {x.name for x in found.layers} == {f"model.layers.{i}.{part}" for i in range(2) for part in parts}
    qkv = layer(found, "model.layers.1.self_attn.q+k+v_proj")
    assert [m.weight.name.rpartition(".")[2] for m in qkv.members] == ["q_proj", "k_proj", "v_proj"]
    base = tensors_of(GOLDEN / "base_llama")
    assert qkv.shapes == tuple(tuple(base[f"{m.weight.name}.weight"].shape) for m in qkv.members)
    assert qkv.to_dict()["shape"] == [128, 64]


@pytest.mark.parametrize("name", golden_names(quantized=True))
def test_scales_are_multipliers(name: str) -> None:
    found, stored = inspect_folder(GOLDEN / name), tensors_of(GOLDEN / name)

    def value(linear: str, *suffixes: str) -> float | None:
        return next((float(stored[f"{linear}.{s}"]) for s in suffixes if f"{linear}.{s}" in stored), None)

    for linear in found.linears:
        module = linear.weight.name
        if linear.weight.format == "fp8-channel" or linear.weight.format == "mxfp4":
            assert (linear.global_scale, linear.input_scale) == (None, None)
            continue
        divisor = value(module, "weight_global_scale")
        scale = 1 / divisor if divisor else value(module, "weight_scale_2", "weight_scale")
        assert linear.global_scale == scale
        divisor = value(module, "input_global_scale")
        assert linear.input_scale == (1 / divisor if divisor else value(module, "input_scale"))
        assert (linear.input_scale is None) == (linear.weight.activation is None)


@pytest.mark.parametrize("name", ["modelopt_qwen3moe_nvfp4", "ct_llama_nvfp4", "ct_llama_mxfp4"])
def test_block_scales_are_counted_when_asked_for(name: str) -> None:
    assert all(linear.block_scales is None for linear in inspect_folder(GOLDEN / name).linears)
    stages: list[tuple[str, int, int]] = []
    found = inspect_folder(GOLDEN / name, with_scales=True, progress=lambda *stage: stages.append(stage))
    stored = tensors_of(GOLDEN / name)
    for linear in found.linears:
        scale = stored[f"{linear.weight.name}.weight_scale"]
        values = 2.0 ** (scale.double() - 127) if scale.dtype == torch.uint8 else scale.double()
        census = linear.block_scales
        assert census is not None
        assert census.total == scale.numel()
        assert (census.minimum, census.maximum) == (values.min().item(), values.max().item())
        assert (census.num_nan, census.num_negative, census.num_zero) == (0, 0, 0)
    num_bytes = sum(stored[f"{linear.weight.name}.weight_scale"].numel() for linear in found.linears)
    assert stages[-1] == ("reading scales", num_bytes, num_bytes)


def test_reasons_of_what_is_kept() -> None:
    reasons = {k.name: k.reason for k in inspect_folder(GOLDEN / "modelopt_qwen3moe_nvfp4").kept}
    assert reasons["lm_head.weight"] == "output head"
    assert reasons["model.embed_tokens.weight"] == "embedding"
    assert reasons["model.layers.0.mlp.gate.weight"] == "router"
    assert reasons["model.norm.weight"] == "norm, bias or scalar"
    assert len(reasons) == 13


def test_a_linear_that_was_left_out(tmp_path: Path) -> None:
    api.quantize(GOLDEN / "base_llama", tmp_path / "q", "nvfp4-w4a16", keep=["*.o_proj"])
    found = inspect_folder(tmp_path / "q")
    assert {k.name: k.reason for k in found.kept}["model.layers.0.self_attn.o_proj.weight"] == "left as it was"
    assert found.faults == ()


def test_the_cache() -> None:
    for name, ending in (
        ("modelopt_llama_nvfp4_fp8kv", "k_proj.k_scale"),
        ("ct_llama_nvfp4_fp8kv", "self_attn.k_scale"),
    ):
        cache, stored = inspect_folder(GOLDEN / name).kv_cache, tensors_of(GOLDEN / name)
        keys = [t.float().item() for n, t in stored.items() if n.endswith(ending)]
        assert cache is not None
        assert (cache.format, cache.num_layers) == ("fp8", 2)
        assert cache.key_scale == Range(min(keys), max(keys))
    assert inspect_folder(GOLDEN / "modelopt_llama_nvfp4").kv_cache is None


def test_a_cache_that_is_only_announced(tmp_path: Path) -> None:
    folder = copied("ct_llama_nvfp4_fp8kv", tmp_path, lambda t: [t.pop(n) for n in list(t) if n.endswith("v_scale")])
    cache = inspect_folder(folder).kv_cache
    assert cache is not None
    assert (cache.format, cache.num_layers, cache.key_scale) == ("fp8", 0, None)


@pytest.mark.parametrize(
    ("members", "name"),
    [
        (("a.b.q_proj",), "a.b.q_proj"),
        (("a.q_proj", "a.k_proj", "a.v_proj"), "a.q+k+v_proj"),
        (("a.gate_proj", "a.up_proj"), "a.gate+up_proj"),
        (("a.w1", "a.w3"), "a.w1+w3"),
        (("a.q_proj.linear", "a.k_proj.linear"), "a.q+k_proj.linear"),
        (("a.q_a_proj", "a.kv_a_proj_with_mqa"), "a.q_a_proj+kv_a_proj_with_mqa"),
        (("gate_proj", "up_proj"), "gate+up_proj"),
    ],
)
def test_short_names(members: tuple[str, ...], name: str) -> None:
    assert short_name(members) == name


def test_ranges() -> None:
    assert range_of([]) is range_of([None]) is None
    assert range_of([2.0, None, 1.0]) == Range(1.0, 2.0)
    found = range_of([1.0, math.nan, 2.0])
    assert found is not None
    assert math.isnan(found.low)
    assert math.isnan(found.high)


# ---------------------------------------------------------------- sources


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def test_fp8_in_blocks(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.up_proj.weight": torch.zeros(200, 130).to(torch.float8_e4m3fn),
        "model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(2, 2),
        "model.norm.weight": bf16(130),
    }
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    folder = written(tmp_path / "m", tensors, {"quantization_config": settings})
    found = inspect_folder(folder)
    (only,) = found.layers
    assert (only.format, only.activation, only.shapes) == ("fp8-block128", "fp8, dynamic", ((200, 130),))
    assert only.num_bytes == 200 * 130 + 16
    assert [k.name for k in found.kept] == ["model.norm.weight"]
    assert found.bits_per_parameter == bits_per_parameter(open_checkpoint(folder))
    assert found.quantized_bits_per_parameter == 8 * (200 * 130 + 16) / (200 * 130)


def test_mxfp4_of_gpt_oss(tmp_path: Path) -> None:
    experts = "model.layers.0.mlp.experts"
    tensors = {
        f"{experts}.gate_up_proj_blocks": torch.zeros(4, 64, 2, 16, dtype=torch.uint8),
        f"{experts}.gate_up_proj_scales": torch.full((4, 64, 2), 120, dtype=torch.uint8),
        f"{experts}.gate_up_proj_bias": bf16(4, 64),
        "model.layers.0.self_attn.q_proj.weight": bf16(64, 64),
    }
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    found = inspect_folder(written(tmp_path / "m", tensors, config), with_scales=True)
    (only,) = found.layers
    assert (only.name, only.format, only.shapes) == (f"{experts}.gate_up_proj", "mxfp4", ((4, 64, 64),))
    assert only.bits_per_parameter == 4.25
    census = only.members[0].block_scales
    assert census is not None
    assert (census.total, census.minimum, census.maximum) == (512, 2.0**-7, 2.0**-7)
    assert {k.name.rpartition(".")[2]: k.reason for k in found.kept} == {
        "gate_up_proj_bias": "not a linear weight",
        "weight": "left as it was",
    }
    assert found.bits_per_parameter == bits_per_parameter(open_checkpoint(tmp_path / "m"))


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq(bits: int, tmp_path: Path) -> None:
    parts = gptq_parts(draw_linear(16, 64, 32, bits=bits), "model.layers.0.mlp.up_proj")
    settings = {**GPTQ, "bits": bits}
    found = inspect_folder(written(tmp_path / "m", parts, {"quantization_config": settings}))
    (only,) = found.layers
    assert (only.format, only.shapes, only.activation) == (f"int{bits}-g32", ((16, 64),), None)
    assert only.num_bytes == sum(t.numel() * t.element_size() for t in parts.values())
    assert found.bits_per_parameter == bits_per_parameter(open_checkpoint(tmp_path / "m"))


def test_awq(tmp_path: Path) -> None:
    parts = awq_parts(draw_linear(16, 64, 32), "model.layers.0.mlp.up_proj")
    found = inspect_folder(written(tmp_path / "m", parts, {"quantization_config": AWQ}))
    (only,) = found.layers
    assert (only.format, only.shapes) == ("int4-g32", ((16, 64),))
    assert found.dialect == "awq"
    assert found.kept == ()


def test_a_method_that_is_not_known(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.zeros(8, 8, dtype=torch.uint8), "a.bias": bf16(8)}
    found = inspect_folder(written(tmp_path / "m", tensors, {"quantization_config": {"quant_method": "hqq"}}))
    assert found.layers == ()
    assert {k.name: k.reason for k in found.kept}["a.weight"] == "codes or scales of a format that is not known"
    assert found.num_bytes == 64 + 16
    assert "hqq" in found.notices[0]


# ---------------------------------------------------------------- where it comes from


def test_origin(tmp_path: Path) -> None:
    found = inspect_folder(GOLDEN / "modelopt_llama_nvfp4")
    assert (found.architecture, found.dialect, found.producer) == ("LlamaForCausalLM", "modelopt", "modelopt 0.47.0")
    assert inspect_folder(GOLDEN / "ct_llama_nvfp4").producer == "compressed-tensors 0.19.0"
    api.quantize(GOLDEN / "base_llama", tmp_path / "q", "nvfp4-w4a16")
    found = inspect_folder(tmp_path / "q")
    assert found.producer.startswith("blockscale ")
    assert found.recipe.startswith("name: nvfp4-w4a16\n")
    (tmp_path / "q" / "blockscale.json").write_text("[1")
    assert inspect_folder(tmp_path / "q").recipe == ""


@pytest.mark.parametrize("value", [None, 3, "x", [], {}, [1], {"name": 5}, {"name": "x", "version": {}}])
def test_configs_of_any_shape(value: Any, tmp_path: Path) -> None:
    folder = copied("modelopt_llama_nvfp4", tmp_path)
    edit_json(folder / "config.json", lambda c: c.update(architectures=value, model_type=value))
    edit_settings(folder, lambda s: s.update(producer=value, version=value))
    assert inspect_folder(folder).num_parameters == 106_816


# ---------------------------------------------------------------- what is wrong with it


def test_it_goes_on_past_faults(tmp_path: Path) -> None:
    """A missing scale, codes without any, and a file that is cut short."""
    module = "model.layers.0.mlp.down_proj"
    folder = copied("modelopt_llama_nvfp4", tmp_path / "a", lambda t: t.pop(f"{module}.weight_scale_2"))
    found = inspect_folder(folder)
    assert {f.rule for f in found.faults} == {"missing-global-scale"}
    assert single(found, module).global_scale is None
    assert found.num_parameters == 106_816

    folder = copied("modelopt_llama_nvfp4", tmp_path / "b", lambda t: t.pop(f"{module}.weight_scale"))
    found = inspect_folder(folder)
    assert "missing-block-scale" in {f.rule for f in found.faults}
    assert len(found.layers) == 7

    folder = copied("modelopt_llama_nvfp4", tmp_path / "c")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-10])
    found = inspect_folder(folder)
    assert "unreadable-file" in {f.rule for f in found.faults}
    assert (found.num_bytes, found.bits_per_parameter) == (0, None)


@pytest.mark.parametrize("stored", [0.0, -1.0, math.nan, math.inf])
def test_scales_that_are_no_scales_are_shown(stored: float, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj"
    folder = copied("modelopt_llama_nvfp4", tmp_path, lambda t: t[f"{name}.weight_scale_2"].fill_(stored))
    found = inspect_folder(folder)
    assert {(f.rule, f.where) for f in found.faults} == {("bad-global-scale", name)}
    assert str(single(found, name).global_scale) == str(stored)
    json.dumps(found.to_dict())


def test_members_with_scales_of_their_own(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight_scale_2"] *= 4

    found = inspect_folder(copied("modelopt_llama_nvfp4", tmp_path, change))
    assert {f.rule for f in found.faults} == {"fused-global-scale-mismatch"}
    low, high = layer(found, "model.layers.1.mlp.gate+up_proj").to_dict()["scales"]["global"]
    assert high == pytest.approx(4 * low, rel=1e-6)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such model folder"):
        inspect_folder(tmp_path / "x")
    with pytest.raises(CheckpointError):
        blockscale.inspect(tmp_path / "x")


# ---------------------------------------------------------------- the whole of it


def test_json_has_the_keys_of_the_contract(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    api.quantize(tiny_model("llama4_text"), tmp_path / "q", "nvfp4-w4a16")
    found = blockscale.inspect(tmp_path / "q", scales=True)
    data = json.loads(json.dumps(found.to_dict()))
    assert {"num_parameters", "bytes", "bits_per_parameter", "layers", "kept", "kv_cache", "engines"} <= set(data)
    stack = next(x for x in data["layers"] if x["name"].endswith("experts.gate_up_proj"))
    assert len(stack["shape"]) == 3
    assert stack["scales"]["block"]["num"] == math.prod(stack["shape"]) // 16
    assert set(data["engines"]["vLLM"]) == {"loads", "reason", "after", "checked"}
    assert sum(x["bytes"] for x in data["layers"]) + sum(k["bytes"] for k in data["kept"]) == data["bytes"]


def test_it_needs_no_torch() -> None:
    look = f"blockscale.inspect({str(GOLDEN / 'ct_llama_nvfp4')!r}, scales=True)"
    code = f"import sys, blockscale; {look}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
