"""What a recipe may ask for beside its method: other formats by rule, kept layers, caches, dialects, branches."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import blockscale as bs
from blockscale.checkpoint.linear import W4A4, W8A8, W8A8_DYNAMIC
from blockscale.checkpoint.load import load_kv_scales
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.errors import RecipeError
from blockscale.quantization.recipe import load_recipe, recipe_from_dict

from .running import is_equal, quantize, stored_linears, windows
from .test_run import problems

Find = Callable[[str], Path]
BEST = {"name": "mine", "weight": "nvfp4", "activation": "nvfp4", "scale": "sweep", "method": "best"}


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("family", ["llama", "cohere"])
def test_fp8_by_rule(family: str, dialect: str, tiny_model: Find, tmp_path: Path) -> None:
    """Its bytes are those of a recipe without a method, but for what smoothing does to the linear before."""
    fp8 = {"weight": "fp8", "activation": "fp8"} if dialect == "modelopt" else {}
    fp8 = fp8 or {"weight": "fp8-channel", "activation": "fp8-token"}
    rules = [{"match": f"*.{leaf}", **fp8} for leaf in ("gate_proj", "up_proj")]
    recipe = recipe_from_dict({**BEST, "method": "gptq", "dialect": dialect, "rules": rules})
    quantize(tiny_model(family), tmp_path / "out", recipe)
    assert problems(tmp_path / "out") == []
    found = stored_linears(tmp_path / "out")
    plain = load_file(tiny_model(family) / "model.safetensors")
    for name, linear in found.items():
        is_fp8 = name.endswith(("gate_proj", "up_proj"))
        assert linear.scheme == ((W8A8 if dialect == "modelopt" else W8A8_DYNAMIC) if is_fp8 else W4A4)
        if is_fp8 and dialect != "modelopt":
            expected = bs.quantize_tensor(plain[f"{name}.weight"], "fp8-channel")
            assert torch.equal(linear.weight.packed.view(torch.uint8), expected.packed.view(torch.uint8))
        if is_fp8:
            error = linear.weight.dequantize(torch.float32) - plain[f"{name}.weight"].float()
            assert error.norm() < 0.04 * plain[f"{name}.weight"].float().norm()
    gate, up = (found[f"model.layers.0.mlp.{leaf}"] for leaf in ("gate_proj", "up_proj"))
    if dialect == "modelopt":
        assert gate.input_global_scale == up.input_global_scale
        q = found["model.layers.0.self_attn.q_proj"].input_global_scale
        if family == "cohere":  # one input for both; amax / 448 and 1.0 * amax / 2688
            assert gate.input_global_scale.item() == pytest.approx(6 * q.item(), rel=1e-5)


@pytest.mark.parametrize("method", ["best", "best-arc"])
def test_smoothing_beside_fp8(method: str, tiny_model: Find, tmp_path: Path) -> None:
    """The layer before may be scaled too; what is read back is still the model."""
    rules = [{"match": "*.down_proj", "weight": "fp8", "activation": "fp8"}]
    recipe = recipe_from_dict({**BEST, "method": method, "activation_scale": "four_over_six", "rules": rules})
    model = tiny_model("llama")
    found = quantize(model, tmp_path / "out", recipe, kv_cache="fp8")
    assert problems(tmp_path / "out") == []
    assert {layer.smoothing for name, layer in found.layers.items() if name.endswith("down_proj")} == {None}
    text = tmp_path / "text.txt"
    text.write_text("".join(map(chr, windows(16, 32).flatten().tolist())))
    mixed = bs.evaluate(tmp_path / "out", reference=model, text=[text], window=64)
    quantize(
        model, tmp_path / "plain", recipe_from_dict({**BEST, "method": method, "activation_scale": "four_over_six"})
    )
    plain = bs.evaluate(tmp_path / "plain", reference=model, text=[text], window=64)
    assert mixed.kl_mean < plain.kl_mean


def test_the_same_codes_in_both_dialects(tiny_model: Find, tmp_path: Path) -> None:
    for dialect in ("modelopt", "compressed-tensors"):
        quantize(tiny_model("qwen3_moe"), tmp_path / dialect, ids=windows(9, 16), dialect=dialect)
        assert problems(tmp_path / dialect) == []
    a, b = (stored_linears(tmp_path / dialect) for dialect in ("modelopt", "compressed-tensors"))
    assert set(a) == set(b)
    for name, linear in a.items():
        assert torch.equal(linear.weight.packed, b[name].weight.packed)
        assert torch.equal(linear.weight.block_scale.view(torch.uint8), b[name].weight.block_scale.view(torch.uint8))
        # stored as its reciprocal in one of them
        torch.testing.assert_close(linear.input_global_scale, b[name].input_global_scale, rtol=3e-7, atol=0)


def test_kept_layers(tiny_model: Find, tmp_path: Path) -> None:
    """They stay to the byte, the norms before them too, and run in both streams."""
    model = tiny_model("llama")
    quantize(model, tmp_path / "out", ids=windows(9, 16), keep=["*.layers.0.*", "*.o_proj"])
    assert problems(tmp_path / "out") == []
    source, found = load_file(model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    linears = stored_linears(tmp_path / "out")
    assert set(linears) == {
        f"model.layers.1.{name}_proj"
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up", "mlp.down")
    }
    for name, tensor in source.items():
        if ".layers.0." in name or name.endswith(("o_proj.weight", "embed_tokens.weight", "model.norm.weight")):
            assert torch.equal(found[name], tensor), name
    assert not torch.equal(
        found["model.layers.1.input_layernorm.weight"], source["model.layers.1.input_layernorm.weight"]
    )
    # its rows would have been divided for o_proj, which is kept
    assert linears["model.layers.1.self_attn.v_proj"].scheme == W4A4


@pytest.mark.parametrize("kv_cache", ["fp8", "nvfp4"])
def test_caches_of_the_quantized_model(kv_cache: str, tiny_model: Find, tmp_path: Path) -> None:
    """Scales of every layer, near those that the 16-bit model has; smoothing may have divided the values."""
    model = tiny_model("llama")
    quantize(model, tmp_path / "out", "nvfp4-gptq", kv_cache=kv_cache)
    quantize(model, tmp_path / "smoothed", "nvfp4-best", kv_cache=kv_cache)
    text = tmp_path / "text.txt"
    text.write_text("".join(map(chr, windows().flatten().tolist())))
    bs.quantize(model, tmp_path / "plain", "nvfp4", calibration=[text], kv_cache=kv_cache)
    for folder in ("out", "smoothed"):
        assert problems(tmp_path / folder) == []
    found, plain = (
        {name: load_kv_scales(infos) for name, infos in open_checkpoint(tmp_path / f).quantized.kv_tensors.items()}
        for f in ("out", "plain")
    )
    assert set(found) == set(plain) == {f"model.layers.{i}.self_attn" for i in range(2)}
    for name, scales in found.items():
        assert scales.key.item() == pytest.approx(plain[name].key.item(), rel=0.3)
        assert scales.value.item() == pytest.approx(plain[name].value.item(), rel=0.3)


def test_weights_only(tiny_model: Find, tmp_path: Path) -> None:
    """No input has a scale, and none is rounded while the weights are found."""
    found = quantize(tiny_model("llama"), tmp_path / "out", "nvfp4-w4a16-best", windows(9, 16))
    assert problems(tmp_path / "out") == []
    assert all(linear.input_global_scale is None for linear in stored_linears(tmp_path / "out").values())
    assert {layer.activation for layer in found.layers.values()} == {None}
    assert {layer.input_amax for layer in found.layers.values()} == {None}
    assert "activation_scale" not in json.loads((tmp_path / "out" / "blockscale.json").read_text())


def test_branches_read_back(tiny_model: Find, tmp_path: Path) -> None:
    """Not of experts in a stack, whose kernels know none."""
    shapes = {}
    for recipe in ("nvfp4-svdquant", "nvfp4-best-arc"):
        quantize(tiny_model("gpt_oss"), tmp_path / recipe, recipe, windows(9, 16))
        assert problems(tmp_path / recipe) == []
        for name, linear in stored_linears(tmp_path / recipe).items():
            branch = linear.low_rank or linear.residual
            assert (branch is None) == (".experts." in name)
            if linear.low_rank is not None:
                shapes[name] = linear.low_rank.up.shape[0], linear.low_rank.rank
            if linear.residual is not None:
                assert linear.residual.weight.shape == (linear.weight.shape[0], 64)
                assert linear.residual.channels.unique().numel() == 64
    assert shapes["model.layers.0.self_attn.k_proj"] == (32, 32)


@pytest.mark.parametrize("recipe", ["nvfp4-svdquant", "nvfp4-best-arc", "nvfp4-w4a16-svdquant"])
def test_a_linear_outside_the_layers_has_no_branch(recipe: str, tiny_model: Find, tmp_path: Path) -> None:
    """Gemma 4 has one before them."""
    quantize(tiny_model("gemma4_text"), tmp_path / "out", recipe, windows(9, 16))
    assert problems(tmp_path / "out") == []
    found = stored_linears(tmp_path / "out")
    outside = found.pop("model.per_layer_model_projection")
    assert outside.low_rank is outside.residual is None
    assert all(linear.low_rank or linear.residual for linear in found.values())


def test_a_head_in_4_bits(tiny_model: Find, tmp_path: Path) -> None:
    """By name. It is stored as without a method, and its inputs cannot be rounded: nobody has seen them."""
    head = {"match": "lm_head", "weight": "nvfp4", "scale": "sweep"}
    model = tiny_model("llama")
    quantize(model, tmp_path / "out", recipe_from_dict({**BEST, "rules": [head]}), windows(9, 16))
    (warning,) = problems(tmp_path / "out")  # that some engines do not take such a head
    assert warning.startswith("BS312")
    expected = bs.quantize_tensor(load_file(model / "model.safetensors")["lm_head.weight"], scale="sweep")
    assert torch.equal(stored_linears(tmp_path / "out")["lm_head"].weight.packed, expected.packed)
    rounded = recipe_from_dict({**BEST, "rules": [{**head, "activation": "nvfp4"}]})
    with pytest.raises(RecipeError, match="lm_head: its input scale cannot be calibrated"):
        quantize(model, tmp_path / "other", rounded, windows(9, 16))


def test_the_same_run_twice(tiny_model: Find, tmp_path: Path) -> None:
    for name in ("a", "b"):
        quantize(tiny_model("mixtral"), tmp_path / name, ids=windows(9, 16))
    a, b = stored_linears(tmp_path / "a"), stored_linears(tmp_path / "b")
    assert all(is_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("method", "gtpq"),
        ("method", ""),
        ("method", ["gptq"]),
        ("method", 3),
        ("activation_scale", "4over6"),
        ("activation_scale", None),
        ("activation_scale", True),
        ("activation-scale", "amax"),
    ],
)
def test_settings_that_make_no_sense(setting: str, value: object, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps({**BEST, setting: value}))  # JSON is YAML
    with pytest.raises(RecipeError, match=setting) as e:
        load_recipe(file)
    assert str(e.value)
    assert isinstance(value, list | int) or "four_over_six" in e.value.hint or "gptq" in e.value.hint or "-" in setting
