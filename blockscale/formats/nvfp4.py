"""NVFP4: E2M1 values, an E4M3 scale per block, one FP32 scale per tensor.

    x ~= e2m1(code) * block_scale * global_scale

The order of the float operations is fixed here and nowhere else (it is Model Optimizer's, whose bytes these are):

    global_scale = fp32(amax) / 2688                            2688 = 6 * 448
    block_scale  = e4m3(clamp(fp32(block amax) / (6 * global_scale), 2^-9, 448)), and 1 for a zero block
    code         = e2m1(fp32(x) / (fp32(block_scale) * global_scale))

Source: NVIDIA, "Introducing NVFP4 for efficient and accurate low-precision inference" (2025); cuBLAS documentation.
"""

import torch
from torch import Tensor

from blockscale.formats.division import divide
from blockscale.formats.minifloat import decode_table, encode
from blockscale.formats.packing import pack_nibbles
from blockscale.formats.spec import E2M1, E4M3

_BITS = {
    torch.bfloat16: (torch.int16, 0x7FFF),
    torch.float16: (torch.int16, 0x7FFF),
    torch.float32: (torch.int32, 0x7FFFFFFF),
}
MIN_BLOCK_SCALE = 2.0**-9  # the smallest E4M3 subnormal: a scale of zero would lose the block


def block_amax(x: Tensor, block_size: int = 16) -> Tensor:
    """[..., K] -> [..., K/block_size], the dtype of x; NaN propagates.

    Magnitudes of floats order as their bits do, NaN last, and integers are compared three times as fast.
    """
    integer, magnitude_bits = _BITS[x.dtype]
    bits = x.view(integer) & magnitude_bits
    return bits.unflatten(-1, (-1, block_size)).amax(-1).view(x.dtype)


def global_scale_from_amax(amax: Tensor, unscaled_max: float = E2M1.max * E4M3.max) -> Tensor:
    """fp32 0-d, from the largest magnitude of the tensor (or of its group). An all-zero tensor gets 1."""
    scale = divide(amax, unscaled_max)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def block_scale_from_amax(amax: Tensor, global_scale: Tensor) -> Tensor:
    """float8_e4m3fn, the shape of `amax` (block amaxes of any float dtype)."""
    scale = amax.float() / (E2M1.max * global_scale)
    # amax 0 covers 0 / 0 as well, where the global scale itself underflowed
    scale = torch.where((scale == 0) | (amax == 0), torch.ones_like(scale), scale)
    return scale.clamp_(MIN_BLOCK_SCALE, E4M3.max).to(torch.float8_e4m3fn)


def encode_packed(x: Tensor, block_scale: Tensor, global_scale: Tensor) -> Tensor:
    """[..., K] floats -> uint8 [..., K/2], rounding with the scales given (block_scale [..., K/block])."""
    step = (block_scale.float() * global_scale).unsqueeze(-1)  # [..., K/block, 1]
    blocks = x.float().unflatten(-1, (block_scale.shape[-1], -1))
    return pack_nibbles(encode(blocks / step, E2M1).flatten(-2))


def decode_packed(packed: Tensor, block_scale: Tensor, global_scale: Tensor) -> Tensor:
    """uint8 [..., K/2] -> fp32 [..., K]. The element times its block scale is exact; one rounding follows."""
    return decode_unscaled(packed, block_scale).mul_(global_scale)


def decode_unscaled(packed: Tensor, block_scale: Tensor) -> Tensor:
    """fp32 [..., K]: e2m1 * e4m3 without the global scale, exact (and exact in bf16 and fp32)."""
    # One gather fetches the two values of a byte: half as many indices as one lookup per element.
    table = decode_table(E2M1, packed.device)
    pairs = torch.stack((table.repeat(16), table.repeat_interleave(16)), dim=-1)  # [256, 2]
    values = pairs.view(torch.int64).view(-1).index_select(0, packed.reshape(-1).int()).view(torch.float32)
    values = values.view(*block_scale.shape, -1)
    return values.mul_(block_scale.float().unsqueeze(-1)).flatten(-2)
