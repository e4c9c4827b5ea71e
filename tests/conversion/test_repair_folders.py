"""Repairs of configs, of files and of models in 16 bits, and what the command line says of a repair."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.raw import (
    INDEX,
    edit,
    edit_json,
    load,
    read_json,
    shards,
    split,
)
from safetensors.torch import save_file

from blockscale.cli.main import main
from blockscale.conversion.repair.repair import repair_checkpoint
from blockscale.errors import CheckFailed

from .breaking import (
    DOWN,
    GATE,
    MOE,
    NAN,
    NVFP4,
    UP,
    changed,
    fill,
    flip_signs,
    mended,
)
from .stored import same_bits

_ZERO = torch.tensor(0.0)

# ---------------------------------------------------------------- what a new config could not say


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"quant_algo": "NVFP4_SVD"}, "NVFP4_SVD"),
        ({"quant_algo": "W4A8_MXFP4_FP8"}, "W4A8_MXFP4_FP8"),
        ({"kv_cache_scheme": "NVFP4_AFFINE"}, "KV cache"),
        ({"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "transform_config"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    ],
)
def test_a_config_that_says_more_than_the_tensors_is_not_written_again(
    change: dict[str, Any], what: str, tmp_path: Path
) -> None:
    folder = changed(NVFP4, tmp_path, flip_signs(GATE))
    edit_json(folder / "config.json", lambda config: config["quantization_config"].update(change))
    with pytest.raises(CheckFailed, match=what):
        repair_checkpoint(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_parts_of_a_weight_that_are_not_understood_stop_a_repair(tmp_path: Path) -> None:
    folder = changed(NVFP4, tmp_path, flip_signs(GATE))
    edit(folder, lambda tensors: tensors.update({f"{DOWN}.weight_quantizer._rotation": torch.ones(2, 4)}))
    with pytest.raises(CheckFailed, match="_rotation"):
        repair_checkpoint(folder, tmp_path / "out")


def test_a_record_that_cannot_be_read_is_left_behind(tmp_path: Path) -> None:
    folder = changed(NVFP4, tmp_path, flip_signs(GATE))
    (folder / "blockscale.json").write_text("{")
    mended(folder, tmp_path / "out")
    assert read_json(tmp_path / "out" / "blockscale.json")["source"] is None


# ---------------------------------------------------------------- models in 16 bits and in formats of their own


def test_a_16_bit_model_gets_its_index_back(tmp_path: Path) -> None:
    folder = changed("base_llama", tmp_path)
    right = load(folder)
    split(folder, 3)
    edit_json(folder / INDEX, lambda index: index["weight_map"].pop("model.norm.weight"))
    summary = mended(folder, tmp_path / "out")
    assert [finding.name for finding in summary.repairs] == ["unindexed-tensor"]
    repaired = load(tmp_path / "out")
    assert repaired.keys() == right.keys()
    assert all(same_bits(repaired[name], right[name]) for name in right)
    assert read_json(tmp_path / "out" / "config.json") == read_json(folder / "config.json")


def test_a_model_in_fp8_tiles_keeps_its_config(write_model: Callable[..., Path], tmp_path: Path) -> None:
    weight = torch.ones(128, 128).to(torch.float8_e4m3fn)
    shard = {"model.layers.0.mlp.up_proj.weight": weight, "model.norm.weight": torch.ones(4)}
    other = {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1, 1)}
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = write_model({"model_type": "llama", "quantization_config": quantization}, [shard, other])
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({"mtp.fc.weight": shards(folder)[0].name}))
    summary = mended(folder, tmp_path / "out")
    assert any("mtp.fc.weight" in notice for notice in summary.notices)
    repaired = load(tmp_path / "out")
    assert all(same_bits(repaired[name], tensor) for name, tensor in {**shard, **other}.items())
    assert read_json(tmp_path / "out" / "config.json")["quantization_config"] == quantization


def test_shards_under_other_names(tmp_path: Path) -> None:
    folder = changed(MOE, tmp_path)
    right = load(folder)
    split(folder, 4)
    for i, file in enumerate(shards(folder)):
        file.rename(folder / f"part{i}.safetensors")
    summary = mended(folder, tmp_path / "out")
    assert {finding.name for finding in summary.repairs} == {"missing-shard"}
    assert all(same_bits(load(tmp_path / "out")[name], right[name]) for name in right)


def test_a_lost_tensor_stops_a_repair(tmp_path: Path) -> None:
    folder = changed(NVFP4, tmp_path)
    split(folder, 3)
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({"model.extra.weight": shards(folder)[0].name}))
    with pytest.raises(CheckFailed, match=r"no file holds 'model\.extra\.weight'"):
        repair_checkpoint(folder, tmp_path / "out")


def test_two_copies_that_differ_stop_a_repair(tmp_path: Path) -> None:
    folder = changed(NVFP4, tmp_path)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"model.norm.weight": torch.zeros(64, dtype=torch.bfloat16)}, folder / "b.safetensors")
    with pytest.raises(CheckFailed, match="different bytes"):
        repair_checkpoint(folder, tmp_path / "out")


def test_progress_is_told(tmp_path: Path) -> None:
    folder = changed(NVFP4, tmp_path, flip_signs(GATE))
    seen: list[tuple[str, int, int]] = []
    repair_checkpoint(folder, tmp_path / "out", progress=lambda *step: seen.append(step))
    steps = [step for step in seen if step[0] == "repairing"]
    assert steps
    assert steps[-1][1] == steps[-1][2]


# ---------------------------------------------------------------- the command line


def test_the_command_line_says_what_was_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = changed(NVFP4, tmp_path, flip_signs(GATE))
    edit(folder, lambda tensors: tensors[f"{UP}.weight_scale_2"].mul_(1.3))
    assert main(["lint", str(folder), "--repair", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert f"BS105 negative-block-scale: {GATE}" in printed
    assert f"{GATE} 0.0" in printed  # the error that sharing a scale added
    assert "0 errors" in printed
    assert main(["lint", str(tmp_path / "out"), "--repair", str(tmp_path / "again"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["repair"]["out"] is None
    assert main(["lint", str(tmp_path / "out"), "--repair", str(tmp_path / "again")]) == 0
    assert "nothing to repair" in capsys.readouterr().out
    assert not (tmp_path / "again").exists()


def test_the_command_line_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = changed(NVFP4, tmp_path, fill(f"{DOWN}.weight_scale_2", NAN))
    assert main(["lint", str(folder), "--repair", str(tmp_path / "out")]) == 1
    assert DOWN in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- what nothing reads, and what nothing tells


def test_an_input_scale_that_nothing_reads_is_left_out(tmp_path: Path) -> None:
    folder = changed("modelopt_llama_w4a16_nvfp4", tmp_path, lambda t: t.update({f"{DOWN}.input_scale": _ZERO}))
    summary = mended(folder, tmp_path / "out")
    assert {finding.name for finding in summary.repairs} == {"bad-global-scale", "unread-input-scale"}
    before, after = load(folder), load(tmp_path / "out")
    assert before.keys() - after.keys() == {f"{DOWN}.input_scale"}
    assert all(same_bits(before[name], tensor) for name, tensor in after.items())
    assert read_json(tmp_path / "out" / "config.json")["quantization_config"]["quant_algo"] == "W4A16_NVFP4"


def test_an_input_scale_that_may_be_reversed_stays(tmp_path: Path) -> None:
    folder = changed(NVFP4, tmp_path, fill(f"{DOWN}.input_scale", 3e5 / 2688), flip_signs(GATE))
    summary = mended(folder, tmp_path / "out")
    assert [finding.name for finding in summary.report.findings] == ["odd-input-scale"]
    name = f"{DOWN}.input_scale"
    assert same_bits(load(folder)[name], load(tmp_path / "out")[name])


def test_the_name_of_awq_is_written(tmp_path: Path) -> None:
    folder = changed("modelopt_llama_nvfp4_awq_lite", tmp_path)
    for file, section in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
        edit_json(folder / file, lambda content, section=section: content[section].update(quant_algo="NVFP4"))
    mended(folder, tmp_path / "out")
    assert read_json(tmp_path / "out" / "config.json")["quantization_config"]["quant_algo"] == "NVFP4_AWQ"


def test_an_index_is_written_where_there_is_none(tmp_path: Path) -> None:
    folder = changed(NVFP4, tmp_path)
    split(folder, 3)
    (folder / INDEX).unlink()
    summary = mended(folder, tmp_path / "out")
    assert [finding.name for finding in summary.repairs] == ["missing-index"]
    before, after = load(folder), load(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(same_bits(before[name], tensor) for name, tensor in after.items())


def test_no_index_is_made_up_for_files_that_are_missing(tmp_path: Path) -> None:
    folder = changed(NVFP4, tmp_path)
    split(folder, 3)
    (folder / INDEX).unlink()
    shards(folder)[1].unlink()
    with pytest.raises(CheckFailed, match="shard 2 of 3 is missing"):
        repair_checkpoint(folder, tmp_path / "out")
