"""Conversion as a whole: any scale, any layout of files, what is refused, and what is left when it is stopped."""

import fnmatch
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.child import folder_bytes, killed_at_line, run_child
from checkpoint.files import GOLDEN, changed, names, same
from checkpoint.files import tensors as read_tensors
from checkpoint.loader_rules import ENGINES
from faults.raw import split
from hypothesis import given, settings
from hypothesis import strategies as st

import blockscale
from blockscale import api
from blockscale.checkpoint import output
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.cli.main import main
from blockscale.errors import BlockscaleError, CheckpointError, NonFiniteError, OutputError, UsageError

from .folders import config, kv_scales, linears, others, write
from .gguf_models import make_model
from .test_to_dialect import ulps

Find = Callable[[str], Path]
MODELOPT, CT = "modelopt", "compressed-tensors"
NVFP4 = GOLDEN / "modelopt_llama_nvfp4"


# ---------------------------------------------------------------- scales of every size


def with_global_scales(folder: Path, scales: list[float]) -> Path:
    """A modelopt checkpoint of one linear a scale."""
    content = {"lm_head.weight": torch.ones(4, 16).bfloat16()}
    for i, scale in enumerate(scales):
        name = f"model.layers.{i}.mlp.down_proj"
        content[f"{name}.weight"] = torch.full((1, 8), 0x21, dtype=torch.uint8)
        content[f"{name}.weight_scale"] = torch.ones(1, 1).to(torch.float8_e4m3fn)
        content[f"{name}.weight_scale_2"] = torch.tensor(scale, dtype=torch.float32)
        content[f"{name}.input_scale"] = torch.tensor(scale, dtype=torch.float32)
    quantization = {"quant_method": MODELOPT, "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
    return write(folder, content, {"dtype": "bfloat16", "quantization_config": quantization})


def drawn_scales(count: int) -> list[float]:
    """Every mantissa alike, exponents over all of fp32's normal numbers that have a normal reciprocal."""
    generator = torch.Generator().manual_seed(11)
    mantissas = torch.randint(0, 1 << 23, (count,), generator=generator)
    exponents = torch.randint(2, 252, (count,), generator=generator)
    return ((exponents << 23) | mantissas).int().view(torch.float32).tolist()


def test_a_global_scale_comes_back_to_a_unit_in_the_last_place(tmp_path: Path) -> None:
    edges = [1.0, 2.0**-126, 2.0**126, 3.0, 1 / 3, 0.1, 2.0 - 2.0**-23, 1 + 2.0**-23, 4.5e-5, 1e-30, 1e30]
    scales = [*edges, *drawn_scales(400)]
    api.convert(with_global_scales(tmp_path / "a", scales), tmp_path / "b", CT)
    api.convert(tmp_path / "b", tmp_path / "c", MODELOPT)
    there, back = read_tensors(tmp_path / "b"), read_tensors(tmp_path / "c")
    moved = 0
    for i, scale in enumerate(scales):
        name = f"model.layers.{i}.mlp.down_proj"
        exact = 1 / torch.tensor(scale, dtype=torch.float32).double()
        for key, reverse in (("weight_scale_2", "weight_global_scale"), ("input_scale", "input_global_scale")):
            assert same(there[f"{name}.{reverse}"], exact.float().reshape(1))  # correctly rounded
            distance = ulps(back[f"{name}.{key}"].item(), scale)
            assert distance <= 1
            moved += distance
    assert 0 < moved < len(scales)  # some scales are no reciprocal's reciprocal at all


@settings(max_examples=12, deadline=None)
@given(scales=st.lists(st.floats(2.0**-126, 2.0**126, width=32), min_size=1, max_size=30))
def test_any_global_scale_there_and_back(scales: list[float], tmp_path_factory: pytest.TempPathFactory) -> None:
    parent = tmp_path_factory.mktemp("scales")
    api.convert(with_global_scales(parent / "a", scales), parent / "b", CT)
    api.convert(parent / "b", parent / "c", MODELOPT)
    back = read_tensors(parent / "c")
    for i, scale in enumerate(scales):
        for key in ("weight_scale_2", "input_scale"):
            assert ulps(back[f"model.layers.{i}.mlp.down_proj.{key}"].item(), scale) <= 1


@pytest.mark.parametrize("scale", [2.0**-130, 2.0**127 * 1.3, 2.0**-149])
def test_a_scale_without_a_reciprocal_is_refused(scale: float, tmp_path: Path) -> None:
    source = with_global_scales(tmp_path / "a", [1.0, scale])
    with pytest.raises(CheckpointError, match=r"layers\.1.*has no reciprocal") as refused:
        api.convert(source, tmp_path / "b", CT)
    assert "--to bf16" in refused.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert api.convert(source, tmp_path / "c", MODELOPT).exact  # in its own dialect it is copied


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("name", [*names("modelopt"), *names("ct")])
def test_written_anew_in_the_same_dialect(name: str, tmp_path: Path) -> None:
    """Every tensor byte for byte, whatever it is, and configs that say the same."""
    dialect = MODELOPT if name.startswith("modelopt") else CT
    assert api.convert(GOLDEN / name, tmp_path / "out", dialect).exact
    before, after = read_tensors(GOLDEN / name), read_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(same(tensor, after[n]) for n, tensor in before.items())
    ours, theirs = (open_checkpoint(folder).quantized for folder in (tmp_path / "out", GOLDEN / name))
    assert ours is not None
    assert theirs is not None
    assert {n: x.scheme for n, x in ours.linears.items()} == {n: x.scheme for n, x in theirs.linears.items()}
    found, expected = (said(config(folder)["quantization_config"]) for folder in (tmp_path / "out", GOLDEN / name))
    assert found == expected


def said(quantization: dict[str, Any]) -> dict[str, Any]:
    """A config without the order of its groups, and without what only says how a scale was found."""

    def plain(value: Any) -> Any:
        return {k: plain(v) for k, v in value.items() if k != "observer"} if isinstance(value, dict) else value

    groups = [plain({**g, "targets": sorted(g["targets"])}) for g in quantization.get("config_groups", {}).values()]
    keys = ("quant_algo", "format", "kv_cache_scheme", "quantized_layers")
    rest = {key: plain(quantization.get(key)) for key in keys}
    return {**rest, "groups": sorted(groups, key=lambda group: str(group["targets"]))}


@pytest.mark.parametrize("to", [CT, "bf16"])
def test_shards_make_no_difference(to: str, tmp_path: Path) -> None:
    sharded = changed("modelopt_qwen3moe_nvfp4", tmp_path)
    split(sharded, 3)
    api.convert(GOLDEN / "modelopt_qwen3moe_nvfp4", tmp_path / "one", to)
    api.convert(sharded, tmp_path / "two", to)
    first, second = read_tensors(tmp_path / "one"), read_tensors(tmp_path / "two")
    assert first.keys() == second.keys()
    assert all(same(tensor, second[n]) for n, tensor in first.items())
    settings = [config(tmp_path / name) for name in ("one", "two")]
    for setting in settings:  # lists follow the order of the files
        setting.get("quantization_config", {"ignore": []})["ignore"].sort()
    assert settings[0] == settings[1]


def test_a_fused_group_spread_over_shards_keeps_its_lists(tmp_path: Path) -> None:
    sharded = changed("modelopt_llama_mixed_fp8attn_nvfp4mlp_fp8kv", tmp_path)
    split(sharded, 4)
    api.convert(sharded, tmp_path / "out", CT)
    groups = config(tmp_path / "out")["quantization_config"]["config_groups"].values()
    assert {target for group in groups for target in group["targets"]} == set(linears(tmp_path / "out"))


def test_lists_are_made_from_the_tensors(tmp_path: Path) -> None:
    """Wildcards and patterns of one dialect become what the other has; entries that meant nothing are gone."""

    def odd_list(settings: dict[str, Any]) -> None:
        settings["quantization_config"]["ignore"] = ["re:.*lm_head", "re:model[.]visual.*", "model.nothing"]

    source = changed("ct_llama_nvfp4", tmp_path, config=odd_list)
    api.convert(source, tmp_path / "out", MODELOPT)
    assert config(tmp_path / "out")["quantization_config"]["ignore"] == ["lm_head", "model.embed_tokens"]
    nested = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    assert nested["exclude_modules"] == ["lm_head", "model.embed_tokens"]


def test_a_tower_is_one_pattern_in_either_dialect(tmp_path: Path) -> None:
    def with_tower(content: dict[str, torch.Tensor]) -> None:
        content["model.visual.blocks.0.attn.qkv.weight"] = torch.ones(8, 8).bfloat16()
        content["model.visual.merger.weight"] = torch.ones(8, 8).bfloat16()

    source = changed("modelopt_llama_nvfp4", tmp_path, tensors=with_tower)
    api.convert(source, tmp_path / "ct", CT)
    [pattern] = [e for e in config(tmp_path / "ct")["quantization_config"]["ignore"] if "visual" in e]
    assert re.match(pattern.removeprefix("re:"), "model.visual.blocks.0.attn.qkv")
    api.convert(tmp_path / "ct", tmp_path / "back", MODELOPT)
    [glob] = [e for e in config(tmp_path / "back")["quantization_config"]["ignore"] if "visual" in e]
    assert fnmatch.fnmatchcase("model.visual.merger", glob)
    assert set(others(tmp_path / "back")) == set(others(source))


def test_companions_and_the_record_travel_along(tmp_path: Path, with_tokenizer: Find) -> None:
    api.quantize(with_tokenizer("base_llama"), tmp_path / "q", "nvfp4-w4a16")
    api.convert(tmp_path / "q", tmp_path / "ct", CT)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "ct" / name).read_bytes() == (tmp_path / "q" / name).read_bytes()
    first, second = (json.loads((tmp_path / n / "blockscale.json").read_text()) for n in ("q", "ct"))
    assert second["recipe"] == first["recipe"]
    assert second["source"] == first
    assert second["conversion"] == {"from": MODELOPT, "to": CT}
    assert second["blockscale"] == blockscale.api.version("blockscale")


# ---------------------------------------------------------------- KV caches and heads


def test_an_nvfp4_kv_cache_has_no_name_in_compressed_tensors(tmp_path: Path) -> None:
    def nvfp4_cache(settings: dict[str, Any]) -> None:
        settings["quantization_config"]["kv_cache_scheme"] = "NVFP4"

    def nvfp4_cache_too(settings: dict[str, Any]) -> None:
        settings["quantization"]["kv_cache_quant_algo"] = "NVFP4"

    source = changed("modelopt_llama_nvfp4_fp8kv", tmp_path, config=nvfp4_cache, hf_quant_config=nvfp4_cache_too)
    summary = api.convert(source, tmp_path / "ct", CT)
    assert "its scales are left out" in summary.notices[0]
    assert kv_scales(tmp_path / "ct") == {}
    assert config(tmp_path / "ct")["quantization_config"]["kv_cache_scheme"] is None
    assert api.convert(source, tmp_path / "same", MODELOPT).notices == ()
    assert kv_scales(tmp_path / "same") == kv_scales(source)
    assert config(tmp_path / "same")["quantization_config"]["kv_cache_scheme"] == "NVFP4"


def test_a_quantized_head_is_not_tied(tmp_path: Path) -> None:
    def quantize_head(content: dict[str, torch.Tensor]) -> None:
        del content["lm_head.weight"]
        for suffix in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
            content[f"lm_head.{suffix}"] = content[f"model.layers.0.self_attn.q_proj.{suffix}"].clone()

    source = changed(
        "modelopt_llama_nvfp4",
        tmp_path,
        tensors=quantize_head,
        config=lambda settings: settings.update(tie_word_embeddings=True),
    )
    for to in (CT, MODELOPT, "bf16"):
        api.convert(source, tmp_path / to, to)
        assert config(tmp_path / to)["tie_word_embeddings"] is False
    assert "lm_head" not in config(tmp_path / CT)["quantization_config"]["ignore"]
    assert "lm_head.weight" in read_tensors(tmp_path / "bf16")


def test_input_scales_that_nothing_uses_are_not_renamed(tmp_path: Path) -> None:
    """Model Optimizer's NVFP4 without a word about activations is W4A16, whatever lies beside the weights."""

    def weights_only(settings: dict[str, Any]) -> None:
        del settings["quantization_config"]["config_groups"]["group_0"]["input_activations"]

    source = changed("modelopt_llama_nvfp4", tmp_path, config=weights_only)
    assert any(n.endswith("input_scale") for n in read_tensors(source))
    api.convert(source, tmp_path / "ct", CT)
    assert not any("input" in n.rpartition(".")[2] for n in read_tensors(tmp_path / "ct"))
    assert set(ENGINES["vLLM"](tmp_path / "ct", GOLDEN / "base_llama").values()) == {"NONE", "CT_NVFP4A16"}


# ---------------------------------------------------------------- stacks of experts


def llama4_like(folder: Path, model_type: str = "llama4_text") -> Path:
    """Two layers of three experts, as Model Optimizer stores stacks."""
    generator = torch.Generator().manual_seed(4)
    content = {"lm_head.weight": torch.ones(4, 64).bfloat16()}
    for layer in range(2):
        for leaf, n, k in (("gate_up_proj", 96, 64), ("down_proj", 64, 48)):
            name = f"model.layers.{layer}.feed_forward.experts.{leaf}"
            content[name] = torch.randint(0, 256, (3, k // 2, n), generator=generator).to(torch.uint8)
            scale = torch.rand(3, k // 16, n, generator=generator) + 0.5
            content[f"{name}_weight_scale"] = scale.to(torch.float8_e4m3fn)
            content[f"{name}_weight_scale_2"] = torch.tensor(0.013 + layer)
            content[f"{name}_input_scale"] = torch.tensor(0.17 + layer)
    quantization = {"quant_method": MODELOPT, "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
    return write(
        folder,
        content,
        {"model_type": model_type, "num_local_experts": 3, "dtype": "bfloat16", "quantization_config": quantization},
    )


def test_llama4_stacks_become_experts(tmp_path: Path) -> None:
    """gate above up, each expert with its rows of the stack."""
    source = llama4_like(tmp_path / "stacks")
    api.convert(source, tmp_path / "ct", CT)
    stacks, experts = linears(source), linears(tmp_path / "ct")
    assert len(experts) == 2 * 3 * 3
    for layer in range(2):
        prefix = f"model.layers.{layer}.feed_forward.experts"
        for expert in range(3):
            gate, up, down = (experts[f"{prefix}.{expert}.{leaf}_proj"] for leaf in ("gate", "up", "down"))
            assert torch.equal(torch.cat([gate.packed, up.packed]), stacks[f"{prefix}.gate_up_proj"].packed[expert])
            scale = torch.cat([gate.block_scale.view(torch.uint8), up.block_scale.view(torch.uint8)])
            assert torch.equal(scale, stacks[f"{prefix}.gate_up_proj"].block_scale[expert].view(torch.uint8))
            assert torch.equal(down.unscaled, stacks[f"{prefix}.down_proj"].unscaled[expert])
            for stored, stack in ((gate, "gate_up_proj"), (up, "gate_up_proj"), (down, "down_proj")):
                for role, scale_2 in stacks[f"{prefix}.{stack}"].multipliers.items():
                    assert ulps(stored.multipliers[role], scale_2) <= 1


def test_stacks_of_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no stacks of experts") as refused:
        api.convert(llama4_like(tmp_path / "a", model_type="gpt_oss"), tmp_path / "b", CT)
    assert "--to bf16" in refused.value.hint


# ---------------------------------------------------------------- what is refused


REFUSED: dict[str, tuple[str, str, str]] = {
    "a pre_quant_scale": ("modelopt_llama_nvfp4_awq_lite", CT, "cannot hold a pre_quant_scale"),
    "W4A8": ("modelopt_llama_w4a8_nvfp4_fp8", CT, "cannot hold nvfp4-block32"),
    "16 bits to modelopt": ("base_llama", MODELOPT, "16-bit model: there are no codes"),
    "16 bits to compressed-tensors": ("base_qwen3moe", CT, "16-bit model: there are no codes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    name, to, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message) as refused:
        api.convert(GOLDEN / name, tmp_path / "out", to)
    assert "--to bf16" in refused.value.hint or "quantize" in refused.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_mixture_that_modelopt_cannot_name(tmp_path: Path, golden_checkpoint: Find) -> None:
    from blockscale.quantization.recipe import Recipe, Rule

    rules = (Rule("*.self_attn.*", weight="fp8-channel", activation="fp8-token"),)
    recipe = Recipe("mixed", "nvfp4", rules=rules, dialect=CT)
    api.quantize(golden_checkpoint("base_llama"), tmp_path / "ct", recipe)
    with pytest.raises(CheckpointError, match="cannot be mixed") as refused:
        api.convert(tmp_path / "ct", tmp_path / "out", MODELOPT)
    assert "--dialect" not in refused.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("golden", "name", "value"),
    [
        ("ct_llama_nvfp4", "model.layers.1.mlp.down_proj.weight_scale", float("nan")),
        ("ct_llama_nvfp4", "model.layers.1.mlp.down_proj.weight_global_scale", 0.0),
        ("ct_llama_nvfp4", "model.layers.1.mlp.down_proj.input_global_scale", float("inf")),
        ("ct_llama_fp8_dynamic", "model.layers.1.mlp.down_proj.weight_scale", float("nan")),
        ("ct_llama_nvfp4_fp8kv", "model.layers.1.self_attn.v_scale", -1.0),
        ("modelopt_qwen3moe_nvfp4", "model.layers.0.mlp.experts.3.up_proj.weight_scale_2", float("nan")),
    ],
)
def test_scales_that_nobody_can_use_are_not_copied(golden: str, name: str, value: float, tmp_path: Path) -> None:
    def spoil(content: dict[str, torch.Tensor]) -> None:
        content[name].view(-1)[-1] = value

    for to in (CT, MODELOPT):
        with pytest.raises(CheckpointError, match=re.escape(name)):
            api.convert(changed(golden, tmp_path / to, tensors=spoil), tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


def test_a_part_of_a_weight_that_is_not_understood_is_not_left_out(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight_quantizer._rotation"
    folder = changed(NVFP4.name, tmp_path / "q", tensors=lambda content: content.update({name: torch.ones(4, 128)}))
    for to in (CT, MODELOPT, "bf16"):
        with pytest.raises(CheckpointError, match=re.escape(name)):
            api.convert(folder, tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


def test_two_weights_of_one_name(tmp_path: Path) -> None:
    def twice(content: dict[str, torch.Tensor]) -> None:
        content["model.layers.0.mlp.up_proj.weight"] = torch.ones(128, 64).bfloat16()

    source = changed("ct_llama_nvfp4", tmp_path, tensors=twice)
    for to in (MODELOPT, "bf16"):
        with pytest.raises(CheckpointError, match=r"up_proj\.weight' would be written twice"):
            api.convert(source, tmp_path / "out", to)


USAGE: dict[str, tuple[dict[str, Any], str]] = {
    "target": ({"to": "awq"}, "nothing is converted to 'awq'"),
    "format": ({"to": CT, "format": "int4"}, "the format 'int4'"),
    "format without dialect": ({"to": "bf16", "format": "nvfp4"}, "is for a dialect"),
    "kept without gguf": ({"to": CT, "kept": "q8_0"}, "is for --to gguf alone"),
}


@pytest.mark.parametrize("case", USAGE)
def test_arguments_that_make_no_sense(case: str, tmp_path: Path) -> None:
    options, message = USAGE[case]
    with pytest.raises(UsageError, match=message) as refused:
        api.convert(NVFP4, tmp_path / "out", **options)
    assert refused.value.hint
    assert list(tmp_path.iterdir()) == []


DAMAGED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], type[BlockscaleError], str]] = {
    "a NaN block scale": (
        lambda t: t["model.layers.1.mlp.up_proj.weight_scale"].view(torch.uint8).fill_(0x7F),
        CheckpointError,
        r"up_proj\.weight_scale: NaN",
    ),
    "a global scale of 0": (
        lambda t: t["model.layers.1.mlp.up_proj.weight_scale_2"].fill_(0),
        CheckpointError,
        r"up_proj\.weight_scale_2: 0\.0",
    ),
    "a kept weight that is NaN": (
        lambda t: t["model.norm.weight"].fill_(float("nan")),
        NonFiniteError,
        r"model\.norm\.weight: nan at \[0\]",
    ),
}


@pytest.mark.parametrize("to", [CT, "bf16"])
@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_named_and_nothing_is_written(case: str, to: str, tmp_path: Path) -> None:
    damage, kind, message = DAMAGED[case]
    source = changed("modelopt_llama_nvfp4", tmp_path, tensors=damage)
    with pytest.raises(kind, match=message):
        api.convert(source, tmp_path / "out", to)
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


# ---------------------------------------------------------------- whole or not at all


def test_an_existing_target_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(OutputError, match="exists already"):
        api.convert(NVFP4, tmp_path, CT)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize("number", [40, 400, 700])
def test_killed_half_way(number: int, tmp_path: Path) -> None:
    """Nothing stands under the name, and the next run is not disturbed by what is left."""
    out = tmp_path / "out"

    def work() -> None:
        killed_at_line(output.__file__, number)()
        api.convert(NVFP4, out, CT)

    assert run_child(work) == -signal.SIGKILL
    assert not out.exists()
    api.convert(NVFP4, out, CT)
    api.convert(NVFP4, tmp_path / "undisturbed", CT)
    assert folder_bytes(out) == folder_bytes(tmp_path / "undisturbed")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "undisturbed"}


def test_interrupted_half_way(tmp_path: Path) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        assert stage == "converting"
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        api.convert(NVFP4, tmp_path / "out", CT, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_result_that_does_not_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from blockscale.checkpoint.dialects import compressed_tensors

    honest = compressed_tensors.config_files

    def forgetful(*args: Any, **kwargs: Any) -> dict[str, str]:
        files = honest(*args, **kwargs)
        return {name: text.replace("tensor_group", "group") for name, text in files.items()}

    monkeypatch.setattr(compressed_tensors, "config_files", forgetful)
    with pytest.raises(OutputError, match=r"does not read back|not what was planned"):
        api.convert(NVFP4, tmp_path / "out", CT)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- GGUF, which has tests of its own


def test_one_file_for_llama_cpp(tmp_path: Path) -> None:
    api.quantize(make_model("llama", tmp_path / "llama"), tmp_path / "q", "nvfp4-w4a16")
    exact = api.convert(tmp_path / "q", tmp_path / "exact.gguf", "gguf")
    assert (exact.exact, exact.num_linears, exact.to) == (True, 14, "gguf")
    small = api.convert(tmp_path / "q", tmp_path / "small.gguf", "gguf", kept="q8_0")
    assert not small.exact  # what was kept in 16 bits is rounded
    for summary in (exact, small):
        assert summary.num_bytes == summary.out.stat().st_size
    assert small.num_bytes < exact.num_bytes
    with pytest.raises(OutputError, match="exists already"):
        api.convert(tmp_path / "q", tmp_path / "small.gguf", "gguf")


# ---------------------------------------------------------------- the command


def test_the_command_tells_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(NVFP4), str(tmp_path / "ct"), "--to", CT, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["exact"] is True
    assert (summary["num_linears"], summary["errors"], summary["to"]) == (14, {}, CT)
    assert summary["out"] == str(tmp_path / "ct")
    assert main(["convert", str(NVFP4), str(tmp_path / "bf16"), "--to", "bf16"]) == 0
    printed = capsys.readouterr().out
    assert "14 quantized linear layers, 14 of them rounded" in printed
    assert "largest relative errors: " in printed


def test_the_command_refuses_in_two_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(GOLDEN / "base_llama"), str(tmp_path / "x"), "--to", MODELOPT]) == 2
    error = capsys.readouterr().err
    assert error.count("error: ") == 1
    assert "hint: `blockscale quantize`" in error


def test_other_entries_of_the_config_stay(tmp_path: Path) -> None:
    source = changed("ct_llama_nvfp4", tmp_path, config=lambda c: c.update(marker={"a": [1, None]}))
    for to in (MODELOPT, "bf16"):
        api.convert(source, tmp_path / to, to)
        theirs, ours = config(source), config(tmp_path / to)
        theirs.pop("quantization_config")
        assert (ours.pop("quantization_config", None) is None) == (to == "bf16")
        assert ours == theirs


# ---------------------------------------------------------------- what engines will make of it


@pytest.mark.parametrize("scale", ["weight_scale_2", "input_scale"])
def test_scales_that_engines_misread_are_told(scale: str, tmp_path: Path) -> None:
    def change(tensors: Any) -> None:
        tensors[f"model.layers.1.mlp.up_proj.{scale}"].mul_(1.5)

    folder = changed(NVFP4.name, tmp_path / "a", tensors=change)
    (notice,) = api.convert(folder, tmp_path / "b", CT).notices
    assert "1 fused group has" in notice
    assert "model.layers.1.mlp.gate_proj+up_proj" in notice
    assert "--repair" in notice
    assert api.convert(folder, tmp_path / "c", "bf16").notices == ()  # no scale is shared there
    assert api.convert(NVFP4, tmp_path / "d", CT).notices == ()
