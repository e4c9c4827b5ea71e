"""Whole weights from the fragment-ordered layout to 16 bits or to E4M3, and activations to E4M3: dequantize.cu.

For what is bound by arithmetic: a matrix product of torch on the result reads more memory than a fused kernel, once.
"""

import ctypes

import torch
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.formats.spec import MXFP4
from blockscale.kernels.checks import (
    ACTIVATION_DTYPES,
    check_activation,
    check_dtype,
    check_multiple,
    check_same_device,
    rows,
)
from blockscale.kernels.cuda.operands import check_fragments
from blockscale.kernels.device import describe
from blockscale.kernels.layouts import TILE_ROWS
from blockscale.kernels.nvrtc import Kernel, Program, launch, load
from blockscale.kernels.prepare import PreparedWeight

SOURCE = "dequantize.cu"
_OP = "dequantize"
_WARPS = 8  # as in dequantize.cu
_E4M3_FROM = (8, 9)  # compute capability that can round to E4M3


def dequantize(weight: PreparedWeight, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Tensor:
    """[N, K] bfloat16 or float16: the bits that `QuantizedTensor.dequantize(dtype)` gives.

    weight  [N, K] in Layout.FRAGMENTS on a GPU
    out     contiguous [N, K] of `dtype`, if given
    """
    _check_weight(weight)
    if out is None:
        out = torch.empty(weight.n, weight.k, dtype=dtype, device=weight.device)
    check_dtype(_OP, "out", out, ACTIVATION_DTYPES)
    if out.dtype != dtype or out.shape != (weight.n, weight.k) or not out.is_contiguous():
        found = f"{out.dtype} {list(out.shape)}, strides {out.stride()}"
        raise FormatError(f"{_OP}: out is {found}", hint=f"out must be a contiguous {dtype} {[weight.n, weight.k]}")
    check_same_device(_OP, weight=weight.packed, out=out)
    name = f"dequantize_16<{int(dtype == torch.float16)}, {int(weight.format is MXFP4)}>"
    _launch_tiles(name, weight, [out, weight.global_scale])
    return out


def to_e4m3(weight: PreparedWeight, num_rows: int | None = None) -> tuple[Tensor, Tensor]:
    """(codes float8_e4m3fn [num_rows, K], row_scale fp32 [num_rows]): weight ~= codes * row_scale * global_scale.

    A row's scale is its amax / 448, so that values are rounded once more, to 4 bits of significand. `num_rows` (default
    N) adds rows of zeros with scale 1. Needs compute capability 8.9.
    """
    _check_weight(weight)
    _check_e4m3(weight.device)
    num_rows = weight.n if num_rows is None else num_rows
    codes = torch.empty(num_rows, weight.k, dtype=torch.float8_e4m3fn, device=weight.device)
    row_scale = torch.empty(num_rows, dtype=torch.float32, device=weight.device)
    codes[weight.n :].view(torch.uint8).zero_()
    row_scale[weight.n :].fill_(1.0)
    is_mxfp4 = int(weight.format is MXFP4)
    name, (row_tiles, column_tiles) = f"find_row_scales<{is_mxfp4}>", weight.packed.shape[:2]
    launch(
        _kernel(name, weight.device),
        (min(row_tiles, -(-weight.n // TILE_ROWS)), 1, 1),
        (_WARPS * 32, 1, 1),
        [weight.packed, row_scale, ctypes.c_int(weight.n), ctypes.c_int(column_tiles)],
        device=weight.device,
    )
    _launch_tiles(f"dequantize_e4m3<{is_mxfp4}>", weight, [codes, row_scale])
    return codes, row_scale


def rows_to_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes float8_e4m3fn [M, K], scale fp32 [M, 1]) of x [..., K], bfloat16 or float16: x ~= codes * scale.

    A row's scale is its amax / 448, 1 for a row of zeros; a row with NaN or Inf becomes NaN. K a multiple of 16.
    """
    op = "rows_to_e4m3"
    check_activation(op, x, x.shape[-1] if x.dim() else 0)
    check_multiple(op, "K", x.shape[-1], 16)
    _check_e4m3(x.device)
    flat = rows(x)
    if flat.data_ptr() % 16 or (flat.shape[0] > 1 and flat.stride(0) % 8):
        flat = flat.clone(memory_format=torch.contiguous_format)
    m, k = flat.shape
    codes = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(m, 1, dtype=torch.float32, device=x.device)
    launch(
        _kernel(f"quantize_rows_e4m3<{int(x.dtype == torch.float16)}>", x.device),
        (m, 1, 1),
        (_WARPS * 32, 1, 1),
        [flat, ctypes.c_longlong(flat.stride(0)), codes, scale, ctypes.c_int(k)],
        device=x.device,
    )
    return codes, scale


def program(name: str) -> Program:
    """The source with one kernel, by its name expression."""
    return Program(SOURCE, (name,))


def _check_weight(weight: PreparedWeight) -> None:
    check_fragments(_OP, weight)
    if weight.device.type != "cuda":
        raise FormatError(f"{_OP}: the weight is on {weight.device}", hint="move it to an NVIDIA GPU")


def _check_e4m3(device: torch.device) -> None:
    capability = describe(device).capability
    if capability is None or capability < _E4M3_FROM:
        raise FormatError(f"no E4M3 arithmetic on {describe(device).name}", hint="it needs compute capability 8.9")


def _launch_tiles(name: str, weight: PreparedWeight, operands: list[Tensor]) -> None:
    """A kernel with a warp a tile: (tiles, *operands, n, k, column tiles, tiles)."""
    row_tiles, column_tiles = weight.packed.shape[:2]
    tiles = row_tiles * column_tiles
    sizes = [ctypes.c_int(weight.n), ctypes.c_int(weight.k), ctypes.c_int(column_tiles), ctypes.c_longlong(tiles)]
    launch(
        _kernel(name, weight.device),
        (-(-tiles // _WARPS), 1, 1),
        (_WARPS * 32, 1, 1),
        [weight.packed, *operands, *sizes],
        device=weight.device,
    )


def _kernel(name: str, device: torch.device) -> Kernel:
    return load(program(name), name, describe(device).arch)
