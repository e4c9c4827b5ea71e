"""Codes, one per byte, to packed bytes and back."""

import torch
from torch import Tensor

from blockscale.errors import FormatError


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 [..., K] 4-bit codes -> uint8 [..., K/2]; the even element lies in the low nibble."""
    if codes.shape[-1] % 2:
        raise FormatError(f"cannot pack {codes.shape[-1]} 4-bit codes: the last dimension must be even")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., K/2] -> uint8 [..., K] codes, one per byte."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def pack_sixes(codes: Tensor) -> Tensor:
    """uint8 [..., K] 6-bit codes -> uint8 [..., 3K/4]: four codes, the first in the lowest bits, fill three bytes."""
    if codes.shape[-1] % 4:
        raise FormatError(f"cannot pack {codes.shape[-1]} 6-bit codes: the last dimension must be a multiple of 4")
    a, b, c, d = codes.unflatten(-1, (-1, 4)).unbind(-1)
    return torch.stack((a | (b << 6), (b >> 2) | (c << 4), (c >> 4) | (d << 2)), dim=-1).flatten(-2)


def unpack_sixes(packed: Tensor) -> Tensor:
    """uint8 [..., 3K/4] -> uint8 [..., K] codes, one per byte."""
    x, y, z = packed.unflatten(-1, (-1, 3)).unbind(-1)
    codes = torch.stack((x, (x >> 6) | (y << 2), (y >> 4) | (z << 4), z >> 2), dim=-1)
    return (codes & 0x3F).flatten(-2)
