"""One weight tensor to a QuantizedTensor, a slice of rows at a time, with the error it cost."""

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from blockscale.algorithms.four_over_six import four_or_six_block_scale
from blockscale.algorithms.scale_sweep import best_block_scale
from blockscale.errors import FormatError
from blockscale.formats import fp8, nvfp4
from blockscale.formats.spec import NVFP4, Format, Granularity, get_format
from blockscale.formats.tensor import QuantizedTensor, check_finite, check_quantizable, decode, encode

# On a CPU a slice's temporaries stay in its cache; a GPU wants enough work for each launch.
_SLICE_ELEMENTS_CPU, _SLICE_ELEMENTS_GPU = 1 << 18, 1 << 24


class ScaleMethod(Enum):
    """How block scales are chosen. SWEEP and FOUR_OVER_SIX are for formats with a global scale (NVFP4)."""

    AMAX = "amax"
    SWEEP = "sweep"
    FOUR_OVER_SIX = "four_over_six"


_BLOCK_SCALE = {ScaleMethod.SWEEP: best_block_scale, ScaleMethod.FOUR_OVER_SIX: four_or_six_block_scale}
MIN_SCALE = 2.0**-126  # fp32's smallest normal number: the reciprocal of one below is infinite
HEADROOM = 1.75  # how far a searched scale may lie above the amax scale: 448 / 256


@dataclass(frozen=True)
class WeightError:
    """Sums over a tensor: of squared error and of squares."""

    squared_error: float
    squares: float

    @property
    def sqnr_db(self) -> float:
        if self.squared_error == 0:
            return math.inf
        return 10 * math.log10(self.squares / self.squared_error) if self.squares else -math.inf


def global_scale_from_amax(amax: Tensor, method: ScaleMethod, fmt: Format = NVFP4) -> Tensor:
    """fp32 0-d global scale for the largest magnitude of a tensor, or of all the tensors that share it."""
    assert fmt.unscaled_max is not None
    headroom = 1.0 if method is ScaleMethod.AMAX else HEADROOM
    return nvfp4.global_scale_from_amax(amax, fmt.unscaled_max / headroom)


def stored_global_scale(amax: Tensor, method: ScaleMethod, fmt: Format = NVFP4) -> Tensor:
    """The same, as checkpoints hold it: dialects store it or its reciprocal, and neither may be 0 or infinite."""
    return global_scale_from_amax(amax, method, fmt).clamp(min=MIN_SCALE)


def quantize_weight(
    x: Tensor, fmt: Format, method: ScaleMethod, global_scale: Tensor | None, name: str
) -> tuple[QuantizedTensor, WeightError]:
    """Quantizes x [..., K]. `global_scale` as agreed for the group (None: from this tensor alone)."""
    check_quantizable(x, fmt, name)
    x = x.detach()  # a Parameter's scales would drag its autograd graph along
    if method is not ScaleMethod.AMAX and not fmt.has_global_scale:
        raise FormatError(f"{name}: scale '{method.value}' needs an NVFP4 format, got {fmt.name}", hint="use 'amax'")
    amax = x.abs().amax()
    check_finite(x, amax, name)
    if fmt.has_global_scale:
        global_scale = global_scale_from_amax(amax, method, fmt) if global_scale is None else global_scale.to(x.device)
    fixed = fp8.scale_from_amax(amax, fmt) if fmt.granularity is Granularity.TENSOR else None

    rows = x.reshape(-1, x.shape[-1])
    step = max(1, (_SLICE_ELEMENTS_CPU if x.device.type == "cpu" else _SLICE_ELEMENTS_GPU) // x.shape[-1])
    if fmt.granularity is Granularity.TILE:
        step = -(-step // fmt.block_size) * fmt.block_size
    packed, scales, squared_errors, squares = [], [], [], []
    unit = _unit(amax.item())
    for part in rows.split(step):
        choose = _BLOCK_SCALE.get(method)
        block_scale = choose(part, global_scale, fmt.block_size) if choose and global_scale is not None else fixed
        q = encode(part, fmt, block_scale=block_scale, global_scale=global_scale, name=name)
        packed.append(q.packed)
        scales.append(q.block_scale)
        source = part.float() if unit == 1.0 else part.float() * unit
        values = decode(q) if unit == 1.0 else decode(q).mul_(unit)
        squared_errors.append(values.sub_(source).square_().sum())
        squares.append((source.square_() if source is not part else source.square()).sum())
    lead = tuple(x.shape[:-1])
    block_scale = scales[0] if fixed is not None else _join(scales, x, fmt)
    q = QuantizedTensor(fmt, torch.cat(packed).view(*lead, -1), block_scale, global_scale, tuple(x.shape), x.dtype)
    squared_error, power = (torch.stack(sums).double().sum().item() for sums in (squared_errors, squares))
    return q, WeightError(squared_error / unit**2, power / unit**2)


def _unit(amax: float) -> float:
    """A power of two that brings values near 1 if their squares would leave fp32; else 1."""
    exponent = math.frexp(amax)[1]
    return 1.0 if abs(exponent) < 40 else 2.0 ** -max(-120, min(120, exponent))


def _join(scales: list[Tensor], x: Tensor, fmt: Format) -> Tensor:
    joined = torch.cat(scales)
    return joined if fmt.granularity is Granularity.TILE else joined.view(*x.shape[:-1], -1)


def quantize_tensor(
    weight: Tensor,
    format: str | Format = "nvfp4",
    scale: str | ScaleMethod = "amax",
    global_scale: Tensor | None = None,
    name: str = "tensor",
) -> QuantizedTensor:
    """Quantizes a tensor [..., K] of bf16, fp16 or fp32, on its device.

    format        a name of `blockscale.formats.spec.FORMATS`
    scale         "amax" (round to nearest), "sweep" (least squared error of 11 codes), "four_over_six"; NVFP4 only
    global_scale  fp32 0-d multiplier to use instead of the tensor's own, for weights that share one

    FormatError for a shape or dtype that the format cannot hold; NonFiniteError for NaN or Inf.
    """
    try:
        method = ScaleMethod(scale)
    except ValueError as e:
        names = ", ".join(m.value for m in ScaleMethod)
        raise FormatError(f"unknown scale '{scale}'", hint=f"scales: {names}") from e
    if global_scale is not None and not (torch.isfinite(global_scale) and global_scale > 0):
        raise FormatError(f"{name}: a global scale of {global_scale.item()}", hint="give a positive finite number")
    return quantize_weight(weight, get_format(format), method, global_scale, name)[0]
