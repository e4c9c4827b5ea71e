"""Stored tensors in memory, and back.

Reads copy bytes straight from the file instead of mapping it, so that memory follows what is held and not what was
touched.
"""

import os

import torch
from torch import Tensor

from blockscale.checkpoint.header import TensorInfo, truncated, unreadable

TORCH_DTYPES: dict[str, torch.dtype] = {
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
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_MOVED_BYTES = 1 << 30  # Linux moves at most 2 GiB in one call
_BAND_BYTES = 4 << 20  # of whole rows, read for the sake of some of their columns
_SKIPPED_BYTES = 64 << 10  # between two pieces of a file: what is worth a call of its own


def torch_dtype(info: TensorInfo) -> torch.dtype:
    return TORCH_DTYPES[info.dtype]


def read_tensor(info: TensorInfo) -> Tensor:
    """The whole tensor, or the part that `info` means, on the CPU."""
    dtype = torch_dtype(info)
    if not info.num_bytes:
        return torch.empty(info.shape, dtype=dtype)
    buffer = torch.empty(info.num_bytes, dtype=torch.uint8)
    try:
        with info.path.open("rb", buffering=0) as file:
            if info.row_bytes:
                _read_columns(file.fileno(), info, buffer.view(info.shape[0], -1))
            else:
                _read(file.fileno(), info, buffer, info.offset)
    except OSError as e:
        raise unreadable(info.path, e) from e
    return buffer.view(dtype).view(info.shape)


def _read(fd: int, info: TensorInfo, out: Tensor, offset: int) -> None:
    """Bytes of the file from `offset` on, as many as the contiguous uint8 `out` has."""
    view = memoryview(out.numpy()).cast("B")  # type: ignore[arg-type]
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done : done + _MOVED_BYTES]], offset + done)
        if got == 0:
            raise truncated(info.path, f"it ended while '{info.name}' was read")
        done += got


def _read_columns(fd: int, info: TensorInfo, out: Tensor) -> None:
    """uint8 [rows, bytes of a row's part]: a call a row, or whole rows where little lies between two parts."""
    num_rows, width = out.shape
    if info.row_bytes - width > _SKIPPED_BYTES:
        for row in range(num_rows):
            _read(fd, info, out[row], info.offset + row * info.row_bytes)
        return
    step = max(1, _BAND_BYTES // info.row_bytes)
    for row in range(0, num_rows, step):
        count = min(step, num_rows - row)
        band = torch.empty(count * info.row_bytes, dtype=torch.uint8)
        used = (count - 1) * info.row_bytes + width  # the file may end with the last part
        _read(fd, info, band[:used], info.offset + row * info.row_bytes)
        out[row : row + count].copy_(band.view(count, -1)[:, :width])


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A tensor as its file has it, from any device; a copy only where it must be."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy() if flat.numel() else b"")  # type: ignore[arg-type]


def pwrite_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data[:_MOVED_BYTES], offset)
        data, offset = data[written:], offset + written
