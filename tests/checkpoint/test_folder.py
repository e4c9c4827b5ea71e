"""A model folder as it lies on disk."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from blockscale.checkpoint.folder import open_folder
from blockscale.checkpoint.tensors import read_tensor
from blockscale.errors import CheckpointError

from .files import GOLDEN, changed, model_folder, names

ONE, TWO = torch.full((2,), 1.0), torch.full((2,), 2.0)
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SHARDS = {FIRST: {"a": ONE, "b": ONE}, SECOND: {"c": TWO}}
WEIGHT_MAP = {"a": FIRST, "b": FIRST, "c": SECOND}


@pytest.mark.parametrize("name", names(""))
def test_every_golden_folder_opens(name: str) -> None:
    folder = open_folder(GOLDEN / name)
    assert folder.config["num_hidden_layers"] == 2
    assert [path.name for path in folder.companions] == ["generation_config.json"]
    assert [path.name for path in dict.fromkeys(info.path for info in folder.tensors.values())] == ["model.safetensors"]
    assert folder.num_bytes < (GOLDEN / name / "model.safetensors").stat().st_size


def test_an_index_and_its_shards(tmp_path: Path) -> None:
    folder = open_folder(model_folder(tmp_path, SHARDS, WEIGHT_MAP))
    assert list(folder.tensors) == ["a", "b", "c"]
    assert [path.name for path in dict.fromkeys(info.path for info in folder.tensors.values())] == [FIRST, SECOND]
    assert folder.num_bytes == 24


def test_shards_without_an_index(tmp_path: Path) -> None:
    model_folder(tmp_path, SHARDS)
    (tmp_path / "._model.safetensors").write_bytes(b"a file manager's droppings")
    assert list(open_folder(tmp_path).tensors) == ["a", "b", "c"]


def test_shards_of_any_name_in_the_index(tmp_path: Path) -> None:
    shards = {"model.safetensors": {"a": ONE}, "mtp.safetensors": {"b": TWO}}
    model_folder(tmp_path, shards, {"a": "model.safetensors", "b": "mtp.safetensors"})
    assert list(open_folder(tmp_path).tensors) == ["a", "b"]


@pytest.mark.parametrize("has_single", [False, True])
def test_a_stale_copy_in_another_shard_is_not_read(has_single: bool, tmp_path: Path) -> None:
    """The index says which of two files holds a tensor, be the other listed or not."""
    shards = {FIRST: {"a": ONE, "b": ONE, "c": -TWO}, SECOND: {"c": TWO, "a": -ONE}}
    if has_single:
        shards |= {"model.safetensors": {"b": -ONE}}
    folder = open_folder(model_folder(tmp_path, shards, WEIGHT_MAP))
    values = {name: read_tensor(info)[0].item() for name, info in folder.tensors.items()}
    assert values == {"a": 1.0, "b": 1.0, "c": 2.0}


def test_a_single_file_beside_stale_shards(tmp_path: Path) -> None:
    model_folder(tmp_path, {"model.safetensors": {"a": ONE, "b": ONE}, FIRST: {"a": -ONE}})
    folder = open_folder(tmp_path)
    assert read_tensor(folder.tensors["a"])[0].item() == 1.0


def assert_refused(path: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        open_folder(path)


def test_a_missing_shard(tmp_path: Path) -> None:
    model_folder(tmp_path, {FIRST: SHARDS[FIRST]}, WEIGHT_MAP)
    assert_refused(tmp_path, f"shard {SECOND} is missing; the index places 1 tensors in it")


def test_a_truncated_shard(tmp_path: Path) -> None:
    model_folder(tmp_path, SHARDS, WEIGHT_MAP)
    (tmp_path / SECOND).write_bytes((tmp_path / SECOND).read_bytes()[:-1])
    assert_refused(tmp_path, f"{SECOND} is truncated")


def test_index_entries_that_no_file_holds(tmp_path: Path) -> None:
    model_folder(tmp_path, SHARDS, {**WEIGHT_MAP, "mtp.0.weight": FIRST, "mtp.1.weight": SECOND})
    assert_refused(tmp_path, "the index lists 2 tensors that no file holds, first 'mtp.0.weight'")


def test_an_entry_that_points_to_the_wrong_shard(tmp_path: Path) -> None:
    model_folder(tmp_path, SHARDS, {**WEIGHT_MAP, "c": FIRST})
    assert_refused(tmp_path, "the index lists 1 tensors that no file holds, first 'c'")


def test_tensors_of_a_shard_that_the_index_does_not_list(tmp_path: Path) -> None:
    model_folder(tmp_path, {**SHARDS, SECOND: {"c": TWO, "mtp.0.weight": TWO}}, WEIGHT_MAP)
    assert_refused(tmp_path, "hold 1 tensors that the index does not list, first 'mtp.0.weight'")


@pytest.mark.parametrize("weight_map", [WEIGHT_MAP, None])
def test_a_whole_file_that_would_be_left_out(weight_map: dict[str, Any] | None, tmp_path: Path) -> None:
    """Draft layers often come in a file of their own: to drop them without a word loses them."""
    shards = SHARDS if weight_map else {"model.safetensors": {"a": ONE}}
    model_folder(tmp_path, {**shards, "mtp.safetensors": {"a": ONE, "mtp.0.weight": TWO}}, weight_map)
    assert_refused(tmp_path, r"mtp\.safetensors: holds 1 tensors that would be left out, first 'mtp.0.weight'")


def test_mistrals_own_copy_is_left_out(tmp_path: Path) -> None:
    model_folder(tmp_path, {**SHARDS, "consolidated.safetensors": {"layers.0.wq": TWO}}, WEIGHT_MAP)
    assert list(open_folder(tmp_path).tensors) == ["a", "b", "c"]


def test_the_same_tensor_twice_without_an_index(tmp_path: Path) -> None:
    model_folder(tmp_path, {FIRST: {"a": ONE}, SECOND: {"a": TWO}})
    assert_refused(tmp_path, f"'a' lies in {FIRST} and in {SECOND}")


@pytest.mark.parametrize(
    "index",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"weight_map": {}}',
        b'{"weight_map": []}',
        b'{"weight_map": {"a": null}}',
        b'{"weight_map": {"a": ["model.safetensors"]}}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": "../model.safetensors"}}',
        b'{"weight_map": {"a": "/etc/model.safetensors"}}',
        b"\xff",
    ],
)
def test_an_index_that_makes_no_sense(index: bytes, tmp_path: Path) -> None:
    model_folder(tmp_path, SHARDS)
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    assert_refused(tmp_path, r"model\.safetensors\.index\.json")


def test_no_folder_or_no_config(tmp_path: Path) -> None:
    assert_refused(tmp_path / "absent", "no such model folder")
    assert_refused(GOLDEN / "base_llama" / "config.json", "no such model folder")
    (tmp_path / "notes.txt").write_text("no model")
    assert_refused(tmp_path, "no model lies here")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert_refused(tmp_path, "no config.json")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>Access denied</html>", "HTML page"),
        (b"\n<html><body>404</body></html>", "HTML page"),
    ],
)
def test_what_a_download_put_there_instead(content: bytes, match: str, tmp_path: Path) -> None:
    model_folder(tmp_path, SHARDS)
    file = next(tmp_path.glob("*.safetensors"))
    file.write_bytes(content)
    assert_refused(tmp_path, f"{file.name}: an? {match}")


def test_no_weights_at_all(tmp_path: Path) -> None:
    model_folder(tmp_path, SHARDS)
    for file in [*tmp_path.glob("*.safetensors"), *tmp_path.glob("*.index.json")]:
        file.unlink()
    assert_refused(tmp_path, r"no \.safetensors file$")
    (tmp_path / "model.safetensors.incomplete").write_bytes(b"")
    assert_refused(tmp_path, r"model\.safetensors\.incomplete is a download that did not finish")


@pytest.mark.parametrize(
    "config",
    [b"", b"{'a': 1}", b"[1]", b"null", b"\xff\xfe{}", b"[" * 100_000]
    + [
        json.dumps({key: value}).encode() for key in ("quantization_config", "text_config") for value in ("fp8", [1], 3)
    ],
)
def test_a_config_that_makes_no_sense(config: bytes, tmp_path: Path) -> None:
    model_folder(tmp_path, SHARDS)
    (tmp_path / "config.json").write_bytes(config)
    assert_refused(tmp_path, r"config\.json")


def test_absent_and_null_sections_of_a_config_are_the_same(tmp_path: Path) -> None:
    folder = changed("base_llama", tmp_path, config=lambda c: c.update(quantization_config=None, text_config=None))
    assert open_folder(folder).tensors.keys() == open_folder(GOLDEN / "base_llama").tensors.keys()


def test_weights_in_bin_files_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert_refused(tmp_path, "no .safetensors file")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"no \.safetensors file") as caught:
        open_folder(tmp_path)
    assert ".bin" in caught.value.hint


COMPANIONS = [
    "LICENSE",
    "README.md",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "modeling_custom.py",
    "preprocessor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
]
LEFT_BEHIND = [
    ".gitattributes",
    "blockscale.json",
    "flax_model.msgpack",
    "hf_quant_config.json",
    "model.Q4_K_M.gguf",
    "model.onnx",
    "optimizer.pt",
    "pytorch_model-00001-of-00002.bin",
    "pytorch_model.bin.index.json",
    "quant_cfg.json",
    "recipe.yaml",
    "rust_model.ot",
    "tf_model.h5",
    "training_args.bin",
]


def test_what_travels_along(tmp_path: Path) -> None:
    model_folder(tmp_path, SHARDS, WEIGHT_MAP)
    for name in COMPANIONS + LEFT_BEHIND:
        (tmp_path / name).write_text("{}")
    (tmp_path / "original").mkdir()
    target = tmp_path / "elsewhere" / "blob"
    target.parent.mkdir()
    target.write_text("x")
    (tmp_path / "linked.json").symlink_to(target)  # a hub cache is made of links
    companions = [path.name for path in open_folder(tmp_path).companions]
    assert companions == sorted([*COMPANIONS, "linked.json"])
