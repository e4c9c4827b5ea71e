"""A repaired folder stands for what the broken one was meant to, or nothing is written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.raw import (
    GOLDEN,
    INDEX,
    Tensors,
    decode,
    edit,
    edit_json,
    load,
    read_json,
    split,
    weight_of,
)

from blockscale import api
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.conversion.repair.repair import repair_checkpoint
from blockscale.errors import CheckFailed, CheckpointError, OutputError, UsageError
from blockscale.inspection.lint import lint_folder

from .breaking import (
    CT,
    DOWN,
    EXPERTS,
    GATE,
    MOE,
    NAN,
    NVFP4,
    QUERY,
    UP,
    Change,
    assert_same_values,
    changed,
    contents,
    fill,
    flip_signs,
    mended,
    swap,
)
from .stored import same_bits

# ---------------------------------------------------------------- nothing to do, and nothing that can be done


@pytest.mark.parametrize("name", [NVFP4, CT, MOE, "ct_llama_mxfp4", "modelopt_llama_nvfp4_awq_lite", "base_llama"])
def test_a_good_folder_is_not_written_again(
    name: str, golden_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    summary = repair_checkpoint(golden_checkpoint(name), tmp_path / "out")
    assert summary.out is None
    assert summary.repairs == ()
    assert list(tmp_path.iterdir()) == []


def test_every_error_without_a_repair_is_named(tmp_path: Path) -> None:
    folder = changed(NVFP4, tmp_path, fill(f"{DOWN}.weight_scale_2", NAN), fill(f"{QUERY}.weight_scale_2", 0.0))
    edit(folder, lambda tensors: tensors[f"{UP}.weight_scale"].view(torch.uint8)[3, 1].fill_(0x7F))
    edit(folder, fill(f"{DOWN}.input_scale", NAN))
    edit(folder, swap(GATE))
    with pytest.raises(CheckFailed, match="cannot be repaired") as refusal:
        repair_checkpoint(folder, tmp_path / "out")
    for layer in (DOWN, QUERY, UP):
        assert layer in str(refusal.value)
    assert "BS104 nan-block-scale" in str(refusal.value)
    assert "BS107 bad-global-scale" in str(refusal.value)
    assert refusal.value.exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_one_fault_without_a_repair_stops_the_repair_of_another(tmp_path: Path) -> None:
    folder = changed(NVFP4, tmp_path, flip_signs(GATE), fill(f"{DOWN}.input_scale", 0.0))
    with pytest.raises(CheckFailed, match="no sibling that sees the same input"):
        repair_checkpoint(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_warning_without_a_repair_stays_and_is_reported(tmp_path: Path) -> None:
    folder = changed(NVFP4, tmp_path, flip_signs(GATE))
    edit(folder, lambda tensors: tensors[f"{DOWN}.weight_scale"].view(torch.uint8).zero_())
    summary = mended(folder, tmp_path / "out")
    assert [finding.name for finding in summary.report.findings] == ["zero-block-scales"]
    assert summary.report.findings[0].layer == DOWN
    assert str(tmp_path / "out") not in summary.by_rule


def test_the_target_must_be_free_and_outside(tmp_path: Path) -> None:
    folder = changed(NVFP4, tmp_path, flip_signs(GATE))
    before = contents(folder)
    for inside in (folder / "out", folder / "a" / ".." / "out"):
        with pytest.raises(UsageError, match="lies inside"):
            repair_checkpoint(folder, inside)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(UsageError, match="lies inside"):
        repair_checkpoint(folder, tmp_path / "link" / "out")
    (tmp_path / "taken").write_text("")
    with pytest.raises(OutputError, match="exists already"):
        repair_checkpoint(folder, tmp_path / "taken")
    with pytest.raises(CheckpointError, match="no such model folder"):
        repair_checkpoint(tmp_path / "nowhere", tmp_path / "out")
    assert contents(folder) == before


def test_what_is_still_wrong_afterwards_is_a_bug_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = changed(NVFP4, tmp_path, flip_signs(GATE))
    monkeypatch.setattr("blockscale.conversion.repair.fixes.unsign_block_scales", lambda packed, scale: (packed, scale))
    with pytest.raises((OutputError, CheckpointError)):
        repair_checkpoint(folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


# ---------------------------------------------------------------- several faults at once


def test_several_faults_of_one_layer_and_of_the_files(tmp_path: Path) -> None:
    folder = changed(CT, tmp_path)
    right = load(folder)
    edit(folder, flip_signs(DOWN))
    edit(folder, lambda tensors: weight_of(tensors, DOWN).bitwise_xor_(0x88))
    edit(folder, lambda tensors: tensors[f"{DOWN}.weight_global_scale"].neg_())
    edit(folder, lambda tensors: tensors[f"{UP}.input_global_scale"].mul_(2))
    split(folder, 3)
    edit_json(folder / INDEX, lambda index: index["weight_map"].pop(f"{GATE}.weight_packed"))
    edit_json(folder / "config.json", lambda config: config["quantization_config"]["ignore"].append(DOWN))
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    summary = mended(folder, tmp_path / "out")
    assert {finding.name for finding in summary.repairs} == {
        "negative-block-scale",
        "bad-global-scale",
        "fused-input-scale-mismatch",
        "unindexed-tensor",
        "excluded-but-quantized",
        "pickle-weights",
    }
    assert summary.errors == {}
    repaired = load(tmp_path / "out")
    assert repaired.keys() == right.keys()
    assert all(same_bits(repaired[name], right[name]) for name in right)
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()
    assert DOWN not in read_json(tmp_path / "out" / "config.json")["quantization_config"]["ignore"]


def test_a_reversed_member_gets_its_siblings_scale_to_the_bit(tmp_path: Path) -> None:
    """The reciprocal of a reciprocal may be an ulp off; engines want equal scales."""
    folder = changed(NVFP4, tmp_path)
    candidates = torch.linspace(0.0003, 0.0004, 1000)
    odd = candidates[candidates.reciprocal().reciprocal() != candidates][0]
    for member in (GATE, UP):
        edit(folder, lambda tensors, member=member: tensors[f"{member}.weight_scale_2"].copy_(odd))
    right = load(folder)
    edit(folder, lambda tensors: tensors.update({f"{UP}.weight_scale_2": odd.reciprocal()}))
    summary = mended(folder, tmp_path / "out")
    repaired = load(tmp_path / "out")
    assert same_bits(repaired[f"{GATE}.weight_scale_2"], repaired[f"{UP}.weight_scale_2"])
    for module in (GATE, UP):
        assert torch.allclose(decode(repaired, module), decode(right, module), rtol=2.0**-22, atol=0)
    assert all(error < 2.0**-22 for error in summary.errors.values())


def test_two_reversed_scales_of_which_one_shows_beside_the_source_only(tmp_path: Path) -> None:
    """The weight's makes values that are odd and not impossible, as its block scales are small."""
    source = GOLDEN / "base_llama"

    def shift(tensors: Tensors) -> None:
        scale, shift = tensors[f"{DOWN}.weight_scale"], 2.0**9
        scale.copy_(scale.float() / shift)
        tensors[f"{DOWN}.weight_scale_2"] *= shift

    folder = changed(NVFP4, tmp_path, shift)
    right = load(folder)
    for scale in ("weight_scale_2", "input_scale"):
        edit(folder, lambda tensors, name=f"{DOWN}.{scale}": tensors[name].reciprocal_())
    alone, beside = (lint_folder(folder, source=path).findings for path in (None, source))
    assert [finding.tensors for finding in alone] == [(f"{DOWN}.input_scale",)]
    assert [finding.tensors for finding in beside] == [(f"{DOWN}.input_scale", f"{DOWN}.weight_scale_2")]
    mended(folder, tmp_path / "out", source=source)
    repaired = load(tmp_path / "out")
    for scale in ("weight_scale_2", "input_scale"):
        torch.testing.assert_close(repaired[f"{DOWN}.{scale}"], right[f"{DOWN}.{scale}"], rtol=2.0**-22, atol=0)


def test_a_zero_member_takes_the_scale_of_its_group(tmp_path: Path) -> None:
    folder = changed(NVFP4, tmp_path)
    right = load(folder)

    def break_(tensors: Tensors) -> None:
        tensors[f"{UP}.weight"].fill_(0x77)
        tensors[f"{UP}.weight_scale"].view(torch.uint8).fill_(0xFF)
        tensors[f"{UP}.weight_scale_2"].zero_()

    edit(folder, break_)
    mended(folder, tmp_path / "out")
    repaired = load(tmp_path / "out")
    assert not decode(repaired, UP).any()
    assert same_bits(repaired[f"{UP}.weight_scale_2"], right[f"{GATE}.weight_scale_2"])
    assert all(same_bits(repaired[n], right[n]) for n in right if not n.startswith(UP))


def test_the_error_that_sharing_a_scale_adds_is_reported(tmp_path: Path) -> None:
    folder = changed(NVFP4, tmp_path)
    edit(folder, lambda tensors: tensors[f"{UP}.weight_scale_2"].mul_(1.3))
    broken = load(folder)
    summary = mended(folder, tmp_path / "out")
    repaired = load(tmp_path / "out")
    assert summary.errors.keys() == {GATE}
    difference = (decode(repaired, GATE) - decode(broken, GATE)).norm() / decode(broken, GATE).norm()
    assert summary.errors[GATE] == pytest.approx(difference.item(), rel=1e-6)
    assert 0 < summary.errors[GATE] < 1 / 16
    record = read_json(tmp_path / "out" / "blockscale.json")
    assert record["errors"] == summary.errors
    assert record["repairs"] == {"BS101 fused-global-scale-mismatch": [f"{GATE}+up_proj"]}
    assert json.loads(json.dumps(summary.to_dict()))["errors"] == summary.errors


def low_scales(module: str, shift: int) -> Change:
    """Block scales that much further down E4M3's range, most of them subnormal numbers, and a global scale of 1."""

    def change(tensors: Tensors) -> None:
        scale = tensors[f"{module}.weight_scale"].view(torch.uint8)
        scale.copy_(torch.arange(scale.numel(), dtype=torch.uint8).view(scale.shape) % 7 + 1)
        scale[0, 0] = 0x7E - 8 * shift
        weight_of(tensors, module)[0] = 0x77
        tensors[f"{module}.weight_scale_2"].fill_(1.0)

    return change


@pytest.mark.parametrize(
    ("said", "written"),
    [
        ({"name": "modelopt", "version": "0.33.0"}, {"name": "modelopt", "version": "0.33.0"}),
        (None, {"name": "modelopt", "version": "0.47.0"}),
        ("a word", {"name": "modelopt", "version": "0.47.0"}),
    ],
)
def test_the_producer_stays_who_it_was(said: object, written: object, tmp_path: Path) -> None:
    def entry(config: dict[str, Any]) -> dict[str, Any]:
        found = config["quantization_config"]
        assert isinstance(found, dict)
        return found

    folder = Path(shutil.copytree(GOLDEN / "modelopt_llama_nvfp4", tmp_path / "m"))
    config = json.loads((folder / "config.json").read_text())
    entry(config).update(producer=said, ignore=[])
    (folder / "config.json").write_text(json.dumps(config))
    assert repair_checkpoint(folder, tmp_path / "out").repairs
    assert entry(json.loads((tmp_path / "out" / "config.json").read_text()))["producer"] == written
    assert json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["producer"] == written


def test_a_groups_block_scales_move_up_together(tmp_path: Path) -> None:
    folder = changed(NVFP4, tmp_path, low_scales(GATE, 9), low_scales(UP, 11))
    broken = load(folder)
    summary = mended(folder, tmp_path / "out")
    assert {(f.name, f.layer) for f in summary.repairs} == {("subnormal-block-scales", name) for name in (GATE, UP)}
    repaired = load(tmp_path / "out")
    assert_same_values(repaired, broken)
    assert repaired[f"{GATE}.weight_scale_2"].item() == repaired[f"{UP}.weight_scale_2"].item() == 2.0**-9
    assert repaired[f"{GATE}.weight_scale"].float().amax() == 448
    assert summary.errors == {}


def test_a_sibling_without_room_keeps_block_scales_down(tmp_path: Path) -> None:
    folder = changed(NVFP4, tmp_path, low_scales(GATE, 9), low_scales(UP, 0))
    summary = repair_checkpoint(folder, tmp_path / "out")
    assert summary.out is None
    assert ("subnormal-block-scales", GATE) in {(f.name, f.layer) for f in summary.report.findings}


def test_the_sign_of_an_fp8_weights_scale(tmp_path: Path) -> None:
    folder = changed("modelopt_llama_fp8", tmp_path)
    right = load(folder)

    def break_(tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight_scale"].neg_()
        tensors[f"{DOWN}.weight"].view(torch.uint8).bitwise_xor_(0x80)

    edit(folder, break_)
    mended(folder, tmp_path / "out")
    assert all(same_bits(load(tmp_path / "out")[name], right[name]) for name in right)


# ---------------------------------------------------------------- inputs


@pytest.mark.parametrize("leaf", ["down_proj", "up_proj"])
def test_an_experts_input_scale_comes_from_the_other_experts(leaf: str, tmp_path: Path) -> None:
    folder = changed(MOE, tmp_path)
    for i, value in enumerate((0.01, 0.03, 0.02)):
        for one in ("gate_proj", "up_proj", "down_proj"):
            edit(folder, fill(f"{EXPERTS}.{i}.{one}.input_scale", value + (one == "down_proj")))
    for one in {"gate_proj", "up_proj", leaf} if leaf == "up_proj" else {leaf}:
        edit(folder, lambda tensors, one=one: tensors.pop(f"{EXPERTS}.3.{one}.input_scale"))
    summary = mended(folder, tmp_path / "out")
    value = 1.03 if leaf == "down_proj" else 0.03
    repaired = load(tmp_path / "out")
    assert repaired[f"{EXPERTS}.3.{leaf}.input_scale"].item() == pytest.approx(value)
    assert repaired[f"{EXPERTS}.3.{leaf}.input_scale"].shape == ()
    assert any("siblings'" in notice for notice in summary.notices)


def test_a_fused_sibling_goes_before_other_experts(tmp_path: Path) -> None:
    folder = changed(MOE, tmp_path, fill(f"{EXPERTS}.0.gate_proj.input_scale", 0.7))
    edit(folder, fill(f"{EXPERTS}.0.up_proj.input_scale", float("inf")))
    edit(folder, fill(f"{EXPERTS}.1.gate_proj.input_scale", 0.9))
    edit(folder, fill(f"{EXPERTS}.1.up_proj.input_scale", 0.9))
    mended(folder, tmp_path / "out")
    assert load(tmp_path / "out")[f"{EXPERTS}.0.up_proj.input_scale"].item() == pytest.approx(0.7)


def test_fp8_layers_help_each_other(tmp_path: Path) -> None:
    folder = changed("modelopt_llama_fp8", tmp_path)
    right = load(folder)
    edit(folder, lambda tensors: tensors.pop(f"{QUERY}.input_scale"))
    mended(folder, tmp_path / "out")
    repaired = load(tmp_path / "out")
    assert all(same_bits(repaired[name], right[name]) for name in right)


# ---------------------------------------------------------------- other layouts


@pytest.mark.parametrize("family", ["llama4_text", "gpt_oss"])
def test_stacks_of_experts(family: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """[E, K/2, N]: codes and scales run down the middle dimension."""
    api.quantize(tiny_model(family), tmp_path / "good", "nvfp4-w4a16")
    right = load(tmp_path / "good")
    stack = next(name.removesuffix("_weight_scale") for name in right if name.endswith("down_proj_weight_scale"))
    folder = tmp_path / "good"
    before = open_checkpoint(folder)

    def break_(tensors: Tensors) -> None:
        scale = tensors[f"{stack}_weight_scale"].view(torch.uint8)
        scale[:, ::2] ^= 0x80
        codes = tensors[stack].unflatten(1, (scale.shape[1], -1))
        codes[:, ::2] ^= 0x88
        tensors[f"{stack}_weight_scale_2"].neg_()
        tensors[stack] ^= 0x88

    edit(folder, break_)
    summary = mended(folder, tmp_path / "out")
    assert {finding.name for finding in summary.repairs} == {"negative-block-scale", "bad-global-scale"}
    repaired = load(tmp_path / "out")
    assert repaired.keys() == right.keys()
    assert all(same_bits(repaired[name], right[name]) for name in right)
    assert before.kept.keys() == open_checkpoint(tmp_path / "out").kept.keys()


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [("modelopt_llama_nvfp4_awq_lite", "NVFP4_AWQ"), ("modelopt_llama_w4a8_nvfp4_fp8", "W4A8_NVFP4_FP8"),
     ("modelopt_llama_mixed_fp8attn_nvfp4mlp_fp8kv", "MIXED_PRECISION"),
     ("modelopt_llama_nvfp4_four_over_six", "NVFP4")],
)  # fmt: skip
def test_every_kind_of_checkpoint_keeps_its_config(name: str, algorithm: str, tmp_path: Path) -> None:
    folder = changed(name, tmp_path)
    right = load(folder)
    edit(folder, flip_signs(GATE))
    mended(folder, tmp_path / "out")
    assert all(same_bits(load(tmp_path / "out")[n], right[n]) for n in right)
    first, second = (open_checkpoint(path).quantized for path in (folder, tmp_path / "out"))
    assert first is not None
    assert second is not None
    assert {n: linear.scheme for n, linear in first.linears.items()} == {
        n: linear.scheme for n, linear in second.linears.items()
    }
    assert second.kv_format == first.kv_format
    assert second.claims[0].algorithm == algorithm


def test_names_of_mxfp4s_activations_are_kept_where_the_group_size_is_wrong(tmp_path: Path) -> None:
    folder = changed("ct_llama_mxfp4", tmp_path)
    before = open_checkpoint(folder).quantized
    group = ("quantization_config", "config_groups", "group_0", "weights")

    def break_(config: dict[str, Any]) -> None:
        for key in group:
            config = config[key]
        config["group_size"] = 16

    edit_json(folder / "config.json", break_)
    mended(folder, tmp_path / "out")
    after = open_checkpoint(tmp_path / "out").quantized
    assert before is not None
    assert after is not None
    assert {linear.scheme for linear in after.linears.values()} == {linear.scheme for linear in before.linears.values()}
