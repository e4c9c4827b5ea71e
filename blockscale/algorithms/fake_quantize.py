"""Activations as the low-precision tensor core sees them: rounded, and still floats.

Each function returns values and a 0-d or [..., 1] factor with x ~= values * factor. For the block formats `values` is
element * block_scale, which bf16 and fp32 hold exactly, so a product of two such tensors in fp32 differs from the
hardware's only in the order of the sum; the global scales multiply the result, as in the hardware's epilogue.

Block scales of NVFP4 follow the values as the model runs. Hardware takes each block's amax; a search that errs less
(`ActivationScale`) changes no format, only which scale is written beside the codes.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from blockscale.algorithms.activation_scale import ActivationScale
from blockscale.algorithms.four_over_six import four_or_six_block_scale
from blockscale.algorithms.scale_sweep import best_block_scale
from blockscale.algorithms.straight_through import straight_through
from blockscale.errors import FormatError
from blockscale.formats import fp8, mx
from blockscale.formats.minifloat import round_magnitude
from blockscale.formats.nvfp4 import block_amax, block_scale_from_amax
from blockscale.formats.spec import E2M1, FP8, FP8_TOKEN, MXFP4, NVFP4, Format

_SLICE_ELEMENTS = 1 << 17  # of a search on a CPU: its temporaries stay in the cache


def _nvfp4(x: Tensor, scale: Tensor | None, method: ActivationScale) -> tuple[Tensor, Tensor]:
    if scale is None:
        raise FormatError("NVFP4 activations need a calibrated global scale")
    block_scale = _block_scale(x, scale, method).float().unsqueeze(-1)
    blocks = x.float().unflatten(-1, (-1, NVFP4.block_size))
    rounded = round_magnitude((blocks / (block_scale * scale)).abs_(), E2M1).copysign_(blocks)
    return rounded.mul_(block_scale).flatten(-2), scale


def _block_scale(x: Tensor, scale: Tensor, method: ActivationScale) -> Tensor:
    """float8_e4m3fn [..., K/16]."""
    if method is ActivationScale.AMAX:
        return block_scale_from_amax(block_amax(x), scale)
    choose = four_or_six_block_scale if method is ActivationScale.FOUR_OVER_SIX else best_block_scale
    if x.device.type != "cpu" or x.numel() <= _SLICE_ELEMENTS:
        return choose(x, scale)
    rows = x.reshape(-1, x.shape[-1])
    parts = [choose(part, scale) for part in rows.split(max(1, _SLICE_ELEMENTS // x.shape[-1]))]
    return torch.cat(parts).view(*x.shape[:-1], -1)


def _mxfp4(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    codes = mx.scale_from_amax(block_amax(x, MXFP4.block_size), E2M1)
    block_scale = mx.scale_values(codes).unsqueeze(-1)
    blocks = x.float().unflatten(-1, (-1, MXFP4.block_size))
    rounded = round_magnitude((blocks / block_scale).abs_(), E2M1).copysign_(blocks)
    return rounded.mul_(block_scale).flatten(-2), torch.ones((), device=x.device)


def _fp8_static(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    if scale is None:
        raise FormatError("static FP8 activations need a calibrated scale")
    return fp8.encode_values(x, scale, FP8).float(), scale


def _fp8_token(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    per_token = fp8.scale_from_amax(fp8.amax(x, FP8_TOKEN), FP8_TOKEN)
    return fp8.encode_values(x, per_token, FP8_TOKEN).float(), per_token


_ROUND: dict[Format, Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]] = {
    MXFP4: _mxfp4,
    FP8: _fp8_static,
    FP8_TOKEN: _fp8_token,
}


def round_activation(
    x: Tensor, fmt: Format, scale: Tensor | None, method: ActivationScale = ActivationScale.AMAX
) -> tuple[Tensor, Tensor]:
    """(values, factor) of x [..., K] in `fmt`.

    scale   fp32 0-d, the calibrated input_global_scale where the format needs one
    method  of NVFP4's block scales; of other formats there is one way, and it is not looked at

    Gradients pass straight through: those of x / factor.
    """
    if fmt is not NVFP4 and fmt not in _ROUND:
        known = ", ".join(f.name for f in (NVFP4, *_ROUND))
        raise FormatError(f"activations in {fmt.name} are not emulated", hint=known)
    plain = x.detach()
    values, factor = _nvfp4(plain, scale, method) if fmt is NVFP4 else _ROUND[fmt](plain, scale)
    return straight_through(x, values, factor), factor
