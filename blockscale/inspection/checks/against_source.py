"""A quantized linear beside the 16-bit weight that it was made from: which reading of its bytes fits.

A bounded sample is decoded as it is stored, with nibbles swapped, with block scales taken out of 128x4 order, and with
both. Quantization may have been preceded by a change of scale of rows and columns that a norm or a neighbour undoes
(AWQ, SmoothQuant), so each row and each column may be scaled freely before the distance is taken: that costs a
128th of the sample's freedom and hides no wrong layout.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.checkpoint.dialects import branches
from blockscale.checkpoint.dialects.stored import StoredLinear, role_faults
from blockscale.checkpoint.header import TensorInfo
from blockscale.checkpoint.source import SourceTensor
from blockscale.checkpoint.tensors import read_tensor
from blockscale.formats import mx
from blockscale.formats.layout import unswizzle
from blockscale.formats.minifloat import decode_table
from blockscale.formats.packing import unpack_nibbles
from blockscale.formats.spec import E2M1, Granularity, ScaleType
from blockscale.inspection.census import read_scalars
from blockscale.inspection.checks.scale_order import TILE_ROWS, can_be_swizzled

_MAX_COLS = 1024
_FEW_ROWS = 16  # with fewer, free scales of columns would fit anything
_ROUNDS = 3  # of fitting columns, then rows


@dataclass(frozen=True)
class Layout:
    is_swapped: bool = False
    is_swizzled: bool = False


AS_STORED = Layout()


@dataclass(frozen=True)
class Closeness:
    """How a sample of a decoded weight D relates to the source's W, as it is stored.

    error       sum((W - D)^2) / sum(W^2)
    least       the same after D was multiplied with `ratio`, which makes it least
    ratio       below 1: D is too large
    multiplier  what codes times block scales were multiplied with
    """

    error: float
    least: float
    ratio: float
    multiplier: float

    @property
    def correlation(self) -> float:
        return math.copysign(math.sqrt(max(0.0, 1 - self.least)), self.ratio)


def decibels(share: float) -> float:
    """Signal over noise, from noise over signal."""
    return -10 * math.log10(share) if share > 0 else math.inf


def is_comparable(linear: StoredLinear) -> bool:
    """Whether its tensors are what its scheme says: all there, with the dtypes and shapes of the format."""
    rules = {fault.rule for fault in role_faults(linear)}
    return rules <= {"missing-input-scale"} and 0 not in linear.shape


def stored_shape(linear: StoredLinear) -> tuple[int, ...]:
    """Of the source's parameter: stacks keep the model's own orientation [E, K, N]."""
    *lead, n, k = linear.shape
    return (*lead, k, n) if linear.is_transposed else linear.shape


def closeness(linear: StoredLinear, source: SourceTensor) -> Closeness | None:
    """None where there is nothing to compare: weights of zeros, or a global scale that is no number.

    `linear` is comparable, and `source` has its `stored_shape`. CheckpointError if a file cannot be read.
    """
    multiplier = _multiplier(linear)
    power = product = own_power = 0.0
    for weight, decoded in _samples(linear, source, (AS_STORED,)):
        values = decoded[AS_STORED]
        power += _dot(weight, weight)
        product += _dot(weight, values)
        own_power += _dot(values, values)
    if not (0 < power < math.inf and 0 < multiplier < math.inf):
        return None
    if own_power == 0:
        return Closeness(1.0, 1.0, 0.0, multiplier)
    error = (power - 2 * multiplier * product + multiplier**2 * own_power) / power
    return Closeness(error, 1 - product**2 / (power * own_power), product / (multiplier * own_power), multiplier)


def errors_by_layout(linear: StoredLinear, source: SourceTensor) -> dict[Layout, float]:
    """By layout, the simplest first: sum((W - D)^2) / sum(W^2) once rows and columns of D are scaled at will."""
    layouts = [AS_STORED]
    if linear.scheme.weight.element.bits == 4:
        may_be_swizzled = (False, True) if can_be_swizzled(linear) else (False,)
        layouts = [Layout(*flags) for flags in itertools.product((False, True), may_be_swizzled)]
    power, errors = 0.0, dict.fromkeys(layouts, 0.0)
    for weight, decoded in _samples(linear, source, layouts):
        power += _dot(weight, weight)
        for layout, values in decoded.items():
            errors[layout] += _error_of_pattern(weight, values)
    return {layout: error / power for layout, error in errors.items()}


def _multiplier(linear: StoredLinear) -> float:
    """What codes times block scales are multiplied with."""
    info = linear.tensors.get("global_scale")
    if info is None or not linear.scheme.weight.has_global_scale:
        return 1.0
    stored = read_scalars([info])[info.name]
    if not linear.has_divisors:
        return stored
    return 1 / stored if stored else math.inf


# ---------------------------------------------------------------- samples


def _samples(
    linear: StoredLinear, source: SourceTensor, layouts: Sequence[Layout]
) -> Iterator[tuple[Tensor, dict[Layout, Tensor]]]:
    """fp32 [R, C] of the source, and the same of the linear without its global scale, by layout."""
    whole = None if source.is_plain else source.read()
    for expert, row, col in _corners(linear):
        num_rows = min(TILE_ROWS, linear.shape[-2] - row)
        num_cols = min(_MAX_COLS, linear.shape[-1] - col)
        part = _Part(linear, expert, row, num_rows, col, num_cols)
        weight = part.of_source(source, whole).float().nan_to_num(0, 0, 0)
        scales = {False: part.scales()}
        if any(layout.is_swizzled for layout in layouts):
            scales[True] = part.scales(is_swizzled=True)
        codes = {swapped: part.codes(swapped) for swapped in {layout.is_swapped for layout in layouts}}
        beside, factor = part.low_rank(), part.pre_quant_scale()
        yield weight, {at: (codes[at.is_swapped] * scales[at.is_swizzled] + beside) * factor for at in layouts}


def _corners(linear: StoredLinear) -> list[tuple[int, int, int]]:
    """Expert, row and column where samples begin, on whole tiles: in the first, the middle and the last of each."""
    n, k = linear.shape[-2:]
    step = 4 * (linear.scheme.weight.block_size or 16)
    experts = _spread(linear.shape[0] - 1 if len(linear.shape) == 3 else 0, 1)
    rows = _spread(max(0, n // TILE_ROWS - 1) * TILE_ROWS, TILE_ROWS)
    cols = _spread(max(0, k - _MAX_COLS), step)
    return list(dict.fromkeys(zip(experts, rows, cols, strict=True)))


def _spread(last: int, step: int) -> tuple[int, int, int]:
    """0, about the middle, and about `last`, in multiples of `step`."""
    return 0, last // 2 // step * step, last // step * step


@dataclass(frozen=True)
class _Part:
    """A rectangle of one linear, or of one of its experts, in the orientation [N, K]."""

    linear: StoredLinear
    expert: int
    row: int
    num_rows: int
    col: int
    num_cols: int

    def of_source(self, source: SourceTensor, whole: Tensor | None) -> Tensor:
        return self._cut(source.stored[0], 1) if whole is None else self._cut_of(whole)

    def codes(self, is_swapped: bool) -> Tensor:
        """fp32 [R, C]."""
        info = self.linear.tensors["packed"]
        if self.linear.scheme.weight.element.bits == 8:
            return self._cut(info, 1).float()
        packed = self._cut(info, 2)
        if is_swapped:
            packed = (packed << 4) | (packed >> 4)
        return decode_table(E2M1)[unpack_nibbles(packed.contiguous()).int()]

    def scales(self, is_swizzled: bool = False) -> Tensor:
        """fp32, one an element or something that broadcasts to it; NaN counts as 0."""
        fmt, info = self.linear.scheme.weight, self.linear.tensors["block_scale"]
        if fmt.granularity is Granularity.TENSOR:
            return read_tensor(info).float().reshape(1, 1).nan_to_num(0, 0, 0)
        if fmt.granularity is Granularity.CHANNEL:
            rows = read_tensor(info).float().reshape(-1, 1)[self.row : self.row + self.num_rows]
            return rows.nan_to_num(0, 0, 0)
        if is_swizzled:
            tile = _rows(info, self.row, TILE_ROWS)
            first = self.col // fmt.block_size
            scale = unswizzle(tile, *tile.shape)[:, first : first + self.num_cols // fmt.block_size]
        else:
            scale = self._cut(info, fmt.block_size)
        values = mx.scale_values(scale.view(torch.uint8)) if fmt.scale is ScaleType.E8M0 else scale.float()
        return values.nan_to_num(0, 0, 0).repeat_interleave(fmt.block_size, dim=-1)

    def pre_quant_scale(self) -> Tensor:
        """What AWQ multiplies inputs with stands on the weight's side here."""
        info = self.linear.tensors.get("pre_quant_scale")
        if info is None:
            return torch.ones(1)
        return read_tensor(info).float().reshape(-1)[self.col : self.col + self.num_cols].nan_to_num(1, 1, 1)

    def low_rank(self) -> Tensor:
        """What a branch adds to the weight, over the global scale that codes lack here: fp32 [R, C], or a zero."""
        up, down = (self.linear.tensors.get(role) for role in (branches.UP, branches.DOWN))
        multiplier = _multiplier(self.linear)
        if up is None or down is None or not 0 < multiplier < math.inf:
            return torch.zeros(1)
        rows, cols = _rows(up, self.row, self.num_rows), read_tensor(down)[:, self.col : self.col + self.num_cols]
        return (rows.float() @ cols.float()).nan_to_num(0, 0, 0) / multiplier

    def _cut(self, info: TensorInfo, per_entry: int) -> Tensor:
        """Of a tensor of which an entry covers `per_entry` elements along K."""
        begin, count = self.col // per_entry, self.num_cols // per_entry
        if not self.linear.is_transposed:
            first = self.expert * self.linear.shape[-2] + self.row
            return _rows(info, first, self.num_rows)[:, begin : begin + count]
        first = self.expert * (self.linear.shape[-1] // per_entry) + begin
        return _rows(info, first, count)[:, self.row : self.row + self.num_rows].t().contiguous()

    def _cut_of(self, whole: Tensor) -> Tensor:
        matrix = whole[self.expert] if whole.dim() == 3 else whole
        matrix = matrix.t() if self.linear.is_transposed else matrix
        return matrix[self.row : self.row + self.num_rows, self.col : self.col + self.num_cols]


def _rows(info: TensorInfo, first: int, count: int) -> Tensor:
    """[count, last dimension]: rows of a tensor seen as a matrix."""
    width = info.shape[-1]
    row_bytes = info.num_bytes // math.prod(info.shape[:-1])
    offset = info.offset + first * row_bytes
    return read_tensor(info._replace(shape=(count, width), offset=offset, num_bytes=count * row_bytes))


# ---------------------------------------------------------------- distance


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.sum(a * b, dtype=torch.float64))


def _error_of_pattern(weight: Tensor, decoded: Tensor) -> float:
    """Least sum((W - a_r D_rc b_c)^2) over factors a of rows and b of columns, near enough."""
    if weight.shape[0] < _FEW_ROWS:
        power = _dot(decoded, decoded)
        return _dot(weight, weight) - (_dot(weight, decoded) ** 2 / power if power else 0.0)
    rows = torch.ones(weight.shape[0], 1)
    for _ in range(_ROUNDS):
        cols = _fit(weight, decoded * rows, 0)
        rows = _fit(weight, decoded * cols, 1)
    difference = weight - decoded * rows * cols
    return _dot(difference, difference)


def _fit(weight: Tensor, decoded: Tensor, dim: int) -> Tensor:
    """The factor of each column (dim 0) or row (dim 1) that brings D closest to W; 0 where D is zero."""
    power = (decoded * decoded).sum(dim, keepdim=True)
    return torch.where(power > 0, (weight * decoded).sum(dim, keepdim=True) / power, 0.0)
