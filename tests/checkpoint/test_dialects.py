"""Quantized linears through a dialect to disk and back, and what a dialect refuses to write."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from blockscale.checkpoint.dialects import compressed_tensors, modelopt
from blockscale.checkpoint.linear import (
    MXFP4_W4A4,
    MXFP4_W4A16,
    W4A4,
    W4A8,
    W4A16,
    W8A8,
    W8A8_DYNAMIC,
    KVScales,
    QuantizedLinear,
    Scheme,
)
from blockscale.checkpoint.load import load_kv_scales, load_linear
from blockscale.checkpoint.reader import DIALECTS, Checkpoint, open_checkpoint
from blockscale.errors import CheckpointError
from blockscale.formats.spec import FORMATS, FP8, FP8_TOKEN, NVFP4
from blockscale.formats.tensor import encode

from .files import same

MODELOPT_SCHEMES = [W4A4, W4A16, W4A8, W8A8, W8A8_DYNAMIC, MXFP4_W4A4, MXFP4_W4A16]
CT_SCHEMES = [W4A4, W4A16, W8A8, W8A8_DYNAMIC, MXFP4_W4A4, MXFP4_W4A16, Scheme(FORMATS["fp8-channel"])]
PAIRS = [("modelopt", s) for s in MODELOPT_SCHEMES] + [("compressed-tensors", s) for s in CT_SCHEMES]
PAIR_IDS = [f"{dialect} {scheme.name}" for dialect, scheme in PAIRS]


def linear(scheme: Scheme, shape: tuple[int, ...] = (48, 64), seed: int = 0) -> QuantizedLinear:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator).bfloat16()
    weight[..., 0, :32] = 0
    input_scale = torch.rand((), generator=generator) if scheme.needs_input_scale else None
    return QuantizedLinear(scheme, encode(weight, scheme.weight), input_scale)


def write(
    folder: Path,
    dialect: str,
    linears: Mapping[str, QuantizedLinear],
    kv: Mapping[str, KVScales] | None = None,
    kv_format: str | None = None,
    **options: Any,
) -> Path:
    writer = DIALECTS[dialect]
    stored = {"lm_head.weight": torch.ones(8, 64, dtype=torch.bfloat16)}
    for name, quantized in linears.items():
        stored |= writer.to_tensors(name, quantized)
    for attention, scales in (kv or {}).items():
        stored |= writer.kv_to_tensors(attention, scales)
    folder.mkdir(exist_ok=True)
    save_file({n: t.contiguous() for n, t in stored.items()}, folder / "model.safetensors")
    schemes = {name: quantized.scheme for name, quantized in linears.items()}
    for name, text in writer.config_files({"dtype": "bfloat16"}, schemes, ["lm_head"], kv_format, **options).items():
        (folder / name).write_text(text)
    return folder


def read(folder: Path) -> tuple[Checkpoint, dict[str, QuantizedLinear]]:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.quantized is not None
    return checkpoint, {n: load_linear(x, torch.bfloat16) for n, x in checkpoint.quantized.linears.items()}


def same_optional(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and same(a, b))


def ulps(a: Tensor | None, b: Tensor | None) -> int:
    """Steps of fp32 between two positive scalars; 0 for two that are not there."""
    if a is None or b is None:
        assert a is b
        return 0
    assert (a.dtype, a.shape) == (b.dtype, b.shape) == (torch.float32, ())
    return abs(int(a.view(torch.int32)) - int(b.view(torch.int32)))


# ---------------------------------------------------------------- there and back


@pytest.mark.parametrize(("dialect", "scheme"), PAIRS, ids=PAIR_IDS)
def test_a_linear_comes_back(dialect: str, scheme: Scheme, tmp_path: Path) -> None:
    """Codes and block scales bit for bit. Global scales too, but for one unit in the last place where a dialect stores
    the reciprocal."""
    written = {f"model.layers.{i}.mlp.down_proj": linear(scheme, seed=i) for i in range(2)}
    folder = write(tmp_path / "out", dialect, written)
    checkpoint, found = read(folder)
    assert checkpoint.folder.method == dialect
    assert checkpoint.kept.keys() == {"lm_head.weight"}
    assert found.keys() == written.keys()
    allowed = 1 if dialect == "compressed-tensors" else 0
    for name, ours in written.items():
        theirs = found[name]
        assert theirs.scheme == scheme
        assert same(theirs.weight.packed, ours.weight.packed)
        assert same(theirs.weight.block_scale, ours.weight.block_scale)
        assert theirs.weight.shape == ours.weight.shape
        assert theirs.weight.format == ours.weight.format
        assert ulps(theirs.weight.global_scale, ours.weight.global_scale) <= allowed
        assert ulps(theirs.input_global_scale, ours.input_global_scale) <= allowed
    if dialect == "modelopt":
        assert json.loads((folder / "hf_quant_config.json").read_text())["quantization"]["quant_algo"]


@given(st.floats(2.0**-120, 2.0**120, width=32))
@example(1.0)
@example(2.0**-100)
@example(3.0)
def test_a_reciprocal_moves_a_scale_by_one_unit_at_most(value: float) -> None:
    scale = torch.tensor(value)
    ours = QuantizedLinear(W4A4, encode(torch.ones(1, 16), NVFP4, global_scale=scale), scale)
    stored = compressed_tensors.to_tensors("x", ours)
    assert stored["x.weight_global_scale"].shape == stored["x.input_global_scale"].shape == (1,)
    back = stored["x.weight_global_scale"].reciprocal().reshape(())
    assert ulps(back, scale) <= 1
    assert torch.equal(stored["x.weight_global_scale"], stored["x.input_global_scale"])


@pytest.mark.parametrize("scheme", [W4A4, W4A16, W4A8, MXFP4_W4A4], ids=lambda s: s.name)
def test_a_stack_of_experts_comes_back_in_the_models_orientation(scheme: Scheme, tmp_path: Path) -> None:
    ours = linear(scheme, (3, 48, 64))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    stored = modelopt.to_tensors(name, ours)
    assert stored[name].shape == (3, 32, 48)  # [E, K/2, N]
    assert stored[f"{name}_weight_scale"].shape == (3, 64 // scheme.weight.block_size, 48)
    checkpoint, found = read(write(tmp_path / "out", "modelopt", {name: ours}))
    assert checkpoint.quantized is not None
    assert checkpoint.quantized.linears[name].shape == (3, 48, 64)
    assert same(found[name].weight.packed, ours.weight.packed)
    assert same(found[name].weight.block_scale, ours.weight.block_scale)
    assert same_optional(found[name].weight.global_scale, ours.weight.global_scale)
    assert same_optional(found[name].input_global_scale, ours.input_global_scale)


def test_a_pre_quant_scale_comes_back(tmp_path: Path) -> None:
    scale = torch.rand(64).bfloat16()
    ours = QuantizedLinear(W4A4, linear(W4A4).weight, torch.tensor(0.5), scale)
    folder = write(tmp_path / "out", "modelopt", {"a.o_proj": ours}, has_pre_quant_scale=True)
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_algo"] == "NVFP4_AWQ"
    assert same_optional(read(folder)[1]["a.o_proj"].pre_quant_scale, scale)


@pytest.mark.parametrize(
    ("dialect", "kv_format"), [("modelopt", "fp8"), ("modelopt", "nvfp4"), ("compressed-tensors", "fp8")]
)
def test_kv_scales_come_back(dialect: str, kv_format: str, tmp_path: Path) -> None:
    kv = {f"model.layers.{i}.self_attn": KVScales(torch.tensor(0.1 + i), torch.tensor(3.0 - i)) for i in range(2)}
    folder = write(tmp_path / "out", dialect, {"model.layers.0.self_attn.q_proj": linear(W4A16)}, kv, kv_format)
    quantized = open_checkpoint(folder).quantized
    assert quantized is not None
    assert quantized.kv_format == kv_format
    assert quantized.kv_tensors.keys() == kv.keys()
    for name, infos in quantized.kv_tensors.items():
        scales = load_kv_scales(infos)
        assert same(scales.key, kv[name].key)
        assert same(scales.value, kv[name].value)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_schemes_mixed_by_layer_come_back(dialect: str, tmp_path: Path) -> None:
    schemes = [W4A4, W4A16, W8A8] if dialect == "modelopt" else [W4A4, W4A16, W8A8, W8A8_DYNAMIC]
    written = {f"model.layers.{i}.mlp.down_proj": linear(scheme, seed=i) for i, scheme in enumerate(schemes)}
    written |= {f"model.layers.9.mlp.experts.{i}.up_proj": linear(W4A4, seed=i) for i in range(3)}
    # a name that is another's beginning, and one that lies below another
    written |= {"model.layers.1.mlp.down_proj_2": linear(W8A8), "model.layers.1.mlp.down_proj.inner": linear(W8A8)}
    found = read(write(tmp_path / "out", dialect, written))[1]
    assert {n: x.scheme for n, x in found.items()} == {n: x.scheme for n, x in written.items()}


def test_a_mixture_that_engines_cannot_load_is_refused(tmp_path: Path) -> None:
    mixture = {"a.q_proj": linear(W4A4), "b.q_proj": linear(W8A8_DYNAMIC)}
    with pytest.raises(CheckpointError, match=r"b\.q_proj.*cannot be mixed"):
        write(tmp_path / "out", "modelopt", mixture)


@pytest.mark.parametrize(("dialect", "scheme"), PAIRS, ids=PAIR_IDS)
def test_a_plan_on_meta_tensors_is_what_is_written(dialect: str, scheme: Scheme) -> None:
    real = linear(scheme)
    planned = DIALECTS[dialect].to_tensors("x", real.to("meta"))
    written = DIALECTS[dialect].to_tensors("x", real)
    assert {n: (t.dtype, t.shape) for n, t in planned.items()} == {n: (t.dtype, t.shape) for n, t in written.items()}


# ---------------------------------------------------------------- what cannot be written


def test_combinations_that_a_dialect_cannot_hold() -> None:
    stack, scaled = linear(W4A4, (2, 32, 64)), QuantizedLinear(W4A16, linear(W4A16).weight, None, torch.ones(64))
    for quantized, what in (
        (linear(W4A8), "nvfp4-block32"),
        (linear(Scheme(NVFP4, FP8)), "nvfp4/fp8"),  # vLLM refuses it
        (linear(Scheme(NVFP4, FP8_TOKEN)), "nvfp4/fp8-token"),
        (linear(Scheme(FORMATS["mxfp8"])), "mxfp8"),
        (stack, "a stack"),
        (scaled, "a pre_quant_scale"),
    ):
        with pytest.raises(CheckpointError, match=f"^model.x: compressed-tensors cannot hold.*{what}") as caught:
            compressed_tensors.to_tensors("model.x", quantized)
        assert "modelopt" in caught.value.hint


def test_schemes_without_a_name() -> None:
    with pytest.raises(CheckpointError, match="no name for nvfp4/fp8") as caught:
        modelopt.config_files({}, {"x": Scheme(NVFP4, FP8)}, [], None)
    assert "compressed-tensors" in caught.value.hint
    with pytest.raises(CheckpointError, match="no nvfp4 KV cache") as caught:
        compressed_tensors.config_files({}, {"x": W4A4}, [], "nvfp4")
    assert "modelopt" in caught.value.hint


@pytest.mark.parametrize("scale", [1e-40, 2.0**-149, 2.0**-129])
@pytest.mark.parametrize("role", ["weight", "input"])
def test_a_scale_without_a_finite_reciprocal(role: str, scale: float) -> None:
    """Its divisor would be written as infinity, and the layer would be read as zeros or NaN."""
    tiny, plain = torch.tensor(scale), torch.tensor(1.0)
    weight = encode(torch.ones(1, 16), NVFP4, global_scale=tiny if role == "weight" else plain)
    quantized = QuantizedLinear(W4A4, weight, plain if role == "weight" else tiny)
    with pytest.raises(CheckpointError, match=r"^model\.x: the global scale .* has no finite reciprocal"):
        compressed_tensors.to_tensors("model.x", quantized)
    assert torch.isfinite(modelopt.to_tensors("model.x", quantized)["model.x.weight_scale_2"])


# ---------------------------------------------------------------- wildcards, and how targets match


def test_wildcards_of_kept_modules() -> None:
    kept = ["lm_head", "model.layers.0.mlp.experts*", "*visual*"]
    theirs = json.loads(modelopt.config_files({}, {"x": W4A4}, kept, None)["config.json"])["quantization_config"]
    assert theirs["ignore"] == kept
    ours = json.loads(compressed_tensors.config_files({}, {"x": W4A4}, kept, None)["config.json"])
    experts = r"re:(?:.*\.)?model\.layers\.0\.mlp\.experts.*"
    assert ours["quantization_config"]["ignore"] == ["lm_head", experts, r"re:(?:.*\.)?visual.*"]


NVFP4_GROUP: dict[str, Any] = {
    "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "input_activations": None,
}
FP8_GROUP: dict[str, Any] = {
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
}


@pytest.mark.parametrize(
    ("nvfp4_targets", "fp8_targets", "expected"),
    [
        (["Linear"], ["model.a.down_proj"], "fp8-channel"),  # an exact name beats a class
        (["model.a.down_proj"], ["re:.*"], "nvfp4"),  # and a pattern
        (["Linear"], [r"re:.*down_proj$"], "fp8-channel"),  # a pattern beats a class
        (["re:.*down_proj", "Linear"], ["re:model.*"], "nvfp4"),  # of two patterns the first in the alphabet
        (["re:model.*"], ["re:.*down_proj"], "fp8-channel"),
        (["re:model.a.down"], ["re:down_proj", "re:a\\.down_proj"], "nvfp4"),  # anchored at the start, not at the end
        (["Linear"], ["LlamaAttention"], "nvfp4"),  # attention is no linear
        (["Linear"], ["model.a", "down_proj"], "nvfp4"),  # neither a parent's nor a leaf's name
    ],
)
def test_which_group_a_module_falls_into(
    nvfp4_targets: list[str], fp8_targets: list[str], expected: str, tmp_path: Path
) -> None:
    scheme = {"nvfp4": W4A16, "fp8-channel": W8A8_DYNAMIC}[expected]
    folder = write(tmp_path / "out", "compressed-tensors", {"model.a.down_proj": linear(scheme)})
    for order in (1, -1):
        groups = [{**FP8_GROUP, "targets": fp8_targets}, {**NVFP4_GROUP, "targets": nvfp4_targets}][::order]
        quantization = {"quant_method": "compressed-tensors", "config_groups": dict(zip("ab", groups, strict=True))}
        (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
        _, found = read(folder)
        assert found["model.a.down_proj"].scheme == scheme


def test_a_group_about_attention_only(tmp_path: Path) -> None:
    folder = write(tmp_path / "out", "compressed-tensors", {"a.q_proj": linear(W4A16)})
    config = json.loads((folder / "config.json").read_text())
    attention = {"targets": ["re:.*self_attn$"], "weights": None, "input_activations": FP8_GROUP["input_activations"]}
    config["quantization_config"]["config_groups"]["attention"] = attention
    (folder / "config.json").write_text(json.dumps(config))
    assert read(folder)[1].keys() == {"a.q_proj"}
