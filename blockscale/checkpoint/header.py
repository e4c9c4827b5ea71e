"""One safetensors file: its header, checked against the file's size, and reads by position.

Reads copy bytes straight from the file instead of mapping it, so that memory follows what is held and not what was
touched. Layout: u64 little-endian header length, JSON header, then the tensors' bytes.
Source: the safetensors format description, github.com/huggingface/safetensors.
"""

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockscale.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the reference implementation's own limit
_READ_BYTES = 1 << 30  # Linux moves at most 2 GiB in one call


@dataclass(frozen=True)
class TensorInfo:
    """Where one stored tensor lies. `offset` counts from the start of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    offset: int
    num_bytes: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of a safetensors file. CheckpointError for a truncated, malformed or unknown-dtype file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise _truncated(path, f"its header needs {length + 8} bytes, the file has {size}")
            entries = json.loads(file.read(length))
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read: {e.strerror}", hint="check the path and its rights") from e
    except (UnicodeDecodeError, json.JSONDecodeError) as e:
        raise CheckpointError(
            f"{path}: not a safetensors file (its header is no JSON)", hint="download it again"
        ) from e
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: not a safetensors file (its header is no table)", hint="download it again")
    return {
        name: _tensor_info(path, name, entry, 8 + length, size)
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def _tensor_info(path: Path, name: str, entry: Mapping[str, Any], data_start: int, file_size: int) -> TensorInfo:
    try:
        dtype_name = str(entry["dtype"])
        shape = tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"{path}: malformed header entry for '{name}'", hint="download the file again") from e
    if dtype_name not in DTYPES:
        raise CheckpointError(
            f"{path}: tensor '{name}' has unknown dtype {dtype_name}", hint="known dtypes: " + ", ".join(DTYPES)
        )
    dtype = DTYPES[dtype_name]
    num_bytes = dtype.itemsize
    for n in shape:
        num_bytes *= n
    if begin < 0 or end - begin != num_bytes:
        raise CheckpointError(f"{path}: '{name}' {list(shape)} {dtype_name} cannot fill {end - begin} bytes")
    if data_start + end > file_size:
        raise _truncated(path, f"'{name}' ends at byte {data_start + end}, the file at {file_size}")
    return TensorInfo(name, dtype, shape, path, data_start + begin, num_bytes)


def _truncated(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is truncated: {what}", hint="download or copy the file again")


def read_tensor(info: TensorInfo) -> Tensor:
    """The whole tensor, on the CPU."""
    buffer = torch.empty(info.num_bytes, dtype=torch.uint8)
    view = memoryview(buffer.numpy())  # type: ignore[arg-type]
    with info.path.open("rb", buffering=0) as file:
        done = 0
        while done < info.num_bytes:
            got = os.preadv(file.fileno(), [view[done : done + _READ_BYTES]], info.offset + done)
            if got == 0:
                raise _truncated(info.path, f"it ended while '{info.name}' was read")
            done += got
    if not info.num_bytes:
        return torch.empty(info.shape, dtype=info.dtype)
    return buffer.view(info.dtype).view(info.shape)


def header_bytes(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """The header of a file that holds `tensors` in this order, and each tensor's offset from the file's start.

    The header is padded with spaces to a multiple of 8, as the reference writer does, so that data is aligned.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, position = {}, 0
    for name, (dtype, shape) in tensors.items():
        num_bytes = dtype.itemsize
        for n in shape:
            num_bytes *= n
        entries[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [position, position + num_bytes],
        }
        begins[name] = position
        position += num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, {name: 8 + len(text) + begin for name, begin in begins.items()}
