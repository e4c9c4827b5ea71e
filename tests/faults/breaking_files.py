"""Ways to break the files of a checkpoint, and what its configs say about them."""

import json
import os
import pickle
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from .breaking_tensors import Break
from .raw import INDEX, SINGLE, Json, edit_json, load, place, read_header, read_json, save, shards

CONFIG, HF_QUANT_CONFIG = "config.json", "hf_quant_config.json"
_EXCLUDES = ((CONFIG, "quantization_config", "ignore"), (HF_QUANT_CONFIG, "quantization", "exclude_modules"))


# ---------------------------------------------------------------- weight files


def cut(num_bytes: int, shard: int = -1) -> Break:
    """A download that stopped short."""

    def change(folder: Path) -> None:
        path = shards(folder)[shard]
        os.truncate(path, path.stat().st_size - num_bytes)

    return change


def cut_in_header(folder: Path) -> None:
    os.truncate(shards(folder)[-1], 100)


def empty_file(folder: Path) -> None:
    os.truncate(shards(folder)[-1], 0)


def header_length(length: int) -> Break:
    def change(folder: Path) -> None:
        with shards(folder)[0].open("r+b") as file:
            file.write(struct.pack("<Q", length))

    return change


def flip_header_bit(position: int) -> Break:
    def change(folder: Path) -> None:
        with shards(folder)[0].open("r+b") as file:
            file.seek(position)
            old = file.read(1)[0]
            file.seek(position)
            file.write(bytes([old ^ 0x80]))

    return change


def wrong_dtype_in_header(tensor: str) -> Break:
    """An entry whose dtype, shape and bytes do not fit."""

    def change(folder: Path) -> None:
        path = folder / place(folder, tensor)
        header, begin = read_header(path)
        header[tensor]["dtype"] = "F64"
        data = path.read_bytes()[begin:]
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)

    return change


def overlapping_tensors(first: str, second: str) -> Break:
    """Two tensors that claim the same bytes."""

    def change(folder: Path) -> None:
        path = folder / place(folder, first)
        header, begin = read_header(path)
        header[second] = header[first]
        data = path.read_bytes()[begin:]
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)

    return change


def web_page(folder: Path) -> None:
    """What a download without rights leaves behind."""
    shards(folder)[-1].write_text("<!DOCTYPE html><html><body>401 Unauthorized</body></html>")


def large_file_pointer(folder: Path) -> None:
    """What a clone without large files leaves behind."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 114096\n"
    shards(folder)[-1].write_text(pointer)


def unwritten(folder: Path) -> None:
    """A file made at its full size before the download, whose second half never came."""
    for path in shards(folder):
        size = path.stat().st_size
        os.truncate(path, size // 2)
        os.truncate(path, size)


def remove_shard(number: int) -> Break:
    return lambda folder: shards(folder)[number].unlink()


def copy_into(tensor: str, file: str, *, changed: bool = True) -> Break:
    """Another copy of a tensor in another file, which the index does not mean."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / file) if (folder / file).exists() else {}
        value = load(folder)[tensor]
        tensors[tensor] = torch.zeros_like(value) if changed else value
        save(folder / file, tensors)

    return change


def two_files_without_index(folder: Path) -> None:
    """Two shards that both hold a tensor, and nothing that says which counts."""
    tensors = load(folder)
    (folder / SINGLE).unlink()
    some = list(tensors)[: len(tensors) // 2]
    save(folder / "model-00001-of-00002.safetensors", {name: tensors[name] for name in some})
    rest = {name: tensors[name] for name in tensors if name not in some[1:]}
    save(folder / "model-00002-of-00002.safetensors", {**rest, some[0]: torch.ones_like(rest[some[0]])})


def remove_index(folder: Path) -> None:
    (folder / INDEX).unlink()


def extra_file(name: str, *tensors: str) -> Break:
    """A file with tensors of its own that no index lists."""
    return lambda folder: save(folder / name, {tensor: torch.ones(16) for tensor in tensors})


def pickle_file(name: str) -> Break:
    """Weights in a container that runs code when it is read."""

    def change(folder: Path) -> None:
        (folder / name).write_bytes(pickle.dumps(Planted(str(folder / PICKLE_RAN))))

    return change


PICKLE_RAN = "pickle-ran"


@dataclass(frozen=True)
class Planted:
    """Makes a folder when it is unpickled."""

    marker: str

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        return os.mkdir, (self.marker,)


# ---------------------------------------------------------------- index


def add_to_index(file: str | None, *tensors: str) -> Break:
    """Entries for tensors that no file holds; without a file's name, in the first one."""

    def change(folder: Path) -> None:
        where = file or shards(folder)[0].name
        edit_json(folder / INDEX, lambda index: index["weight_map"].update(dict.fromkeys(tensors, where)))

    return change


def drop_from_index(*tensors: str) -> Break:
    def change(folder: Path) -> None:
        def forget(index: Json) -> None:
            for tensor in tensors:
                del index["weight_map"][tensor]

        edit_json(folder / INDEX, forget)

    return change


def point_to(tensor: str, file: str | None) -> Break:
    """The index's file for a tensor; None: some other shard than the one that holds it."""

    def change(folder: Path) -> None:
        wrong = next(path.name for path in shards(folder) if path.name != place(folder, tensor))
        edit_json(folder / INDEX, lambda index: index["weight_map"].update({tensor: file or wrong}))

    return change


def total_size(value: int) -> Break:
    return lambda folder: edit_json(folder / INDEX, lambda index: index["metadata"].update(total_size=value))


# ---------------------------------------------------------------- configs


def write_text(name: str, text: str) -> Break:
    return lambda folder: (folder / name).write_text(text) and None


def cut_text(name: str) -> Break:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def remove_file(name: str) -> Break:
    return lambda folder: (folder / name).unlink()


def configs(*changes: tuple[str, str, Any]) -> Break:
    """(file, path/of/keys, value): sets nested entries; REMOVED takes one away."""

    def change(folder: Path) -> None:
        for file, path, value in changes:
            edit_json(folder / file, lambda config, path=path, value=value: _set(config, path, value))

    return change


REMOVED = object()


def _set(config: Json, path: str, value: Any) -> None:
    *parents, last = path.split("/")
    for parent in parents:
        config = config[parent]
    if value is REMOVED:
        del config[last]
    else:
        config[last] = value


def algorithm(value: str | None) -> Break:
    """quant_algo in both of Model Optimizer's files."""
    return configs(
        (CONFIG, "quantization_config/quant_algo", value), (HF_QUANT_CONFIG, "quantization/quant_algo", value)
    )


def no_quantization(folder: Path) -> None:
    edit_json(folder / CONFIG, lambda config: config.pop("quantization_config") and None)
    (folder / HF_QUANT_CONFIG).unlink(missing_ok=True)


def _edit_lists(folder: Path, change: Callable[[list[str]], Sequence[str]]) -> None:
    for file, section, key in _EXCLUDES:
        if (folder / file).exists():
            config = read_json(folder / file)
            config[section][key] = list(change(config[section][key]))
            (folder / file).write_text(json.dumps(config, indent=2))


def exclude(*patterns: str) -> Break:
    """Patterns added to the list of modules left alone, in every file that has one."""
    return lambda folder: _edit_lists(folder, lambda old: [*old, *patterns])


def unexclude(*patterns: str) -> Break:
    def keep(old: list[str]) -> list[str]:
        assert set(patterns) <= set(old)
        return [pattern for pattern in old if pattern not in patterns]

    return lambda folder: _edit_lists(folder, keep)


def unexclude_below(prefix: str) -> Break:
    """Every entry about these modules, regular expressions too."""

    def keep(old: list[str]) -> list[str]:
        left = [pattern for pattern in old if prefix not in pattern and re.escape(prefix) not in pattern]
        assert len(left) < len(old)
        return left

    return lambda folder: _edit_lists(folder, keep)


def rename_excluded(old: str, new: str) -> Break:
    def renamed(patterns: list[str]) -> list[str]:
        assert old in patterns
        return [new if pattern == old else pattern for pattern in patterns]

    return lambda folder: _edit_lists(folder, renamed)


def layer_entry(module: str, entry: dict[str, Any] | None) -> Break:
    """What quantized_layers of a mixed model says of a module, in both files."""

    def change(section: str) -> Callable[[Json], None]:
        def apply(config: Json) -> None:
            layers = config[section]["quantized_layers"]
            if entry is None:
                del layers[module]
            else:
                layers[module] = entry

        return apply

    def both(folder: Path) -> None:
        edit_json(folder / CONFIG, change("quantization_config"))
        edit_json(folder / HF_QUANT_CONFIG, change("quantization"))

    return both


def all_of(*breaks: Break) -> Break:
    """One after the other."""

    def change(folder: Path) -> None:
        for each in breaks:
            each(folder)

    return change
