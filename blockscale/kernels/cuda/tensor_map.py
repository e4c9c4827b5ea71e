"""Tensor maps: how Hopper's copy engine is told where a matrix lies (CUDA driver API, cuTensorMapEncodeTiled)."""

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from blockscale.errors import BlockscaleError, MissingDependencyError

ROW_ALIGNMENT = 16  # bytes: where rows may begin
Words = ctypes.c_uint64 * 16  # a CUtensorMap


def tensor_map(x: Tensor, box_rows: int, box_columns: int) -> "ctypes.Array[ctypes.c_uint64]":
    """The map of x [M, K] (16-bit elements, last stride 1, M > 0) for boxes [box_rows, box_columns].

    box_columns elements are 128 bytes, and land in shared memory in the 128-byte swizzle. A box may reach beyond x,
    where it is filled with zeros. Rows must begin at multiples of 16 bytes.
    """
    m, k = x.shape
    stride = x.stride(0) if m > 1 else -(-k // 8) * 8  # of one row torch may give any
    return _encode(x.data_ptr(), m, k, stride, x.dtype is torch.float16, box_rows, box_columns)


@lru_cache(maxsize=4096)  # the map depends on nothing but these numbers
def _encode(
    address: int, m: int, k: int, stride: int, is_fp16: bool, box_rows: int, box_columns: int
) -> "ctypes.Array[ctypes.c_uint64]":
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise MissingDependencyError(
            f"the CUDA driver cannot be loaded: {error}", hint="install cuda-bindings"
        ) from error
    kind = driver.CUtensorMapDataType
    code, encoded = driver.cuTensorMapEncodeTiled(
        kind.CU_TENSOR_MAP_DATA_TYPE_FLOAT16 if is_fp16 else kind.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        2,
        address,
        [driver.cuuint64_t(k), driver.cuuint64_t(m)],
        [driver.cuuint64_t(stride * 2)],
        [driver.cuuint32_t(box_columns), driver.cuuint32_t(box_rows)],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(code) != 0:
        raise BlockscaleError(f"tensor map of [{m}, {k}], row stride {stride}: {code.name}", hint="please report it")
    return Words(*(int(word) for word in encoded.opaque))
