"""Verdicts, compared with the rules of the engines' loaders on the peers' files and on what blockscale writes, and on
files that one engine or another refuses. Needs nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint import loader_rules
from checkpoint.tiny_int4 import AWQ, GPTQ, awq_parts, draw_linear
from torch import Tensor

from blockscale import api
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.conversion.gguf.families import FAMILIES
from blockscale.errors import CheckpointError
from blockscale.inspection.contents import inspect_folder
from blockscale.inspection.engines import CHECKED, GGUF_MODEL_TYPES, OBSTACLES, REMARKS, Verdict, verdicts
from blockscale.inspection.reading import read_folder
from blockscale.quantization.recipe import Recipe, Rule

from .changed_folders import GOLDEN, base_of, copied, edit_json, edit_settings, golden_names, written

SERVERS = ("vLLM", "SGLang", "TensorRT-LLM")
# The loader rules of TensorRT-LLM do not go into these algorithms, which it knows.
NOT_IN_RULES = ("W4A8_NVFP4_FP8", "NVFP4_AWQ", "FP8_PER_CHANNEL_PER_TOKEN")


def verdict(folder: Path, engine: str) -> Verdict:
    return next(found for found in inspect_folder(folder).engines if found.engine == engine)


def loads(folder: Path) -> dict[str, bool | None]:
    return {found.engine: found.loads for found in inspect_folder(folder).engines}


def says(folder: Path, engine: str) -> str:
    """Why an engine refuses."""
    found = verdict(folder, engine)
    assert found.loads is False, found
    return found.reason


def check_against_rules(folder: Path, base: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    for engine, load in loader_rules.ENGINES.items():
        found = verdict(folder, engine)
        if engine == "TensorRT-LLM" and settings.get("quant_algo") in NOT_IN_RULES:
            assert found.loads
            continue
        assert found.loads is is_taken(load, folder, base), f"{engine}: {found.reason}"
        assert found.loads or found.reason


def is_taken(load: Callable[[Path, Path], object], folder: Path, base: Path) -> bool:
    try:
        load(folder, base)
    except loader_rules.Refused:
        return False
    return True


# ---------------------------------------------------------------- against the loaders' rules


# Their tensors are not as the rules know them: norms that took scales in, scales in bf16.
BEYOND_RULES = ("modelopt_llama_nvfp4_awq_lite", "ct_llama_fp8_dynamic")


@pytest.mark.parametrize("name", [n for n in golden_names(quantized=True) if n not in BEYOND_RULES])
def test_verdicts_on_the_peers_files(name: str) -> None:
    check_against_rules(GOLDEN / name, GOLDEN / base_of(name))


@pytest.mark.parametrize("base", ["base_llama", "base_qwen3moe"])
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("recipe", ["nvfp4-w4a16", "mxfp4", "fp8"])
def test_verdicts_on_what_is_written_without_calibration(recipe: str, dialect: str, base: str, tmp_path: Path) -> None:
    api.quantize(GOLDEN / base, tmp_path / "q", recipe, dialect=dialect)
    check_against_rules(tmp_path / "q", GOLDEN / base)


@pytest.mark.parametrize("base", ["base_llama", "base_qwen3moe"])
@pytest.mark.parametrize(("dialect", "kv_cache"), [("modelopt", "fp8"), ("compressed-tensors", None)])
def test_verdicts_on_what_is_written_with_calibration(
    dialect: str,
    kv_cache: str | None,
    base: str,
    tmp_path: Path,
    with_tokenizer: Callable[[str], Path],
    calibration_text: Path,
) -> None:
    recipes: list[str | Recipe] = ["nvfp4"]
    if dialect == "modelopt":
        rules = (Rule("*.self_attn.*", weight="fp8", activation="fp8"),)
        recipes.append(Recipe("mixed", "nvfp4", "nvfp4", rules=rules))
    for i, recipe in enumerate(recipes):
        out = tmp_path / f"q{i}"
        api.quantize(
            with_tokenizer(base),
            out,
            recipe,
            dialect=dialect,
            kv_cache=kv_cache,
            calibration=[calibration_text],
            max_calibration_tokens=256,
        )
        check_against_rules(out, GOLDEN / base)


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("keep", ["*.layers.0.*", "*.o_proj", "*.down_proj"])
def test_verdicts_where_layers_are_kept(keep: str, dialect: str, tmp_path: Path) -> None:
    api.quantize(GOLDEN / "base_qwen3moe", tmp_path / "q", "nvfp4-w4a16", dialect=dialect, keep=[keep])
    check_against_rules(tmp_path / "q", GOLDEN / "base_qwen3moe")


def test_a_mixture_in_compressed_tensors(tmp_path: Path) -> None:
    rules = (Rule("*.self_attn.*", weight="fp8-channel", activation="fp8-token"),)
    recipe = Recipe("mixed", "nvfp4", rules=rules, dialect="compressed-tensors")
    api.quantize(GOLDEN / "base_llama", tmp_path / "q", recipe)
    check_against_rules(tmp_path / "q", GOLDEN / "base_llama")


# ---------------------------------------------------------------- one by one


def test_every_engine_has_its_tables() -> None:
    assert set(OBSTACLES) == set(REMARKS) == set(CHECKED)
    assert [found.engine for found in verdicts(read_folder(GOLDEN / "base_llama"))] == list(CHECKED)


def test_gguf_is_promised_for_what_convert_writes() -> None:
    assert set(GGUF_MODEL_TYPES) == set(FAMILIES)


def test_sixteen_bits_load_everywhere(with_tokenizer: Callable[[str], Path]) -> None:
    assert set(loads(with_tokenizer("base_llama")).values()) == {True}


def test_llama_cpp_wants_conversion_and_a_tokenizer(with_tokenizer: Callable[[str], Path]) -> None:
    assert "tokenizer" in says(GOLDEN / "modelopt_llama_nvfp4", "llama.cpp")
    found = verdict(with_tokenizer("modelopt_llama_nvfp4"), "llama.cpp")
    assert (found.loads, found.reason) == (True, "")
    assert found.after == "blockscale convert CKPT OUT.gguf --to gguf"
    assert "KV cache" in verdict(with_tokenizer("ct_llama_nvfp4_fp8kv"), "llama.cpp").reason
    assert "pre_quant_scale" in verdict(with_tokenizer("modelopt_llama_nvfp4_awq_lite"), "llama.cpp").reason


def test_llama_cpp_counts_what_its_blocks_do_not_fit(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    api.quantize(tiny_model("mixtral"), tmp_path / "q", "nvfp4-w4a16")  # K of w2 is 96
    found = verdict(tmp_path / "q", "llama.cpp")
    assert found.loads
    assert found.reason.startswith("8 weights whose K is no multiple of 64")


def test_an_architecture_without_gguf(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    api.quantize(tiny_model("deepseek_v3"), tmp_path / "q", "nvfp4-w4a16")
    assert "architecture" in says(tmp_path / "q", "llama.cpp")


@pytest.mark.parametrize("name", golden_names(quantized=True))
def test_transformers_reads_one_dialect(name: str) -> None:
    found = verdict(GOLDEN / name, "transformers")
    assert found.loads is name.startswith("ct_")
    assert "compressed-tensors" in found.reason


def test_transformers_gets_nvfp4_experts_wrong_and_others_right(tmp_path: Path) -> None:
    for recipe in ("nvfp4-w4a16", "mxfp4", "fp8"):
        api.quantize(GOLDEN / "base_qwen3moe", tmp_path / recipe, recipe, dialect="compressed-tensors")
    assert "thousands of times too large" in says(tmp_path / "nvfp4-w4a16", "transformers")
    assert verdict(tmp_path / "mxfp4", "transformers").loads
    assert verdict(tmp_path / "fp8", "transformers").loads


def test_awq_scales_of_inputs(tmp_path: Path) -> None:
    name = "modelopt_llama_nvfp4_awq_lite"
    assert loads(GOLDEN / name) | {"llama.cpp": None} == {
        "vLLM": False,
        "SGLang": True,
        "TensorRT-LLM": True,
        "transformers": False,
        "blockscale": True,
        "llama.cpp": None,
    }

    def on_query(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.q_proj.pre_quant_scale"] = torch.ones(64, dtype=torch.bfloat16)

    assert "fused q/k/v" in says(copied(name, tmp_path, on_query), "TensorRT-LLM")

    def on_expert(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.experts.0.down_proj.pre_quant_scale"] = torch.ones(32, dtype=torch.bfloat16)

    folder = copied("modelopt_qwen3moe_nvfp4", tmp_path, on_expert)
    for engine in SERVERS:
        assert "experts.0.down_proj" in says(folder, engine)


@pytest.mark.parametrize("family", ["llama4_text", "gpt_oss"])
def test_stacks_of_experts(
    family: str, tmp_path: Path, tiny_model: Callable[[str], Path], calibration_text: Path
) -> None:
    api.quantize(tiny_model(family), tmp_path / "w4a16", "nvfp4-w4a16")
    assert "stacked" in says(tmp_path / "w4a16", "SGLang")
    assert "NVFP4 activations" in says(tmp_path / "w4a16", "TensorRT-LLM")
    assert verdict(tmp_path / "w4a16", "vLLM").loads is (family == "llama4_text")
    api.quantize(
        tiny_model(family), tmp_path / "w4a4", "nvfp4", calibration=[calibration_text], max_calibration_tokens=256
    )
    assert verdict(tmp_path / "w4a4", "TensorRT-LLM").loads
    assert verdict(tmp_path / "w4a4", "blockscale").loads


def test_experts_of_several_formats(tmp_path: Path) -> None:
    """One expert in 16 bits: engines have one kernel for all."""
    base = loader_rules.read_tensors(GOLDEN / "base_qwen3moe")
    expert = "model.layers.1.mlp.experts.2"

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.startswith(expert)]:
            del tensors[name]
        tensors.update({n: t for n, t in base.items() if n.startswith(expert)})

    folder = copied("modelopt_qwen3moe_nvfp4", tmp_path, change)
    for engine in SERVERS:
        assert (
            says(folder, engine) == "wants all experts of a layer in one format: model.layers.1.mlp.experts has several"
        )
    assert verdict(folder, "blockscale").loads


def change_algorithm(folder: Path, name: str | None) -> None:
    edit_settings(folder, lambda settings: settings.update(quant_algo=name))
    edit_json(folder / "hf_quant_config.json", lambda config: config["quantization"].update(quant_algo=name))


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("NVFP4_SVD", (False, False, False)),
        ("W4A16_AWQ", (False, False, None)),
        ("FP8_PB_WO", (None, False, False)),
        ("MXFP8", (None, None, None)),
        ("nvfp4", (None, False, False)),
        (None, (False, False, False)),
    ],
)
def test_algorithms_that_blockscale_does_not_know(
    algorithm: str | None, expected: tuple[bool | None, ...], tmp_path: Path
) -> None:
    """An engine that knows one may load it; whether the tensors are right is not known here."""
    folder = copied("modelopt_llama_nvfp4", tmp_path)
    change_algorithm(folder, algorithm)
    found = loads(folder)
    assert tuple(found[engine] for engine in SERVERS) == expected
    assert found["blockscale"] is found["llama.cpp"] is False


def test_hf_quant_config_is_missing_or_all_there_is(tmp_path: Path) -> None:
    folder = copied("modelopt_llama_nvfp4", tmp_path / "a")
    (folder / "hf_quant_config.json").unlink()
    found = verdict(folder, "TensorRT-LLM")
    assert found.loads
    assert "hf_quant_config.json" in found.reason

    folder = copied("modelopt_llama_nvfp4", tmp_path / "b")
    edit_json(folder / "config.json", lambda config: config.pop("quantization_config"))
    assert all(loads(folder)[engine] for engine in SERVERS)
    edit_json(folder / "hf_quant_config.json", lambda config: config["quantization"].pop("kv_cache_quant_algo"))
    assert says(folder, "vLLM") == "wants kv_cache_quant_algo in hf_quant_config.json"
    assert verdict(folder, "SGLang").loads


def test_a_mixture_without_nvfp4(tmp_path: Path) -> None:
    folder = copied("modelopt_llama_fp8", tmp_path)
    names = [linear.weight.name for linear in inspect_folder(folder).linears]
    layers = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {name: {"quant_algo": "FP8"} for name in names}}
    edit_settings(folder, lambda settings: settings.update(layers))
    edit_json(folder / "hf_quant_config.json", lambda config: config["quantization"].update(layers))
    assert "W4AFP8" in says(folder, "SGLang")
    assert verdict(folder, "vLLM").loads


def test_fp8_rows_in_experts(tmp_path: Path) -> None:
    api.quantize(GOLDEN / "base_qwen3moe", tmp_path / "q", "fp8", dialect="modelopt")
    assert "one FP8 scale a tensor" in says(tmp_path / "q", "vLLM")


def test_groups_chosen_by_class_names(tmp_path: Path) -> None:
    folder = copied("ct_llama_nvfp4", tmp_path)

    def change(settings: dict[str, Any]) -> None:
        groups = settings["config_groups"]
        groups["group_1"] = {**groups["group_0"], "targets": ["re:.*o_proj"]}

    edit_settings(folder, change)
    assert "config_groups" in says(folder, "TensorRT-LLM")
    assert verdict(folder, "vLLM").loads


def test_int4_of_compressed_tensors_is_not_known_here(tmp_path: Path) -> None:
    folder = copied("ct_llama_nvfp4", tmp_path)
    edit_settings(folder, lambda s: s["config_groups"]["group_0"]["weights"].update(type="int", strategy="group"))
    found = loads(folder)
    assert [found[engine] for engine in (*SERVERS, "transformers")] == [None] * 4
    assert found["blockscale"] is False


@pytest.mark.parametrize("engine", [e for e in CHECKED if e not in ("blockscale", "llama.cpp")])
def test_methods_that_are_not_known(engine: str, tmp_path: Path) -> None:
    tensors = {"a.weight": torch.zeros(8, 8, dtype=torch.uint8)}
    folder = written(tmp_path / "m", tensors, {"quantization_config": {"quant_method": "hqq"}})
    assert verdict(folder, engine).loads is None
    assert "hqq" in verdict(folder, engine).reason
    assert says(folder, "blockscale") == "does not read weights quantized with hqq"


# ---------------------------------------------------------------- sources


@pytest.mark.parametrize(
    ("settings", "readable"),
    [
        (AWQ, True),
        ({**AWQ, "version": "gemv"}, False),
        ({**AWQ, "bits": 3}, False),
        ({**GPTQ, "bits": 3}, False),
        ({**GPTQ, "checkpoint_format": "marlin"}, False),
    ],
)
def test_integers_of_other_tools(settings: dict[str, Any], readable: bool, tmp_path: Path) -> None:
    parts = awq_parts(draw_linear(16, 64, 32))
    folder = written(tmp_path / "m", parts, {"model_type": "llama", "quantization_config": settings})
    assert verdict(folder, "vLLM").loads
    assert verdict(folder, "TensorRT-LLM").loads is False
    assert verdict(folder, "blockscale").loads is readable
    if not readable:
        assert says(folder, "llama.cpp") == says(folder, "blockscale")
        with pytest.raises(CheckpointError):
            open_checkpoint(folder)


@pytest.mark.parametrize(("block", "readable"), [([128, 128], True), ([64, 64], False), (None, False)])
def test_fp8_in_blocks(block: Any, readable: bool, tmp_path: Path) -> None:
    tensors = {"a.weight": torch.zeros(128, 128).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(1, 1)}
    settings = {"quant_method": "fp8", "weight_block_size": block}
    folder = written(tmp_path / "m", tensors, {"quantization_config": settings})
    assert verdict(folder, "vLLM").loads
    assert verdict(folder, "blockscale").loads is readable
    assert verdict(folder, "TensorRT-LLM").loads is readable


# ---------------------------------------------------------------- faults


def scaled(name: str, suffix: str, factor: float) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{name}.{suffix}"] *= factor

    return change


def test_a_weight_scale_of_its_own_is_wrong_where_engines_fuse(tmp_path: Path) -> None:
    change = scaled("model.layers.1.mlp.up_proj", "weight_scale_2", 4)
    folder = copied("modelopt_llama_nvfp4", tmp_path, change)
    for engine in SERVERS:
        assert says(folder, engine).startswith(
            "BS101 fused-global-scale-mismatch: model.layers.1.mlp.gate_proj+up_proj"
        )
    assert verdict(folder, "blockscale").loads


def test_an_input_scale_of_its_own_stops_one_engine(tmp_path: Path) -> None:
    folder = copied("modelopt_llama_nvfp4", tmp_path, scaled("model.layers.1.mlp.up_proj", "input_scale", 2))
    assert says(folder, "TensorRT-LLM").startswith("BS102 fused-input-scale-mismatch")
    assert verdict(folder, "vLLM").loads
    assert verdict(folder, "SGLang").loads
    expert = scaled("model.layers.1.mlp.experts.0.up_proj", "input_scale", 2)
    assert verdict(copied("modelopt_qwen3moe_nvfp4", tmp_path, expert), "TensorRT-LLM").loads


def without(*names: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in names:
            del tensors[name]

    return change


LAYER = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("change", "label"),
    [
        (without(f"{LAYER}.input_scale"), "BS112 missing-input-scale"),
        (without(f"{LAYER}.weight_scale_2"), "BS111 missing-global-scale"),
        (without(f"{LAYER}.weight_scale"), "BS110 missing-block-scale"),
        (scaled(LAYER, "weight_scale_2", 0), "BS107 bad-global-scale"),
        (lambda tensors: tensors.update({"x.weight_scale_2": torch.ones(())}), "BS113 loose-scale"),
    ],
)
def test_errors_stop_every_engine(change: Callable[[dict[str, Tensor]], None], label: str, tmp_path: Path) -> None:
    folder = copied("modelopt_llama_nvfp4", tmp_path, change)
    found = inspect_folder(folder)
    for engine in (*SERVERS, "blockscale"):
        assert says(folder, engine).startswith(label)
    assert label.split()[1] in {fault.rule for fault in found.faults}


def test_nan_among_block_scales_is_seen_when_they_are_read(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}.weight_scale"].view(torch.uint8)[0, 0] = 0x7F

    folder = copied("modelopt_llama_nvfp4", tmp_path, change)
    assert verdict(folder, "vLLM").loads
    found = {v.engine: v for v in inspect_folder(folder, with_scales=True).engines}
    assert found["vLLM"].reason == f"BS104 nan-block-scale: {LAYER}"


def test_files_that_are_missing_stop_every_engine(tmp_path: Path) -> None:
    folder = copied("modelopt_llama_nvfp4", tmp_path)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(loads(folder).values()) == {False}


def test_a_head_that_is_not_listed_stops_engines(tmp_path: Path) -> None:
    folder = copied("modelopt_llama_nvfp4", tmp_path)
    edit_settings(folder, lambda settings: settings["ignore"].remove("lm_head"))
    edit_json(folder / "hf_quant_config.json", lambda c: c["quantization"]["exclude_modules"].remove("lm_head"))
    for engine in SERVERS:
        assert says(folder, engine).startswith("BS305 kept-but-not-excluded")
    assert verdict(folder, "blockscale").loads


def test_a_cache_scale_without_its_pair(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.v_proj.v_scale"
    folder = copied("modelopt_llama_nvfp4_fp8kv", tmp_path, without(name))
    for engine in (*SERVERS, "blockscale"):
        assert says(folder, engine).startswith("BS114 one-sided-kv-scale")


def test_a_cache_without_scales_runs_with_ones(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith((".k_scale", ".v_scale"))]:
            del tensors[name]

    folder = copied("modelopt_llama_nvfp4_fp8kv", tmp_path, change)
    for engine in SERVERS:
        assert verdict(folder, engine).loads
        assert "1.0 is taken" in verdict(folder, engine).reason
    assert "1.0" not in verdict(GOLDEN / "modelopt_llama_nvfp4_fp8kv", "vLLM").reason


def test_a_cache_of_4_bits(tmp_path: Path) -> None:
    """Model Optimizer announces it in config.json by a name, which vLLM passes over."""
    folder = copied("modelopt_llama_nvfp4_fp8kv", tmp_path)
    edit_settings(folder, lambda settings: settings.update(kv_cache_scheme="NVFP4"))
    edit_json(folder / "hf_quant_config.json", lambda c: c["quantization"].update(kv_cache_quant_algo="NVFP4"))
    assert all(loads(folder)[engine] for engine in SERVERS)
    assert "KV cache stays in 16 bits" in verdict(folder, "vLLM").reason
    assert "KV cache" not in verdict(folder, "SGLang").reason


def test_what_blockscale_promises_to_read_it_opens(tmp_path: Path) -> None:
    for name in golden_names():
        assert verdict(GOLDEN / name, "blockscale").loads
        open_checkpoint(GOLDEN / name)
