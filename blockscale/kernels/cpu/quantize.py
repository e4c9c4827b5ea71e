"""Activations to NVFP4 on the CPU, with the bytes of formats/."""

from ctypes import byref, c_float

import torch
from torch import Tensor

from blockscale.formats.nvfp4 import global_scale_from_amax
from blockscale.kernels.checks import check_same_device, rows
from blockscale.kernels.cpu.library import DTYPE_CODES, Level, check_result, level_argument, library
from blockscale.kernels.reference import quantize as reference

BLOCK = 16


def quantize_nvfp4(
    x: Tensor, global_scale: Tensor | None = None, *, level: Level | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., K] (bf16, fp16, fp32) -> packed uint8 [..., K/2], block_scale float8_e4m3fn [..., K/16], global_scale.

    global_scale  fp32 0-d, static; None takes amax / 2688 of the finite values of x

    A block that holds NaN or Inf gets the block scale NaN (0x7F) and codes of 7.
    """
    _check(x)
    built = library()
    if built is None:
        return reference.quantize_nvfp4(x, global_scale)
    if global_scale is None:
        global_scale = global_scale_from_amax(amax(x, level=level))
    reference.check_global_scale("quantize_nvfp4", global_scale, x)
    flat = rows(x)
    m, k = flat.shape
    packed = torch.empty(m, k // 2, dtype=torch.uint8)
    block_scale = torch.empty(m, k // BLOCK, dtype=torch.uint8)
    result = built.blockscale_quantize(
        flat.data_ptr(),
        flat.stride(0),
        m,
        k,
        DTYPE_CODES[x.dtype],
        float(global_scale),
        level_argument(level),
        torch.get_num_threads(),
        packed.data_ptr(),
        block_scale.data_ptr(),
    )
    check_result("quantize_nvfp4", result, level)
    lead = x.shape[:-1]
    scales = block_scale.view(torch.float8_e4m3fn).view(*lead, k // BLOCK)
    return packed.view(*lead, k // 2), scales, global_scale


def amax(x: Tensor, *, level: Level | None = None) -> Tensor:
    """fp32 0-d: the largest finite magnitude of x [..., K], 0 where there is none."""
    _check(x)
    built = library()
    if built is None:
        return torch.where(x.isfinite(), x, 0).abs().amax().float() if x.numel() else torch.zeros(())
    flat = rows(x)
    largest = c_float()
    result = built.blockscale_amax(
        flat.data_ptr(),
        flat.stride(0),
        *flat.shape,
        DTYPE_CODES[x.dtype],
        level_argument(level),
        torch.get_num_threads(),
        byref(largest),
    )
    check_result("amax", result, level)
    return torch.tensor(largest.value, dtype=torch.float32)


def _check(x: Tensor) -> None:
    reference.check_blocks("quantize_nvfp4", x)
    check_same_device("quantize_nvfp4", x=x, cpu=torch.empty(0))
