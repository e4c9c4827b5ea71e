"""One global scale for weights that engines fuse, without touching a value that another scale can hold.

    code * block_scale * old  =  code * (block_scale * old / new) * new

is exact where E4M3 holds block_scale * old / new. Where it does not, the block gets the neighbour of that quotient with
the smaller squared error, and its codes are rounded again to it. Before, every member's range is moved to the top of
E4M3 by a power of two, so that block scales have the most room below.

Divisors (compressed-tensors) stay divisors: products are compared instead of quotients, which fp64 holds exactly.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from blockscale.conversion.repair.fixes import widest
from blockscale.formats.minifloat import decode_table, encode
from blockscale.formats.packing import pack_nibbles, unpack_nibbles
from blockscale.formats.spec import E2M1, E4M3

_SLICE_ELEMENTS = 1 << 18
_MIN_CODE, _MAX_CODE = 1, 126  # E4M3's smallest subnormal .. 448
_MIN_MULTIPLIER = 2.0**-126  # below, its reciprocal may be infinite


@dataclass(frozen=True)
class ScaledWeight:
    """One NVFP4 weight as it is stored: packed uint8 [..., K/2], block_scale E4M3 [..., K/block], one global scale."""

    packed: Tensor
    block_scale: Tensor
    global_scale: Tensor
    is_divisor: bool = False

    @property
    def multiplier(self) -> float:
        """Of one of either direction; for comparing."""
        value = self.global_scale.double().item()
        return 1 / value if self.is_divisor else value


@dataclass(frozen=True)
class Rescaled:
    """`squared_error` and `squares`: of the values before and after, in units of the new global scale squared."""

    weight: ScaledWeight
    squared_error: float = 0.0
    squares: float = 0.0
    num_inexact: int = 0  # blocks whose values changed

    @property
    def relative_error(self) -> float:
        """Root of the sum of squared errors over that of squares; 0 where nothing changed."""
        return math.sqrt(self.squared_error / self.squares) if self.squared_error else 0.0


def share_global_scale(members: Sequence[ScaledWeight]) -> list[Rescaled]:
    """All members under one global scale: the largest that any of them needs.

    Members that agree already come back as they are. A member of zeros needs none, and takes the others'. Scales must
    be positive and finite, and block scales no NaN.
    """
    stored = [member.global_scale.double().item() for member in members]
    if len(set(stored)) == 1:
        return [Rescaled(member) for member in members]
    members = [fill_range(member) for member in members]
    needed = [member for member in members if _is_nonzero_block(member).any()] or members
    shared = widest([member.global_scale for member in needed], is_divisor=members[0].is_divisor)
    dtype = reduce(torch.promote_types, (member.global_scale.dtype for member in members))
    return [_rescale(member, shared.to(dtype)) for member in members]


def fill_range(weight: ScaledWeight) -> ScaledWeight:
    """The largest block scale moves into E4M3's upper half by a power of two, the global scale the other way.

    No value changes: a subnormal block scale only gains bits. Blocks of zeros keep their scale.
    """
    is_used = _is_nonzero_block(weight)
    if not is_used.any():
        return weight
    largest = weight.block_scale.float()[is_used].amax().item()
    power = math.floor(math.log2(E4M3.max / largest))
    while power > 0:
        moved = _moved(weight.global_scale, power if weight.is_divisor else -power)
        if moved is not None and replace(weight, global_scale=moved).multiplier >= _MIN_MULTIPLIER:
            values = weight.block_scale.float()
            block_scale = torch.where(is_used, values * 2.0**power, values).to(weight.block_scale.dtype)
            return replace(weight, block_scale=block_scale, global_scale=moved)
        power -= 1
    return weight


def _moved(scale: Tensor, power: int) -> Tensor | None:
    """scale * 2^power in the same dtype; None if it is not exact there."""
    wanted = scale.double() * 2.0**power
    moved = wanted.to(scale.dtype)
    return moved if bool(torch.isfinite(moved).all()) and bool((moved.double() == wanted).all()) else None


def _is_nonzero_block(weight: ScaledWeight) -> Tensor:
    """bool, the shape of the block scales: whether a block stands for anything but zeros."""
    codes = weight.packed.unflatten(-1, (weight.block_scale.shape[-1], -1))
    return ((codes & 0x77) != 0).any(-1) & (weight.block_scale.float() != 0)


def _rescale(weight: ScaledWeight, shared: Tensor) -> Rescaled:
    old, new = weight.global_scale.double(), shared.double()
    up, down = (new, old) if weight.is_divisor else (old, new)  # block_scale * up / down is the new block scale
    step = max(1, _SLICE_ELEMENTS // (2 * weight.packed.shape[-1]))
    rows = (weight.packed.flatten(0, -2).split(step), weight.block_scale.flatten(0, -2).split(step))
    parts = [_rescale_rows(*part, up.reshape(()), down.reshape(())) for part in zip(*rows, strict=True)]
    result = ScaledWeight(
        torch.cat([part.packed for part in parts]).view(weight.packed.shape),
        torch.cat([part.block_scale for part in parts]).view(weight.block_scale.shape),
        shared.reshape(weight.global_scale.shape),
        weight.is_divisor,
    )
    sums = (sum(part.squared_error for part in parts), sum(part.squares for part in parts))
    return Rescaled(result, *sums, sum(part.num_inexact for part in parts))


@dataclass(frozen=True)
class _Rows:
    packed: Tensor
    block_scale: Tensor
    squared_error: float
    squares: float
    num_inexact: int


def _rescale_rows(packed: Tensor, block_scale: Tensor, up: Tensor, down: Tensor) -> _Rows:
    """packed [R, K/2], block_scale [R, B]; `up`, `down`: fp64 0-d.

    Where both neighbours are normal numbers, a scale moves by less than 1/8 to either, and every code of E2M1 is still
    the nearest to its value: the nearer scale is the better one. Only below are codes rounded again.
    """
    codes = packed.unflatten(-1, (block_scale.shape[-1], -1))  # [R, B, block/2], two a byte
    power = _squares_of_bytes().index_select(0, codes.reshape(-1).int()).view(codes.shape).sum(-1)
    old = block_scale.double()
    wanted = old * up / down
    low, high = _neighbours(wanted)
    scale = torch.where(_value(high) - wanted < wanted - _value(low), high, low)
    is_kept = (power == 0) | (old == 0)  # blocks of zeros, whatever their scale
    is_exact = is_kept | (_value(scale) * down == old * up)
    error = torch.where(is_exact, 0.0, (_value(scale) - wanted).square() * power)
    is_coarse = ~is_exact & (wanted < E4M3.min_normal)
    if is_coarse.any():
        better = [part[is_coarse] for part in (codes, wanted, low, high)]
        codes = codes.clone()
        codes[is_coarse], scale[is_coarse], error[is_coarse] = _rounded_again(*better)
    return _Rows(
        codes.flatten(-2),
        torch.where(is_kept, block_scale.view(torch.uint8), scale).view(torch.float8_e4m3fn),
        error.sum().item(),
        (power * wanted.square()).sum().item(),
        int((error > 0).sum()),
    )


def _rounded_again(packed: Tensor, wanted: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks under the neighbour of less squared error: packed uint8 [n, block/2], E4M3 codes [n], errors fp64 [n]."""
    codes = unpack_nibbles(packed)
    table = decode_table(E2M1).double()
    values = table[(codes & 7).int()] * wanted.unsqueeze(-1)
    found: list[tuple[Tensor, Tensor]] = []
    for scale in (low, high):
        step = _value(scale).unsqueeze(-1)
        rounded = encode((values / step).float(), E2M1)
        found.append((rounded, (table[rounded.int()] * step - values).square().sum(-1)))
    (low_codes, low_error), (high_codes, high_error) = found
    is_high = high_error < low_error
    rounded = torch.where(is_high.unsqueeze(-1), high_codes, low_codes) | (codes & 8)
    return pack_nibbles(rounded), torch.where(is_high, high, low), torch.where(is_high, high_error, low_error)


def _neighbours(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The E4M3 codes at and below, and above, each of `wanted` (fp64, not negative)."""
    values = _value(torch.arange(_MAX_CODE + 1, dtype=torch.uint8))
    below = torch.searchsorted(values, wanted, right=True) - 1
    low, high = (code.clamp(_MIN_CODE, _MAX_CODE).to(torch.uint8) for code in (below, below + 1))
    return low, high


def _value(code: Tensor) -> Tensor:
    """fp64 of E4M3 codes."""
    return code.view(torch.float8_e4m3fn).double()


def _squares_of_bytes() -> Tensor:
    """fp64 [256]: the sum of squares of a byte's two E2M1 values."""
    squares = decode_table(E2M1).double().square()
    return (squares.unsqueeze(1) + squares).view(-1)
