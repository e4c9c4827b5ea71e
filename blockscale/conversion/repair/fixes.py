"""What puts one linear's stored tensors right without changing what they stand for.

Weights are [..., N, K]: packed uint8 [..., N, K/2], block scales [..., N, K/block]. Scalars of the second level keep
the direction that they are stored in: multipliers (Model Optimizer) or divisors (compressed-tensors).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.formats.layout import unswizzle

_SIGNS, _FP8_SIGN = 0x88, 0x80  # the sign bits of a byte's two codes, or of its one


# ---------------------------------------------------------------- signs


def unsign_block_scales(packed: Tensor, block_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Signs of E4M3 block scales move into their blocks' codes: (-s) x = s (-x), bit for bit, zeros included."""
    bits = block_scale.view(torch.uint8)
    flips = ((bits >> 7) * _SIGNS).unsqueeze(-1)  # [..., N, K/block, 1]
    codes = packed.unflatten(-1, (block_scale.shape[-1], -1)) ^ flips
    return codes.flatten(-2), (bits & 0x7F).view(block_scale.dtype)


def unsign_global_scale(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The sign of the one scale that a whole weight has (either direction) moves into all of its codes, E2M1 or FP8."""
    if not (scale < 0).any():
        return packed, scale
    flips = _SIGNS if packed.dtype == torch.uint8 else _FP8_SIGN
    return (packed.view(torch.uint8) ^ flips).view(packed.dtype), scale.abs()


# ---------------------------------------------------------------- order


def swap_nibbles(packed: Tensor) -> Tensor:
    """The even element comes to lie in the low nibble."""
    return (packed << 4) | (packed >> 4)


def unswizzle_scales(stored: Tensor, rows: int, cols: int) -> Tensor:
    """One-byte scales in the tensor core's 128x4 order -> [..., rows, cols] in row order.

    `stored`: [..., ceil128(rows), ceil4(cols)] or the same number of entries in another shape; leading dimensions of a
    stack of experts stay. FormatError if the number does not fit.
    """
    lead = tuple(stored.shape[:-2]) if stored.dim() > 2 else ()
    if not lead:
        return unswizzle(stored, rows, cols)
    tiles = stored.reshape(-1, *stored.shape[-2:])
    return torch.stack([unswizzle(tile, rows, cols) for tile in tiles]).view(*lead, rows, cols)


def crop_scales(stored: Tensor, rows: int, cols: int) -> Tensor:
    """Scales in row order of a weight that was padded with zeros -> [..., rows, cols]. FormatError if it has fewer."""
    if stored.dim() < 2 or stored.shape[-2] < rows or stored.shape[-1] < cols:
        raise FormatError(f"scales {list(stored.shape)} are no padded [{rows}, {cols}]")
    return stored[..., :rows, :cols].contiguous()


def has_zero_padding(stored: Tensor, rows: int, cols: int) -> bool:
    """Whether all that `crop_scales` would cut off is zero."""
    bits = stored.view(torch.uint8)
    return not (bits[..., rows:, :].any() or bits[..., :rows, cols:].any())


def has_swizzled_zero_padding(stored: Tensor, rows: int, cols: int) -> bool:
    """Whether all that `unswizzle_scales` would cut off is zero."""
    padded = unswizzle_scales(stored, -(-rows // 128) * 128, -(-cols // 4) * 4)
    return has_zero_padding(padded, rows, cols)


# ---------------------------------------------------------------- zeros that became NaN


def is_zero_as_nan(block_scale: Tensor, global_scale: Tensor) -> bool:
    """How a weight of zeros comes out where nobody looks: a global scale of 0, every block scale 0 / 0."""
    all_nan = bool(((block_scale.view(torch.uint8) & 0x7F) == 0x7F).all())
    return all_nan and bool((global_scale == 0).all())


def zero_weight(packed: Tensor, block_scale: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same shapes and dtypes: codes 0, block scales 1, global scale 1."""
    ones = torch.ones(block_scale.shape).to(block_scale.dtype)
    return torch.zeros_like(packed), ones, torch.ones_like(global_scale)


# ---------------------------------------------------------------- scalars


def reverse(scale: Tensor) -> Tensor:
    """A multiplier stored as divisor, or the reverse: its reciprocal, within one unit in the last place."""
    return scale.float().reciprocal().to(scale.dtype)


def widest(scales: Sequence[Tensor], *, is_divisor: bool) -> Tensor:
    """The one with the largest range: the largest multiplier, or the smallest divisor. Its bytes as they are."""
    return min(scales, key=_value) if is_divisor else max(scales, key=_value)


def is_usable(scale: Tensor) -> bool:
    """Whether a scale and its reciprocal are positive normal numbers."""
    values = torch.stack((scale.float(), scale.float().reciprocal()))
    return bool((torch.isfinite(values) & (values >= torch.finfo(torch.float32).tiny)).all())


def _value(scale: Tensor) -> float:
    return scale.float().item()
