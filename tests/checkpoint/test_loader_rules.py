"""Engines load what is written: the rules of their loaders, applied to whole folders."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from blockscale import api
from blockscale.quantization.recipe import Recipe, Rule

from .files import GOLDEN, edit_json
from .loader_rules import ENGINES, Refused

BASES = ["base_llama", "base_qwen3moe"]


def base_of(name: str) -> Path:
    return GOLDEN / ("base_qwen3moe" if "qwen3moe" in name else "base_llama")


# ---------------------------------------------------------------- the rules themselves, on the peers' own files


GOLDEN_ON_ENGINES = {
    "modelopt_llama_fp8": {"vLLM", "SGLang", "TensorRT-LLM"},
    "modelopt_llama_mixed_fp8attn_nvfp4mlp_fp8kv": {"vLLM", "SGLang", "TensorRT-LLM"},
    "modelopt_llama_nvfp4": {"vLLM", "SGLang", "TensorRT-LLM"},
    "modelopt_llama_nvfp4_fp8kv": {"vLLM", "SGLang", "TensorRT-LLM"},
    "modelopt_llama_w4a16_nvfp4": {"vLLM", "SGLang", "TensorRT-LLM"},
    "modelopt_qwen3moe_nvfp4": {"vLLM", "SGLang", "TensorRT-LLM"},
    "modelopt_llama_w4a8_nvfp4_fp8": set(),
    "ct_llama_mxfp4": {"vLLM"},
    "ct_llama_nvfp4": {"vLLM", "SGLang", "TensorRT-LLM"},
    "ct_llama_nvfp4_fp8kv": {"vLLM", "SGLang", "TensorRT-LLM"},
    "ct_llama_nvfp4a16": {"vLLM", "SGLang"},
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", GOLDEN_ON_ENGINES)
def test_the_rules_take_the_peers_own_files(name: str, engine: str) -> None:
    load = ENGINES[engine]
    if engine not in GOLDEN_ON_ENGINES[name]:
        with pytest.raises(Refused):
            load(GOLDEN / name, base_of(name))
        return
    methods = load(GOLDEN / name, base_of(name))
    assert methods["lm_head"] == "NONE"
    assert methods["model.layers.1.self_attn.qkv_proj"] != "NONE"


def broken(folder: Path, how: str) -> None:
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    if how == "a scale of its own":
        stored[f"{name}.weight_scale_2"] *= 2
    elif how == "a missing input scale":
        del stored[f"{name}.input_scale"]
    elif how == "a scale that is NaN":
        stored[f"{name}.weight_scale"].view(-1)[0] = float("nan")
    elif how == "a scale of one dimension":
        stored[f"{name}.weight_scale_2"] = stored[f"{name}.weight_scale_2"].reshape(1)
    elif how == "a tensor too many":
        stored[f"{name}.weight_scale_3"] = stored[f"{name}.weight_scale_2"].clone()
    save_file(stored, folder / "model.safetensors")
    for file, section, key in (
        ("config.json", "quantization_config", "ignore"),
        ("hf_quant_config.json", "quantization", "exclude_modules"),
    ):
        if how == "a head that is not listed":
            edit_json(folder / file, lambda c, s=section, k=key: c[s][k].remove("lm_head"))
        elif how == "a quantized layer that is listed":
            edit_json(folder / file, lambda c, s=section, k=key: c[s][k].append("model.layers.1.mlp.down_proj"))
        elif how == "a pattern that takes too much":
            edit_json(folder / file, lambda c, s=section, k=key: c[s][k].append("model.layers.1*"))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "how",
    [
        "a scale of its own",
        "a missing input scale",
        "a scale that is NaN",
        "a scale of one dimension",
        "a tensor too many",
        "a head that is not listed",
        "a quantized layer that is listed",
        "a pattern that takes too much",
    ],
)
def test_the_rules_find_what_is_wrong(how: str, engine: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "modelopt_llama_nvfp4", tmp_path / "x"))
    broken(folder, how)
    with pytest.raises(AssertionError):
        ENGINES[engine](folder, GOLDEN / "base_llama")


# ---------------------------------------------------------------- what blockscale writes

# recipe and dialect -> engines that take a dense model, and one with experts
WITHOUT_CALIBRATION: dict[tuple[str, str], tuple[set[str], set[str]]] = {
    ("nvfp4", "modelopt"): ({"vLLM", "SGLang", "TensorRT-LLM"}, {"vLLM", "SGLang", "TensorRT-LLM"}),
    ("nvfp4", "compressed-tensors"): ({"vLLM", "SGLang"}, {"vLLM", "SGLang"}),
    ("nvfp4-w4a16", "modelopt"): ({"vLLM", "SGLang", "TensorRT-LLM"}, {"vLLM", "SGLang", "TensorRT-LLM"}),
    ("nvfp4-w4a16", "compressed-tensors"): ({"vLLM", "SGLang"}, {"vLLM", "SGLang"}),
    ("mxfp4", "modelopt"): (set(), set()),
    ("mxfp4", "compressed-tensors"): ({"vLLM"}, {"vLLM"}),
    ("fp8", "modelopt"): ({"vLLM"}, set()),
    ("fp8", "compressed-tensors"): ({"vLLM", "SGLang", "TensorRT-LLM"}, {"vLLM", "SGLang", "TensorRT-LLM"}),
}


def check_engines(folder: Path, base: Path, engines: set[str]) -> dict[str, str]:
    """Loads with every engine; the methods, which all that take it agree on."""
    found = {}
    for engine, load in ENGINES.items():
        if engine in engines:
            found[engine] = load(folder, base)
        else:
            with pytest.raises(Refused):
                load(folder, base)
    methods = list(found.values())
    assert all(m == methods[0] for m in methods)
    return methods[0] if methods else {}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(("recipe", "dialect"), WITHOUT_CALIBRATION)
def test_recipes_without_calibration(recipe: str, dialect: str, base: str, tmp_path: Path) -> None:
    api.quantize(GOLDEN / base, tmp_path / "out", recipe, dialect=dialect)
    engines = WITHOUT_CALIBRATION[recipe, dialect][base == "base_qwen3moe"]
    methods = check_engines(tmp_path / "out", GOLDEN / base, engines)
    for prefix, method in methods.items():
        is_kept = prefix == "lm_head" or prefix.endswith(".gate")
        assert (method == "NONE") == is_kept, prefix


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("kv_cache", [None, "fp8"])
def test_four_bits_all_through(
    kv_cache: str | None,
    dialect: str,
    base: str,
    tmp_path: Path,
    with_tokenizer: Callable[[str], Path],
    calibration_text: Path,
) -> None:
    out = tmp_path / "out"
    api.quantize(
        with_tokenizer(base),
        out,
        "nvfp4",
        dialect=dialect,
        kv_cache=kv_cache,
        calibration=[calibration_text],
        max_calibration_tokens=256,
    )
    methods = check_engines(out, GOLDEN / base, set(ENGINES))
    assert set(methods.values()) == {"NONE", "NVFP4" if dialect == "modelopt" else "CT_NVFP4"}
    names = {"modelopt": (".self_attn.k_proj.k_scale", ".self_attn.v_proj.v_scale")}.get(
        dialect, (".self_attn.k_scale", ".self_attn.v_scale")
    )
    cache = {n for n in load_file(out / "model.safetensors") if n.endswith(("k_scale", "v_scale"))}
    assert cache == ({f"model.layers.{i}{name}" for i in range(2) for name in names} if kv_cache else set())


FP8_DYNAMIC = {"weight": "fp8-channel", "activation": "fp8-token"}
FP8_STATIC = {"weight": "fp8", "activation": "fp8"}


@pytest.mark.parametrize("base", BASES)
def test_a_mixed_recipe_in_compressed_tensors(base: str, tmp_path: Path) -> None:
    recipe = Recipe("mixed", "nvfp4", rules=(Rule("*.self_attn.*", **FP8_DYNAMIC),), dialect="compressed-tensors")
    api.quantize(GOLDEN / base, tmp_path / "out", recipe)
    methods = check_engines(tmp_path / "out", GOLDEN / base, {"vLLM", "SGLang"})
    assert {p: m for p, m in methods.items() if m == "NONE"}.keys() <= {"lm_head"} | {p for p in methods if "gate" in p}
    assert {m for p, m in methods.items() if "self_attn" in p} == {"CT_FP8"}
    assert {m for p, m in methods.items() if p.endswith(("gate_up_proj", "experts"))} == {"CT_NVFP4A16"}


@pytest.mark.parametrize("base", BASES)
def test_a_mixed_recipe_in_modelopt(
    base: str, tmp_path: Path, with_tokenizer: Callable[[str], Path], calibration_text: Path
) -> None:
    recipe = Recipe("mixed", "nvfp4", "nvfp4", rules=(Rule("*.self_attn.*", **FP8_STATIC),), kv_cache="fp8")
    out = tmp_path / "out"
    api.quantize(with_tokenizer(base), out, recipe, calibration=[calibration_text], max_calibration_tokens=256)
    methods = check_engines(out, GOLDEN / base, set(ENGINES))
    assert {m for p, m in methods.items() if "self_attn" in p} == {"FP8"}
    assert {m for p, m in methods.items() if p.endswith(("gate_up_proj", "experts"))} == {"NVFP4"}
    assert json.loads((out / "hf_quant_config.json").read_text())["quantization"]["kv_cache_quant_algo"] == "FP8"


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize(
    "keep",
    [["*.layers.0.*"], ["*.self_attn.*"], ["*.o_proj"], ["model.layers.1.mlp"], ["*.down_proj"], ["*.q_proj"]],
    ids=lambda keep: keep[0],
)
def test_layers_that_are_kept(keep: list[str], dialect: str, base: str, tmp_path: Path) -> None:
    """Fused layers and the experts of a layer are listed so that each engine leaves them whole."""
    api.quantize(GOLDEN / base, tmp_path / "out", "nvfp4-w4a16", dialect=dialect, keep=keep)
    engines = {"vLLM", "SGLang", "TensorRT-LLM"} if dialect == "modelopt" else {"vLLM", "SGLang"}
    methods = check_engines(tmp_path / "out", GOLDEN / base, engines)
    assert {"NONE", "W4A16_NVFP4" if dialect == "modelopt" else "CT_NVFP4A16"} == set(methods.values())
