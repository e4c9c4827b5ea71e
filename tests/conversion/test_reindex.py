"""A folder is put together from its files, or it is said what is lost."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from blockscale.checkpoint.folder import survey_folder
from blockscale.checkpoint.tensors import read_tensor
from blockscale.conversion.repair.reindex import Reindexed, reindex

INDEX = "model.safetensors.index.json"
FILES = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "tie_word_embeddings": True}
NAMES = [f"model.layers.{i}.mlp.{leaf}.weight" for i in (0, 1) for leaf in ("gate_proj", "up_proj", "down_proj")]


@pytest.fixture
def folder(write_model: Callable[..., Path]) -> Path:
    shards = [{name: torch.full((4,), float(NAMES.index(name))) for name in NAMES[i::3]} for i in range(3)]
    return write_model(CONFIG, shards)


def weight_map(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / INDEX).read_text())["weight_map"]
    return content


def write_index(folder: Path, content: Mapping[str, Any]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": content}))


def look(folder: Path) -> Reindexed:
    return reindex(survey_folder(folder))


def assert_whole(reindexed: Reindexed) -> None:
    assert reindexed.lost == ()
    assert reindexed.folder.faults == ()
    assert set(reindexed.folder.tensors) == set(NAMES)
    for i, name in enumerate(NAMES):
        assert read_tensor(reindexed.folder.tensors[name]).tolist() == [float(i)] * 4


def test_a_good_folder_stays_as_it_is(folder: Path) -> None:
    surveyed = survey_folder(folder)
    assert reindex(surveyed).folder == surveyed


def test_an_entry_that_points_to_the_wrong_file(folder: Path) -> None:
    write_index(folder, {**weight_map(folder), NAMES[0]: FILES[2]})
    assert survey_folder(folder).faults
    assert_whole(look(folder))


def test_entries_that_are_missing(folder: Path) -> None:
    write_index(folder, {n: f for n, f in weight_map(folder).items() if n != NAMES[4]})
    assert_whole(look(folder))


def test_files_under_other_names(folder: Path) -> None:
    for i, name in enumerate(FILES):
        (folder / name).rename(folder / f"part-{i}.safetensors")
    assert {fault.rule for fault in survey_folder(folder).faults} == {"missing-shard"}
    assert_whole(look(folder))


@pytest.mark.parametrize("place", ["../outside.safetensors", "/etc/passwd", 7, None])
def test_unsafe_entries_of_tensors_that_are_here(folder: Path, place: object) -> None:
    save_file({NAMES[0]: torch.full((4,), 99.0)}, folder.parent / "outside.safetensors")
    write_index(folder, {**weight_map(folder), NAMES[0]: place})
    assert_whole(look(folder))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_that_says_nothing(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    assert_whole(look(folder))


def test_without_an_index_a_missing_number_is_a_missing_shard(folder: Path) -> None:
    (folder / INDEX).write_text("{")
    (folder / FILES[1]).unlink()
    assert look(folder).lost == ("shard 2 of 3 is missing, by the names of the others",)


def test_stale_copies_are_not_taken(folder: Path) -> None:
    old = {name: torch.full((4,), 99.0) for name in NAMES[1::3]}
    save_file({**old, NAMES[0]: torch.zeros(4), NAMES[3]: torch.full((4,), 3.0)}, folder / FILES[0])
    assert_whole(look(folder))


def test_copies_without_an_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    save_file({NAMES[2]: torch.full((4,), 2.0)}, folder / "again.safetensors")
    assert_whole(look(folder))
    save_file({NAMES[2]: torch.full((4,), 99.0)}, folder / "again.safetensors")
    assert len(look(folder).lost) == 1
    assert "different bytes" in look(folder).lost[0]
    save_file({NAMES[2]: torch.full((2, 2), 2.0)}, folder / "again.safetensors")
    assert "different bytes" in look(folder).lost[0]


def test_another_container_of_the_same_weights_is_left_alone(folder: Path) -> None:
    save_file({"tok_embeddings.weight": torch.zeros(4)}, folder / "consolidated.safetensors")
    assert_whole(look(folder))


def test_files_beside_the_index_are_taken_along(folder: Path) -> None:
    save_file({"mtp.fc.weight": torch.ones(4)}, folder / "mtp.safetensors")
    reindexed = look(folder)
    assert reindexed.lost == ()
    assert set(reindexed.folder.tensors) == {*NAMES, "mtp.fc.weight"}


@pytest.mark.parametrize(
    "name",
    ["mtp.layers.0.fc.weight", "model.layers.2.mlp.up_proj.weight_scale", "lm_head.weight",
     "model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.mlp.up_proj.weight_quantizer._amax"],
)  # fmt: skip
def test_what_nothing_needs_is_forgotten(folder: Path, name: str) -> None:
    write_index(folder, {**weight_map(folder), name: FILES[0]})
    assert look(folder).forgotten == (name,)
    assert_whole(look(folder))


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight_scale", "x.weight", "model.visual.merger.weight"]
)
def test_what_may_be_needed_is_lost(folder: Path, name: str) -> None:
    write_index(folder, {**weight_map(folder), name: FILES[0], "y.weight": FILES[1]})
    assert look(folder).lost == (f"no file holds '{name}', nor 1 more",)


def test_half_a_draft_layer_is_lost(folder: Path) -> None:
    save_file({"mtp.enorm.weight": torch.ones(4)}, folder / "mtp.safetensors")
    write_index(folder, {**weight_map(folder), "mtp.enorm.weight": "mtp.safetensors", "mtp.fc.weight": FILES[0]})
    assert look(folder).lost == ("no file holds 'mtp.fc.weight'",)


def test_an_untied_head_is_lost(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": False}))
    write_index(folder, {**weight_map(folder), "lm_head.weight": FILES[0]})
    assert look(folder).lost == ("no file holds 'lm_head.weight'",)


def test_a_damaged_file_is_named(folder: Path) -> None:
    (folder / INDEX).write_text("{")
    os.truncate(folder / FILES[1], 60)
    assert any(FILES[1] in reason for reason in look(folder).lost)
