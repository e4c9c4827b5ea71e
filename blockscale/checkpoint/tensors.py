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


def torch_dtype(info: TensorInfo) -> torch.dtype:
    return TORCH_DTYPES[info.dtype]


def read_tensor(info: TensorInfo) -> Tensor:
    """The whole tensor, on the CPU."""
    dtype = torch_dtype(info)
    buffer = torch.empty(info.num_bytes, dtype=torch.uint8)
    view = memoryview(buffer.numpy())  # type: ignore[arg-type]
    try:
        with info.path.open("rb", buffering=0) as file:
            done = 0
            while done < info.num_bytes:
                got = os.preadv(file.fileno(), [view[done : done + _MOVED_BYTES]], info.offset + done)
                if got == 0:
                    raise truncated(info.path, f"it ended while '{info.name}' was read")
                done += got
    except OSError as e:
        raise unreadable(info.path, e) from e
    if not info.num_bytes:
        return torch.empty(info.shape, dtype=dtype)
    return buffer.view(dtype).view(info.shape)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A tensor as its file has it, from any device; a copy only where it must be."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy() if flat.numel() else b"")  # type: ignore[arg-type]


def pwrite_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data[:_MOVED_BYTES], offset)
        data, offset = data[written:], offset + written
