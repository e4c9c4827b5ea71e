"""Names from a checkpoint come to the terminal without what moves its cursor or forges a line."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faults.raw import edit, edit_json, split

from blockscale.cli.main import main

Find = Callable[[str], Path]
NASTY = (
    "\x1b[2J\x1b[31mhidden",
    "\x1b]0;title\x07",
    "a\nerror: forged",
    "a\rforged",
    "\x9b31m",
    "\u202eright",
    "a\x08b",
    "\x7f",
)
FORBIDDEN = {chr(c) for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"} | {"\u202e"}


@pytest.fixture
def folder(golden_checkpoint: Find, tmp_path: Path) -> Path:
    return Path(shutil.copytree(golden_checkpoint("modelopt_llama_nvfp4"), tmp_path / "model"))


def extra_scale(folder: Path, name: str) -> None:
    edit(
        folder,
        lambda tensors: tensors.update({f"model.{name}.weight_scale_2": tensors["model.norm.weight"][:1].float()}),
    )


def extra_weight(folder: Path, name: str) -> None:
    edit(folder, lambda tensors: tensors.update({f"model.{name}.weight": tensors["lm_head.weight"].clone()}))


def shard_name(folder: Path, name: str) -> None:
    split(folder, 2)
    edit_json(folder / "model.safetensors.index.json", lambda index: index["weight_map"].update({"x": name}))


def ghost(folder: Path, name: str) -> None:
    split(folder, 2)
    file = "model-00001-of-00002.safetensors"
    edit_json(folder / "model.safetensors.index.json", lambda index: index["weight_map"].update({name: file}))


def excluded(folder: Path, name: str) -> None:
    edit_json(folder / "config.json", lambda config: config["quantization_config"]["ignore"].append(name))


def algorithm(folder: Path, name: str) -> None:
    edit_json(folder / "config.json", lambda config: config["quantization_config"].update(quant_algo=name))


PLACES = (extra_scale, extra_weight, shard_name, ghost, excluded, algorithm)
COMMANDS = (("lint",), ("inspect",), ("quantize", "out"), ("generate", "hello"))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NASTY, ids=ascii)
def test_nothing_raw_reaches_the_terminal(
    name: str,
    place: Callable[[Path, str], None],
    command: tuple[str, ...],
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place(folder, name)
    verb, *rest = command
    arguments = [str(tmp_path / "out") if part == "out" else part for part in rest]
    main([verb, str(folder), *arguments])
    printed = capsys.readouterr()
    text = printed.out + printed.err
    assert text
    assert not FORBIDDEN & set(text)
    assert not any(line.startswith("error: forged") for line in text.splitlines())


@pytest.mark.parametrize("verb", ["lint", "inspect"])
@pytest.mark.parametrize("name", NASTY, ids=ascii)
def test_json_says_them_escaped(name: str, verb: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra_weight(folder, name)
    main([verb, str(folder), "--json"])
    text = capsys.readouterr().out
    assert not FORBIDDEN & set(text)
    assert any(name in said for said in strings(json.loads(text)))


def strings(value: Any) -> Iterator[str]:
    """Every text of a JSON document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)
