"""The safetensors files of a folder, the index that assigns tensors to them, and what contradicts between them."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from blockscale.checkpoint.faults import Fault
from blockscale.checkpoint.header import TensorInfo, read_header
from blockscale.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_OTHER_COPY = "consolidated*"  # Mistral's own container of the same weights, under other names
_MAX_JSON_BYTES = 100_000_000  # as for a header; the index of 671 billion parameters has 17 MB
_UNFINISHED = ("*.safetensors.*incomplete", "*.safetensors.part", "*.safetensors.aria2", "*.safetensors.crdownload")
_MAX_PATH = 4096  # Linux's own limit
_REBUILD = "the index is stale: rebuild it from the files or download it again"

Headers = Mapping[str, Mapping[str, TensorInfo]]  # by file name


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. CheckpointError for anything else."""
    if path.exists() and not path.is_file():  # reading a pipe would wait for ever
        raise CheckpointError(f"{path}: not a regular file", hint="download the file again")
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: too large for a config or an index", hint="download the file again")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read: {e.strerror}", hint="check the path and its rights") from e
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: not valid JSON: {e}", hint="correct it there, or download it again") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object", hint="download the file again")
    return value


def survey_shards(path: Path) -> tuple[dict[str, TensorInfo], list[Fault]]:
    """Every tensor that a loader would read, in storage order, and what is wrong.

    The index decides which file a tensor is read from; a stale copy in another file is named and not read. Without an
    index, or with one that cannot be read, the files speak for themselves.
    """
    present = [file for file in sorted(path.glob("*.safetensors")) if not file.name.startswith(".")]
    index = path / INDEX_NAME
    if not index.is_file():
        if not present:
            return {}, [_no_weights(path)]
        single = [file for file in present if file.name == SINGLE_NAME]
        tensors, faults = _without_index(path, single or present, present)
        several = [] if single else [file for file in present if not file.match(_OTHER_COPY)]
        if len(several) > 1:
            what = f"{path}: {len(several)} files of weights, and no {INDEX_NAME}"
            hint = "loaders that look for an index find no weights: write one"
            faults.append(Fault("missing-index", INDEX_NAME, what, hint, is_fatal=False))
        return tensors, faults
    try:
        content = read_json(index)
        weight_map = content.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: no weight_map", hint="download the index again")
    except CheckpointError as e:
        tensors, faults = _without_index(path, present, present)
        return tensors, [Fault("malformed-json", INDEX_NAME, str(e), e.hint), *faults]
    return _with_index(path, content, weight_map, present)


def _no_weights(path: Path) -> Fault:
    what, hint = f"{path}: no .safetensors file", "the weights are not in this folder"
    begun = sorted(file.name for pattern in _UNFINISHED for file in path.glob(pattern))
    if begun:
        what, hint = f"{what}; {begun[0]} is a download that did not finish", "finish the download"
    elif any(path.glob("*.bin")):
        hint = "convert the .bin files to safetensors first"
    return Fault("missing-shard", path.name, what, hint)


def _without_index(
    path: Path, files: Iterable[Path], present: Iterable[Path]
) -> tuple[dict[str, TensorInfo], list[Fault]]:
    headers, faults = _read_headers(path, [file.name for file in files])
    tensors: dict[str, TensorInfo] = {}
    for info in (info for header in headers.values() for info in header.values()):
        first = tensors.setdefault(info.name, info)
        if first is not info:
            twice = f"{path}: '{info.name}' lies in {first.path.name} and in {info.path.name}"
            faults.append(Fault("duplicate-tensor", info.name, twice, "remove one of the two files, or add an index"))
    return tensors, [*faults, *_left_out(present, headers, tensors)]


def _with_index(
    path: Path, index: Mapping[str, Any], weight_map: Mapping[str, Any], present: Iterable[Path]
) -> tuple[dict[str, TensorInfo], list[Fault]]:
    faults: list[Fault] = []
    num_tensors = Counter(name for name in weight_map.values() if isinstance(name, str))
    named = [name for name in num_tensors if _is_inside(name)]
    inside = set(named)
    unsafe = [name for name in weight_map.values() if not isinstance(name, str) or name not in inside]
    for name in unsafe[:1]:
        what = f"{path / INDEX_NAME}: {str(name)[:200]!r} is no file of this folder"
        faults.append(Fault("unsafe-path", INDEX_NAME, what, "do not trust this index: rebuild it from the files"))
    missing = [name for name in named if not _is_file(path / name)]
    for name in missing:
        what = f"{path}: shard {name} is missing; the index places {num_tensors[name]} tensors in it"
        faults.append(Fault("missing-shard", name, what, "finish the download"))
    headers, unreadable = _read_headers(path, [name for name in named if name not in missing])
    faults += unreadable
    tensors: dict[str, TensorInfo] = {}
    unlisted: list[str] = []
    for file_name, header in headers.items():
        for name, info in header.items():
            if weight_map.get(name) == file_name:
                tensors[name] = info
            elif name not in weight_map:
                unlisted.append(name)
            else:
                what = f"{path}: the index places '{name}' in {weight_map[name]}, and {file_name} holds another copy"
                hint = "engines that read every file may take either: remove the stale copy"
                faults.append(Fault("duplicate-tensor", name, what, hint, is_fatal=False))
    ghosts = [n for n, file in weight_map.items() if n not in tensors and isinstance(file, str) and file in headers]
    if ghosts:
        what = f"{path}: the index lists {len(ghosts)} tensors that no file holds, first '{ghosts[0]}'"
        faults.append(Fault("ghost-index-entry", ghosts[0], what, _REBUILD))
    if unlisted:
        what = f"{path}: the shards hold {len(unlisted)} tensors that the index does not list, first '{unlisted[0]}'"
        faults.append(Fault("unindexed-tensor", unlisted[0], what, _REBUILD))
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    found = sum(info.num_bytes for info in tensors.values())
    if isinstance(total, int) and total != found and not faults:
        what = f"{path / INDEX_NAME}: total_size is {total}, the tensors have {found} bytes"
        faults.append(Fault("wrong-total-size", INDEX_NAME, what, _REBUILD, is_fatal=False))
    return tensors, [*faults, *_left_out(present, headers, weight_map)]


def _is_inside(file_name: str) -> bool:
    """Whether an index's file name stays in its folder. Where a symbolic link leads is its owner's affair: the hub's
    cache is made of them."""
    if len(file_name) > _MAX_PATH:
        return False
    path = Path(file_name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in file_name


def _is_file(path: Path) -> bool:
    """False as well for a name that no file can have."""
    try:
        return path.is_file()
    except OSError:
        return False


def _read_headers(path: Path, names: Iterable[str]) -> tuple[dict[str, dict[str, TensorInfo]], list[Fault]]:
    headers, faults = {}, []
    for name in names:
        try:
            headers[name] = read_header(path / name)
        except CheckpointError as e:
            faults.append(Fault("unreadable-file", name, str(e), e.hint))
    return headers, faults


def _left_out(present: Iterable[Path], headers: Headers, known: Mapping[str, Any]) -> list[Fault]:
    """Files that nothing refers to, but that hold tensors which no other file has."""
    faults = []
    for file in present:
        if file.name in headers or file.match(_OTHER_COPY):
            continue
        try:
            lost = [name for name in read_header(file) if name not in known]
        except CheckpointError as e:
            faults.append(Fault("unreadable-file", file.name, str(e), e.hint))
            continue
        if lost:
            what = f"{file}: holds {len(lost)} tensors that would be left out, first '{lost[0]}'"
            hint = f"list them in {INDEX_NAME}, or move the file away if the model does not need it"
            faults.append(Fault("unindexed-tensor", lost[0], what, hint))
    return faults
