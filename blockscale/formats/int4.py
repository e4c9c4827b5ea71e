"""INT4 groups: symmetric two's-complement nibbles with a bf16 scale per 16, 32 or 128 elements.

    x ~= int4(code) * scale,   scale = bf16(amax / 7),   code = clamp(round_half_even(x / scale), -7, 7)

The range is symmetric, so a block's largest element is met with either sign. Here to compare like with like.
"""

import torch
from torch import Tensor

from blockscale.formats.division import divide
from blockscale.formats.spec import INT4


def scale_from_amax(amax: Tensor) -> Tensor:
    """bf16, the shape of `amax`; 1 for a zero block, and never so small that it rounds to 0."""
    tiny = torch.finfo(torch.bfloat16).tiny
    scale = divide(amax, INT4.max).clamp_(min=tiny).to(torch.bfloat16)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def encode_codes(x: Tensor, scale: Tensor) -> Tensor:
    """uint8 codes [..., K], one per byte: the two's-complement nibble."""
    blocks = x.float().unflatten(-1, (scale.shape[-1], -1)) / scale.float().unsqueeze(-1)
    integers = blocks.round_().clamp_(-INT4.max, INT4.max).to(torch.int8)
    return (integers.view(torch.uint8) & 0xF).flatten(-2)


def decode_codes(codes: Tensor, scale: Tensor) -> Tensor:
    """fp32 [..., K]."""
    integers = ((codes ^ 8).to(torch.int8) - 8).float()
    return (integers.unflatten(-1, (scale.shape[-1], -1)) * scale.float().unsqueeze(-1)).flatten(-2)
