"""MXFP4 as NVFP4, without rounding wherever the exponents allow it.

    e2m1(code) * 2^k  =  e2m1(code) * e4m3(2^(k - m)) * 2^m

The codes stay, both halves of a block of 32 get the scale 2^(k - m), and the global scale is 2^m. E4M3 holds the powers
of two from 2^-9 to 2^8, so one m serves exponents that lie within 17 of each other; a half further out still fits if
all its codes can be doubled or halved. Nothing ever saturates: m follows the largest values, and what lies too far
below them is rounded to the grid that is left there, with the scale of least error.

Where all blocks fit, these are Model Optimizer's bytes: m = (largest exponent) - 8.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from blockscale.formats.minifloat import decode_table, encode
from blockscale.formats.packing import unpack_nibbles
from blockscale.formats.spec import E2M1, NVFP4
from blockscale.formats.tensor import QuantizedTensor

_BIAS = 127
_LOWEST, _HIGHEST = -9, 8  # powers of two that E4M3 has
_MIN_EXPONENT = -126  # of the global scale: its reciprocal must be a normal number too
_HALF_BYTES = 8  # 16 codes
_MAGNITUDES = 0x7777777777777777  # of 16 codes: all but the signs
_SLICE, _ROUNDED_SLICE = 1 << 17, 1 << 14  # halves
# How often a magnitude (by its code without the sign: 0 .5 1 1.5 2 3 4 6) stays one when it is doubled, or halved.
_DOUBLINGS = (9, 3, 2, 2, 1, 1, 0, 0)
_HALVINGS = (9, 0, 1, 0, 2, 1, 3, 2)


@dataclass(frozen=True)
class Cast:
    """`error`: relative, the root of summed squared errors over the sum of squares; 0 where every value stayed."""

    weight: QuantizedTensor
    error: float


def cast_group(weights: Sequence[QuantizedTensor]) -> list[Cast]:
    """MXFP4 tensors that share a global scale -> NVFP4. Scales must be numbers (no E8M0 255)."""
    halves = [weight.packed.reshape(-1, _HALF_BYTES) for weight in weights]
    exponents = [(weight.block_scale.reshape(-1).int() - _BIAS).repeat_interleave(2) for weight in weights]
    has_values = [part.view(torch.int64).squeeze(-1) & _MAGNITUDES != 0 for part in halves]
    shared = _shared_exponent(halves, exponents, has_values)
    return [_cast(*parts, shared) for parts in zip(weights, halves, exponents, has_values, strict=True)]


def _shared_exponent(halves: Sequence[Tensor], exponents: Sequence[Tensor], has_values: Sequence[Tensor]) -> int:
    """m. Halves with k - m in [-9 - halvings, 8 + doublings] are exact; none may lie above that, and as few as possible
    below. Of the exponents for which that holds, the largest."""
    used = torch.cat([exponent[is_used] for exponent, is_used in zip(exponents, has_values, strict=True)])
    if not len(used):
        return 0
    largest = int(used.max()) - _HIGHEST
    if int(used.min()) - largest < _LOWEST:
        found = torch.cat([_magnitudes(part[is_used]) for part, is_used in zip(halves, has_values, strict=True)])
        least = int((used - _HIGHEST - _steps(found, _DOUBLINGS)).max())
        limits = used - _LOWEST + _steps(found, _HALVINGS)  # the largest m for which a half is exact
        lost = int((limits < least).sum())
        while largest > least and int((limits < largest).sum()) > lost:
            largest -= 1
    return max(largest, _MIN_EXPONENT)


def _magnitudes(halves: Tensor) -> Tensor:
    """uint8 [halves]: which magnitudes each has, a bit a magnitude."""
    byte = torch.arange(256)
    bits = ((1 << (byte & 7)) | (1 << (byte >> 4 & 7))).to(torch.uint8)
    result = []
    for part in halves.split(_SLICE):
        word = bits.index_select(0, part.reshape(-1).int()).view(torch.int64)
        for shift in (32, 16, 8):
            word |= word >> shift
        result.append((word & 0xFF).to(torch.uint8))
    return torch.cat(result)


def _steps(found: Tensor, steps: Sequence[int]) -> Tensor:
    """int32 [halves]: the least of `steps` among the magnitudes of each."""
    sets = [[steps[i] for i in range(8) if bits >> i & 1] for bits in range(256)]
    return torch.tensor([min(of_set, default=0) for of_set in sets], dtype=torch.int32)[found.int()]


def _cast(weight: QuantizedTensor, halves: Tensor, exponents: Tensor, has_values: Tensor, shared: int) -> Cast:
    shifted = exponents - shared
    is_out = (shifted < _LOWEST) | (shifted > _HIGHEST)
    shifted[is_out & ~has_values] = 0  # zeros are zeros by any scale
    is_out &= has_values
    powers = torch.tensor([2.0**power for power in range(_LOWEST, _HIGHEST + 1)]).to(torch.float8_e4m3fn)
    scale = powers.view(torch.uint8)[(shifted - _LOWEST).clamp(0, len(powers) - 1)]
    error = 0.0
    if is_out.any():
        halves = halves.clone()
        error = _round(halves, scale, shifted, is_out)
    *lead, k = weight.shape
    cast = QuantizedTensor(
        NVFP4,
        halves.view(weight.packed.shape),
        scale.view(torch.float8_e4m3fn).view(*lead, k // 16),
        torch.tensor(2.0**shared, dtype=torch.float32),
        weight.shape,
        weight.dtype,
    )
    return Cast(cast, error)


def _round(halves: Tensor, scale: Tensor, shifted: Tensor, is_out: Tensor) -> float:
    """Gives the halves that are out of range new codes and scales, in place, and returns the relative error that this
    makes of the whole tensor. Everything is in units of the global scale.

    Halves of one exponent have eight magnitudes between them, so what each scale makes of those is known beforehand,
    and a half's error is the sum of theirs by how often it has them.
    """
    squares, squared_error = _squares(halves, shifted), 0.0
    positions = is_out.nonzero().squeeze(-1)
    powers, order = shifted[positions].sort()
    powers, sizes = powers.unique_consecutive(return_counts=True)
    for power, alike in zip(powers.tolist(), positions[order].split(sizes.tolist()), strict=True):
        choices = _choices(power)
        for part in alike.split(_ROUNDED_SLICE):
            least, choice = (_counts(halves[part]) @ choices.errors).min(-1)
            squared_error += least.sum().item()
            scale[part] = choices.scales[choice]
            halves[part] = choices.bytes.view(-1)[256 * choice.unsqueeze(-1) + halves[part]]
    return math.sqrt(squared_error / squares)


@dataclass(frozen=True)
class _Choices:
    """Every E4M3 scale that values of one exponent may get, smallest first.

    scales  uint8 [C]
    errors  fp64 [8, C]: of each magnitude, squared
    bytes   uint8 [C, 256]: what two codes become
    """

    scales: Tensor
    errors: Tensor
    bytes: Tensor


def _choices(power: int) -> _Choices:
    scales = torch.arange(1, 127, dtype=torch.uint8)
    steps = scales.view(torch.float8_e4m3fn).double()
    magnitudes = decode_table(E2M1)[:8].double() * 2.0**power
    is_used = steps <= 4 * magnitudes[-1]  # above, all values become zero, which the smallest makes of them as well
    is_used[0] = True
    scales, steps = scales[is_used], steps[is_used].unsqueeze(-1)
    codes = encode((magnitudes / steps).float(), E2M1)  # [C, 8]; what fp32 cannot hold lies far below the grid
    errors = (decode_table(E2M1)[codes.int()].double() * steps - magnitudes).square()
    low, high = torch.arange(256) & 7, torch.arange(256) >> 4 & 7
    signs = torch.arange(256, dtype=torch.uint8) & 0x88
    return _Choices(scales, errors.t().contiguous(), codes[:, low] | codes[:, high] << 4 | signs)


def _counts(halves: Tensor) -> Tensor:
    """fp64 [halves, 8]: how often each has each magnitude."""
    byte = torch.arange(256)
    each = one_hot(byte & 7, 8) + one_hot(byte >> 4 & 7, 8)
    packed = each.to(torch.uint8).view(torch.int64).squeeze(-1)  # eight counters of a byte: none exceeds 16
    sums = packed.index_select(0, halves.reshape(-1).int()).view(-1, _HALF_BYTES).sum(-1)
    return sums.unsqueeze(-1).view(torch.uint8).double()


def _squares(halves: Tensor, shifted: Tensor) -> float:
    """The sum of squared values."""
    values = decode_table(E2M1)[unpack_nibbles(torch.arange(256, dtype=torch.uint8).unsqueeze(-1)).int()]
    of_byte = values.square().sum(-1).double()
    total = 0.0
    for part, power in zip(halves.split(_SLICE), shifted.split(_SLICE), strict=True):
        sums = of_byte.index_select(0, part.reshape(-1).int()).view(-1, _HALF_BYTES).sum(-1)
        total += (sums * 4.0 ** power.double()).sum().item()
    return total
