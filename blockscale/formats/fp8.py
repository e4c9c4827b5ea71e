"""FP8 with fp32 scales: one per tensor, per row (channel or token), or per 128x128 tile.

    x ~= fp8(code) * scale,   scale = amax / max

The quotient x / scale is taken in fp32, then saturated and rounded half to even (torch's own cast).
Source: "FP8 Formats for Deep Learning" (Micikevicius et al., 2022), OCP OFP8 specification v1.0.
"""

import torch
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.formats.division import divide
from blockscale.formats.spec import E4M3, E5M2, Format, Granularity, Integer, Minifloat

DTYPES: dict[Minifloat | Integer, torch.dtype] = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}


def tile_amax(x: Tensor, size: int) -> Tensor:
    """[N, K] -> [ceil(N/size), ceil(K/size)]; tiles at the edges are smaller."""
    if x.dim() != 2:
        raise FormatError(f"a format of {size}x{size} tiles takes a 2-D weight, got {list(x.shape)}")
    rows, cols = x.shape
    padded = torch.nn.functional.pad(x.abs(), (0, -cols % size, 0, -rows % size))
    return padded.view(-(-rows // size), size, -(-cols // size), size).amax((1, 3))


def amax(x: Tensor, fmt: Format) -> Tensor:
    """Largest magnitude per scale: 0-d, [..., 1], or tiles."""
    if fmt.granularity is Granularity.TENSOR:
        return x.abs().amax()
    if fmt.granularity is Granularity.TILE:
        return tile_amax(x, fmt.block_size)
    return x.abs().amax(-1, keepdim=True)


def scale_from_amax(amax: Tensor, fmt: Format) -> Tensor:
    """fp32; 1 where amax is 0. Never below fp32's smallest normal, so that 1 / scale stays finite."""
    scale = divide(amax, fmt.element.max).clamp_(min=torch.finfo(torch.float32).tiny)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def expand_scale(scale: Tensor, shape: torch.Size | tuple[int, ...], fmt: Format) -> Tensor:
    """The scale as something that broadcasts against [N, K] (tiles are repeated and cropped)."""
    if fmt.granularity is not Granularity.TILE:
        return scale
    size = fmt.block_size
    return scale.repeat_interleave(size, 0)[: shape[0]].repeat_interleave(size, 1)[:, : shape[1]]


def encode_values(x: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """float8 tensor of x's shape."""
    assert isinstance(fmt.element, Minifloat)
    limit = fmt.element.max
    quotient = x.float() / expand_scale(scale, x.shape, fmt)
    return quotient.clamp_(-limit, limit).to(DTYPES[fmt.element])


def decode_values(values: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """fp32 of the same shape."""
    return values.float().mul_(expand_scale(scale.float(), values.shape, fmt))
