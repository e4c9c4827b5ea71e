"""Parts of stored tensors: some rows, or some columns, which are read without the rest. Needs no torch."""

import math

from blockscale.checkpoint.header import DTYPE_BYTES, TensorInfo
from blockscale.errors import FormatError


def rows_of(info: TensorInfo, begin: int, end: int) -> TensorInfo:
    """Entries begin .. end - 1 of the first dimension. FormatError for entries that are not there."""
    if not info.shape or not 0 <= begin <= end <= info.shape[0]:
        raise _outside(info, "rows", begin, end)
    shape = (end - begin, *info.shape[1:])
    num_bytes = DTYPE_BYTES[info.dtype] * math.prod(shape)
    step = info.row_bytes or DTYPE_BYTES[info.dtype] * math.prod(info.shape[1:])
    return info._replace(shape=shape, offset=info.offset + begin * step, num_bytes=num_bytes)


def columns_of(info: TensorInfo, begin: int, end: int) -> TensorInfo:
    """Columns begin .. end - 1 of a matrix. FormatError for columns that are not there, and for what is no matrix."""
    if len(info.shape) != 2 or not 0 <= begin <= end <= info.shape[1]:
        raise _outside(info, "columns", begin, end)
    size, (num_rows, num_columns) = DTYPE_BYTES[info.dtype], info.shape
    return info._replace(
        shape=(num_rows, end - begin),
        offset=info.offset + begin * size,
        num_bytes=size * num_rows * (end - begin),
        row_bytes=info.row_bytes or size * num_columns,
    )


def _outside(info: TensorInfo, what: str, begin: int, end: int) -> FormatError:
    return FormatError(f"{info.name}: no {what} {begin} to {end} in {list(info.shape)}")
