"""One safetensors file: its header, checked against the file's size. Needs no torch.

Layout: u64 little-endian header length, JSON header, then the tensors' bytes.
Source: the safetensors format description, github.com/huggingface/safetensors.
"""

import json
import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from blockscale.errors import CheckpointError

# Bytes an element, by safetensors' names.
DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}
_MAX_HEADER_BYTES = 100_000_000  # the reference implementation's own limit
_MAX_SIZE = 2**63 - 1
_CHUNK_BYTES = 16 << 20
_DOWNLOAD = "download it again"
_START_BYTES = 64  # that tell what else a file is


class TensorInfo(NamedTuple):
    """Where one stored tensor, or a part of it (`parts`), lies.

    dtype      safetensors' name
    offset     from the start of the file
    row_bytes  of a part that has not all columns: from one row to the next in the file. 0 where rows follow one another
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    num_bytes: int
    row_bytes: int = 0


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of a safetensors file, in storage order.

    CheckpointError for what the reference implementation refuses: a truncated or malformed header, an unknown dtype,
    data that overlap, leave a hole or do not fill the file.
    """
    try:
        status = path.stat()
        size = status.st_size
        if not stat.S_ISREG(status.st_mode):  # to open a pipe would wait for ever
            raise CheckpointError(f"{path}: cannot be read: not a regular file", hint=_DOWNLOAD)
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if length > _MAX_HEADER_BYTES:
                raise _no_safetensors(path, f"its header would be {length} bytes long")
            if length > size - 8:
                raise truncated(path, f"its header needs {length + 8} bytes, the file has {size}")
            entries = json.loads(file.read(length).decode())
    except OSError as e:
        raise unreadable(path, e) from e
    except (ValueError, RecursionError) as e:
        raise _no_safetensors(path, "its header is no JSON") from e
    if not isinstance(entries, dict):
        raise _no_safetensors(path, "its header is no table")
    entries.pop("__metadata__", None)
    infos = [_tensor_info(path, name, entry, 8 + length, size) for name, entry in entries.items()]
    infos.sort(key=lambda info: (info.offset, info.num_bytes))
    position = 8 + length
    for info in infos:
        if info.offset != position:
            raise CheckpointError(
                f"{path}: '{info.name}' begins at byte {info.offset}, but what lies before it ends at {position}",
                hint=_DOWNLOAD,
            )
        position += info.num_bytes
    if position != size:
        raise CheckpointError(f"{path}: {size - position} bytes after the last tensor", hint=_DOWNLOAD)
    return {info.name: info for info in infos}


def _tensor_info(path: Path, name: str, entry: Mapping[str, Any], data_start: int, file_size: int) -> TensorInfo:
    try:
        dtype_name, shape = str(entry["dtype"]), tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        for value in (*shape, begin, end):  # dimensions and offsets: JSON integers of 63 bits, not negative
            if type(value) is not int or not 0 <= value <= _MAX_SIZE:
                raise ValueError(f"not a size: {value!r}")
        num_elements = math.prod(shape)
        if (num_elements or math.prod(filter(None, shape))) > _MAX_SIZE:
            raise ValueError("torch cannot hold more, not even of an empty tensor")
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"{path}: malformed header entry for '{name}'", hint=_DOWNLOAD) from e
    if dtype_name not in DTYPE_BYTES:
        raise CheckpointError(
            f"{path}: tensor '{name}' has unknown dtype {dtype_name}", hint="known dtypes: " + ", ".join(DTYPE_BYTES)
        )
    num_bytes = DTYPE_BYTES[dtype_name] * num_elements
    if end - begin != num_bytes:
        raise CheckpointError(
            f"{path}: '{name}' {list(shape)} {dtype_name} cannot fill {end - begin} bytes", hint=_DOWNLOAD
        )
    if data_start + end > file_size:
        raise truncated(path, f"'{name}' ends at byte {data_start + end}, the file at {file_size}")
    return TensorInfo(name, dtype_name, shape, path, data_start + begin, num_bytes)


def _no_safetensors(path: Path, why: str) -> CheckpointError:
    with path.open("rb") as file:
        start = file.read(_START_BYTES).lstrip().lower()
    if start.startswith(b"version https://git-lfs"):
        return CheckpointError(
            f"{path}: a Git LFS pointer, and not the file that it points to",
            hint="run `git lfs pull` where it was cloned, or download the file itself",
        )
    if start.startswith((b"<!doctype html", b"<html")):
        return CheckpointError(
            f"{path}: an HTML page, and not a safetensors file",
            hint="the server answered with a page, of a login or an error; a gated model needs a token",
        )
    return CheckpointError(f"{path}: not a safetensors file ({why})", hint=_DOWNLOAD)


def unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read: {error.strerror}", hint="check the path and its rights")


def truncated(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is truncated: {what}", hint="download or copy the file again")


def read_chunks(info: TensorInfo) -> Iterator[bytes]:
    """The tensor's bytes, a piece at a time."""
    try:
        with info.path.open("rb", buffering=0) as file:
            done = 0
            while done < info.num_bytes:
                chunk = os.pread(file.fileno(), min(_CHUNK_BYTES, info.num_bytes - done), info.offset + done)
                if not chunk:
                    raise truncated(info.path, f"it ended while '{info.name}' was read")
                yield chunk
                done += len(chunk)
    except OSError as e:
        raise unreadable(info.path, e) from e


def header_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """The header of a file that holds `tensors` (dtype's name and shape) in this order, and each tensor's offset from
    the file's start.

    The header is padded with spaces to a multiple of 8, as the reference writer does, so that data is aligned.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, position = {}, 0
    for name, (dtype, shape) in tensors.items():
        num_bytes = DTYPE_BYTES[dtype] * math.prod(shape)
        entries[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [position, position + num_bytes],
        }
        begins[name] = position
        position += num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, {name: 8 + len(text) + begin for name, begin in begins.items()}
