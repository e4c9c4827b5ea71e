"""QuantizedTensor, and the way from a float tensor to one and back, for every format."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockscale.errors import FormatError, NonFiniteError
from blockscale.formats import fp8, int4, mx, nvfp4
from blockscale.formats.packing import pack_nibbles, pack_sixes, unpack_nibbles, unpack_sixes
from blockscale.formats.spec import E2M1, INT4, Format, Granularity, Minifloat, ScaleType

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor in a low-precision format: x ~= element(packed) * block_scale [* global_scale].

    packed        uint8 [..., K*bits/8] (4- and 6-bit codes) or float8 [..., K]
    block_scale   one entry per scale of the format: [..., K/block], [..., 1], tiles, or 0-d
    global_scale  fp32 0-d multiplier, or None where the format has none
    shape, dtype  of the tensor it stands for
    """

    format: Format
    packed: Tensor
    block_scale: Tensor
    global_scale: Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        parts = [self.packed, self.block_scale] + ([] if self.global_scale is None else [self.global_scale])
        return sum(t.numel() * t.element_size() for t in parts)

    def to(self, device: torch.device | str) -> "QuantizedTensor":
        """The same tensor on another device."""
        return replace(
            self,
            packed=self.packed.to(device),
            block_scale=self.block_scale.to(device),
            global_scale=None if self.global_scale is None else self.global_scale.to(device),
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """[...] of `shape`, computed in fp32 and rounded once to `dtype` (default: the source's)."""
        return decode(self).to(dtype or self.dtype)


_SCALE_DTYPES = {
    ScaleType.E4M3: torch.float8_e4m3fn,
    ScaleType.E8M0: torch.uint8,
    ScaleType.FP32: torch.float32,
    ScaleType.BF16: torch.bfloat16,
}


def empty_like_quantized(
    shape: tuple[int, ...], fmt: Format, dtype: torch.dtype, device: str = "meta"
) -> QuantizedTensor:
    """A QuantizedTensor with the dtypes and shapes that `encode` would give, and no values."""
    *lead, k = shape
    if fmt.element.bits < 8:
        packed = torch.empty(*lead, k * fmt.element.bits // 8, dtype=torch.uint8, device=device)
    else:
        assert isinstance(fmt.element, Minifloat)
        packed = torch.empty(*shape, dtype=fp8.DTYPES[fmt.element], device=device)
    scale_shape = {
        Granularity.BLOCK: lambda: (*lead, k // fmt.block_size),
        Granularity.TENSOR: lambda: (),
        Granularity.CHANNEL: lambda: (*lead, 1),
        Granularity.TOKEN: lambda: (*lead, 1),
        Granularity.TILE: lambda: tuple(-(-n // fmt.block_size) for n in shape),
    }[fmt.granularity]()
    block_scale = torch.empty(scale_shape, dtype=_SCALE_DTYPES[fmt.scale], device=device)
    global_scale = torch.empty((), dtype=torch.float32, device=device) if fmt.has_global_scale else None
    return QuantizedTensor(fmt, packed, block_scale, global_scale, tuple(shape), dtype)


def check_quantizable(x: Tensor, fmt: Format, name: str = "tensor") -> None:
    """FormatError if `x` cannot be stored in `fmt` because of its dtype or shape."""
    if x.dtype not in FLOAT_DTYPES:
        raise FormatError(f"{name}: cannot quantize {x.dtype}", hint="give bfloat16, float16 or float32")
    if x.dim() == 0 or x.numel() == 0:
        raise FormatError(f"{name}: cannot quantize an empty or 0-d tensor, shape {list(x.shape)}")
    if fmt.granularity is Granularity.TILE and x.dim() != 2:
        tile = f"{fmt.block_size}x{fmt.block_size}"
        raise FormatError(f"{name}: a format of {tile} tiles takes a 2-D weight, got {list(x.shape)}")
    if fmt.granularity is Granularity.BLOCK and x.shape[-1] % fmt.block_size:
        raise FormatError(
            f"{name}: last dimension {x.shape[-1]} is not a multiple of {fmt.name}'s block of {fmt.block_size}",
            hint="keep this tensor in 16 bits, or pad it",
        )


def check_finite(x: Tensor, amax: Tensor, name: str = "tensor") -> None:
    """NonFiniteError that names the tensor and its first bad position, if `amax` (any maxima of |x|) is not finite."""
    if torch.isfinite(amax).all():
        return
    raise non_finite_error(x.reshape(-1), x.shape, name)


def non_finite_error(values: Tensor, shape: tuple[int, ...], name: str, start: int = 0) -> NonFiniteError:
    """Names the first bad one of `values`, a flat piece of a tensor of `shape` that begins at element `start`."""
    first = int((~torch.isfinite(values)).int().argmax())
    position = [int(i) for i in torch.unravel_index(torch.tensor(start + first), shape)]
    return NonFiniteError(
        f"{name}: {values[first].item()} at {position}",
        hint="the source checkpoint is damaged or overflowed when it was cast; download or export it again",
    )


def encode(
    x: Tensor,
    fmt: Format,
    *,
    block_scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    scale_rule: mx.ScaleRule = mx.ScaleRule.EVEN,
    name: str = "tensor",
) -> QuantizedTensor:
    """Round-to-nearest quantization of `x` [..., K] (bf16, fp16 or fp32).

    Scales not given follow from amax. Raises FormatError for a shape or dtype the format cannot hold and
    NonFiniteError for NaN or Inf, naming `name`.
    """
    check_quantizable(x, fmt, name)
    x = x.detach()  # a Parameter's scales would drag its autograd graph along
    if fmt.granularity is not Granularity.BLOCK:
        amax = fp8.amax(x, fmt)
        check_finite(x, amax, name)
        scale = fp8.scale_from_amax(amax, fmt) if block_scale is None else block_scale
        return QuantizedTensor(fmt, fp8.encode_values(x, scale, fmt), scale, None, tuple(x.shape), x.dtype)

    amax = nvfp4.block_amax(x, fmt.block_size)
    check_finite(x, amax, name)
    if fmt.unscaled_max is not None:
        if global_scale is None:
            global_scale = nvfp4.global_scale_from_amax(amax.amax(), fmt.unscaled_max)
        global_scale = global_scale.to(x.device)  # a divisor on the CPU is not divided by: see `division`
        scale = nvfp4.block_scale_from_amax(amax, global_scale) if block_scale is None else block_scale
        packed = nvfp4.encode_packed(x, scale, global_scale)
        return QuantizedTensor(fmt, packed, scale, global_scale, tuple(x.shape), x.dtype)
    if fmt.element == INT4:
        scale = int4.scale_from_amax(amax) if block_scale is None else block_scale
        packed = pack_nibbles(int4.encode_codes(x, scale))
    else:
        assert isinstance(fmt.element, Minifloat)
        scale = mx.scale_from_amax(amax, fmt.element, scale_rule) if block_scale is None else block_scale
        packed = _pack_minifloat(mx.encode_codes(x, scale, fmt.element), fmt.element)
    return QuantizedTensor(fmt, packed, scale, None, tuple(x.shape), x.dtype)


def decode(q: QuantizedTensor) -> Tensor:
    """fp32 tensor of q.shape."""
    fmt = q.format
    if fmt.granularity is not Granularity.BLOCK:
        return fp8.decode_values(q.packed, q.block_scale, fmt)
    if fmt.has_global_scale:
        assert q.global_scale is not None
        return nvfp4.decode_packed(q.packed, q.block_scale, q.global_scale)
    if fmt.element == INT4:
        return int4.decode_codes(unpack_nibbles(q.packed), q.block_scale)
    assert isinstance(fmt.element, Minifloat)
    assert fmt.scale is ScaleType.E8M0
    return mx.decode_codes(_unpack_minifloat(q.packed, fmt.element), q.block_scale, fmt.element)


def _pack_minifloat(codes: Tensor, element: Minifloat) -> Tensor:
    if element == E2M1:
        return pack_nibbles(codes)
    return pack_sixes(codes) if element.bits == 6 else codes.view(fp8.DTYPES[element])


def _unpack_minifloat(packed: Tensor, element: Minifloat) -> Tensor:
    if element == E2M1:
        return unpack_nibbles(packed)
    return unpack_sixes(packed) if element.bits == 6 else packed.view(torch.uint8)
