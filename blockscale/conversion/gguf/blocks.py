"""Weights as the bytes of GGML's blocks.

    NVFP4  64 elements, 36 bytes: four E4M3 scales without a sign, then 8 bytes for each 16 elements
    MXFP4  32 elements, 17 bytes: one E8M0 scale, then 16 bytes

Both pair the halves of a block in a byte, the first half in the low nibble, where checkpoints pair neighbours.
Codes and scales are copied; decoders read a code as twice its value and a scale as half of its own.
Source: ggml-common.h, ggml-quants.c.
"""

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.formats.spec import NVFP4, Format
from blockscale.formats.tensor import non_finite_error

NVFP4_BLOCK, MXFP4_BLOCK = 64, 32
_SLICE_ELEMENTS = 1 << 22
_LOW_NIBBLES = 0x0F0F0F0F


def packed_blocks(fmt: Format, packed: Tensor, block_scale: Tensor) -> np.ndarray:
    """uint8 [..., bytes of a row] of NVFP4 or MXFP4 codes."""
    return (nvfp4_blocks if fmt is NVFP4 else mxfp4_blocks)(packed, block_scale)


def nvfp4_blocks(packed: Tensor, block_scale: Tensor) -> np.ndarray:
    """uint8 [..., K/2] and float8_e4m3fn [..., K/16], none negative -> uint8 [..., K/64 * 36]."""
    scales = (block_scale.view(torch.uint8) & 0x7F).unflatten(-1, (-1, 4))  # a zero may be -0
    codes = _pair_halves(packed, 16).unflatten(-2, (-1, 4)).flatten(-2)  # [..., K/64, 32]
    return torch.cat((scales, codes), dim=-1).flatten(-2).numpy()


def mxfp4_blocks(packed: Tensor, block_scale: Tensor) -> np.ndarray:
    """uint8 [..., K/2] and uint8 [..., K/32] -> uint8 [..., K/32 * 17]."""
    return torch.cat((block_scale.unsqueeze(-1), _pair_halves(packed, 32)), dim=-1).flatten(-2).numpy()


def _pair_halves(packed: Tensor, size: int) -> Tensor:
    """Neighbours in a byte -> [..., K/size, size/2], element j of a block with element j + size/2.

    Four bytes at a time: of a block's two halves the low nibbles make the even bytes, the high ones the odd bytes.
    """
    first, second = packed.contiguous().view(torch.int32).unflatten(-1, (-1, 2, size // 16)).unbind(-2)
    even = (first & _LOW_NIBBLES) | ((second & _LOW_NIBBLES) << 4)
    odd = ((first >> 4) & _LOW_NIBBLES) | (second & ~_LOW_NIBBLES)
    return torch.stack((even.view(torch.uint8), odd.view(torch.uint8)), dim=-1).flatten(-2)


def plain_blocks(values: Tensor, kind: GGMLQuantizationType, name: str) -> np.ndarray:
    """Floats [..., K] as F32, F16, BF16 or Q8_0, uint8 [..., bytes of a row].

    NonFiniteError for NaN or Inf, FormatError for what F16 cannot hold; both name the tensor."""
    if not torch.isfinite(values).all():
        raise non_finite_error(values.reshape(-1), tuple(values.shape), name)
    if kind is GGMLQuantizationType.Q8_0:
        return _q8_0(values)
    dtype = {
        GGMLQuantizationType.F32: torch.float32,
        GGMLQuantizationType.F16: torch.float16,
        GGMLQuantizationType.BF16: torch.bfloat16,
    }[kind]
    cast = values.to(dtype).contiguous()
    if kind is GGMLQuantizationType.F16 and not torch.isfinite(cast).all():
        raise FormatError(
            f"{name}: {values.float().abs().amax().item():g} is more than F16 can hold", hint='keep matrices in "bf16"'
        )
    return cast.view(torch.uint8).numpy()


def _q8_0(values: Tensor) -> np.ndarray:
    """A slice of rows at a time: gguf's quantizer holds several fp32 copies of its input."""
    rows = values.reshape(-1, values.shape[-1])
    step = max(1, _SLICE_ELEMENTS // rows.shape[-1])
    parts = [gguf.quants.quantize(part.float().numpy(), GGMLQuantizationType.Q8_0) for part in rows.split(step)]
    return np.concatenate(parts).reshape(*values.shape[:-1], -1)
