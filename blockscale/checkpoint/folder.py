"""A model folder as it lies on disk: config, tensors by name, and the files that travel along."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockscale.checkpoint.header import TensorInfo, read_header
from blockscale.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# Weights in other containers, and what this program writes itself, do not travel with a quantized model.
_NOT_COPIED = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.gguf"),
    *("*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot"),
)
_OTHER_COPY = "consolidated*"  # Mistral's own container of the same weights, under other names
_NOT_COPIED_NAMES = ("config.json", "hf_quant_config.json", "blockscale.json", "recipe.yaml", "quant_cfg.json")


@dataclass(frozen=True)
class Folder:
    """`tensors` in storage order (shard by shard); `companions` are tokenizer, templates, generation config ..."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    companions: tuple[Path, ...]

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for info in self.tensors.values())


def open_folder(path: Path) -> Folder:
    """Reads config, index and headers, no weights. CheckpointError for whatever is missing or contradictory."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such model folder", hint="give a folder with config.json and safetensors")
    return Folder(path, _read_config(path), _read_tensors(path), _companions(path))


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read: {e.strerror}", hint="check the path and its rights") from e
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: not valid JSON: {e}", hint="download the file again") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object", hint="download the file again")
    return value


def _read_config(path: Path) -> dict[str, Any]:
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path}: no config.json", hint="this is not a Hugging Face model folder")
    config = read_json(path / "config.json")
    for key in ("quantization_config", "text_config"):
        if not isinstance(config.get(key), dict | None):
            raise CheckpointError(f"{path / 'config.json'}: {key} is no JSON object", hint="download the file again")
    return config


def _read_tensors(path: Path) -> dict[str, TensorInfo]:
    files = [file for file in sorted(path.glob("*.safetensors")) if not file.name.startswith(".")]
    if (path / INDEX_NAME).is_file():
        tensors = _read_indexed(path)
    else:
        tensors = _read_unindexed(path, [path / SINGLE_NAME] if path / SINGLE_NAME in files else files)
    read = {info.path for info in tensors.values()}
    for file in files:
        if file not in read and not file.match(_OTHER_COPY):
            lost = [name for name in read_header(file) if name not in tensors]
            if lost:
                raise CheckpointError(
                    f"{file}: holds {len(lost)} tensors that would be left out, first '{lost[0]}'",
                    hint=f"list them in {INDEX_NAME}, or move the file away if the model does not need it",
                )
    return tensors


def _read_unindexed(path: Path, files: Sequence[Path]) -> dict[str, TensorInfo]:
    if not files:
        others = [p.name for p in path.glob("*.bin")]
        hint = "convert the .bin files to safetensors first" if others else "the weights are not in this folder"
        raise CheckpointError(f"{path}: no .safetensors file", hint=hint)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in read_header(file).items():
            if name in tensors:
                raise CheckpointError(f"{path}: '{name}' lies in {tensors[name].path.name} and in {file.name}")
            tensors[name] = info
    return tensors


def _read_indexed(path: Path) -> dict[str, TensorInfo]:
    """Honours the index's file for each tensor: a stale copy of a tensor in another shard is not read."""
    weight_map = read_json(path / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX_NAME}: no weight_map", hint="download the index again")
    for file_name in weight_map.values():
        if not isinstance(file_name, str) or Path(file_name).is_absolute() or ".." in Path(file_name).parts:
            raise CheckpointError(f"{path / INDEX_NAME}: {file_name!r} is no file of this folder")
    tensors, unlisted = {}, []
    for file_name in dict.fromkeys(weight_map.values()):
        if not (path / file_name).is_file():
            count = sum(value == file_name for value in weight_map.values())
            raise CheckpointError(
                f"{path}: shard {file_name} is missing; the index places {count} tensors in it",
                hint="finish the download",
            )
        for name, info in read_header(path / file_name).items():
            if weight_map.get(name) == file_name:
                tensors[name] = info
            elif name not in weight_map:
                unlisted.append(name)
    ghosts = [name for name in weight_map if name not in tensors]
    if ghosts:
        raise CheckpointError(
            f"{path}: the index lists {len(ghosts)} tensors that no file holds, first '{ghosts[0]}'",
            hint="the index is stale: rebuild it from the files or download it again",
        )
    if unlisted:
        raise CheckpointError(
            f"{path}: the shards hold {len(unlisted)} tensors that the index does not list, first '{unlisted[0]}'",
            hint="the index is stale: rebuild it from the files or download it again",
        )
    return tensors


def _companions(path: Path) -> tuple[Path, ...]:
    return tuple(
        file
        for file in sorted(path.iterdir())
        if file.is_file()
        and not file.name.startswith(".")
        and file.name not in _NOT_COPIED_NAMES
        and not any(file.match(pattern) for pattern in _NOT_COPIED)
    )
