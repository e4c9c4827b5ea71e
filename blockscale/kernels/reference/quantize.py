"""Quantizers of activations and weights in plain torch: the bytes of `formats` for every finite input.

Unlike `formats.encode` nothing here looks at values and raises. A block that holds NaN or Inf gets the block scale NaN
(byte 0x7F) and codes of 7, so that it decodes to NaN: the format has no infinity, and saturating would hide what a
16-bit product would show. A dynamic global scale is that of the finite values.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from blockscale.errors import FormatError, UsageError
from blockscale.formats import nvfp4
from blockscale.formats.error import block_squared_error
from blockscale.formats.layout import swizzle
from blockscale.formats.spec import E2M1, E4M3
from blockscale.formats.tensor import FLOAT_DTYPES
from blockscale.kernels.checks import check_dtype, check_multiple, check_same_device, check_shape

BLOCK = 16
NAN_BYTE, NAN_CODES = 0x7F, 0x77
HADAMARD_SIZES = (16, 32, 64, 128)
_HEADROOM = E2M1.max * 256.0  # the amax maps here where a block may take a scale above its amax scale


def quantize_nvfp4(
    x: Tensor, global_scale: Tensor | None = None, *, four_over_six: bool = False, swizzled: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., K] (bf16, fp16, fp32) -> packed uint8 [..., K/2], block_scale float8_e4m3fn [..., K/16], global_scale.

    global_scale   fp32 0-d, static; None takes amax / 2688 of x (four-over-six: amax / 1536)
    four_over_six  each block's amax becomes 6 or, where that errs less, 4
    swizzled       block_scale is 1-D in the 128x4 layout
    """
    check_blocks("quantize_nvfp4", x)
    if global_scale is None:
        largest = torch.where(x.isfinite(), x, 0).abs().amax() if x.numel() else x.new_zeros(())
        global_scale = nvfp4.global_scale_from_amax(largest, _HEADROOM if four_over_six else E2M1.max * E4M3.max)
    check_global_scale("quantize_nvfp4", global_scale, x)
    rule = four_or_six if four_over_six else amax_scale
    packed, block_scale = _encode(x, rule(x, global_scale), global_scale)
    if swizzled:
        block_scale = swizzle(block_scale.view(-1, block_scale.shape[-1]))
    return packed, block_scale, global_scale


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    global_scale: Tensor,
    *,
    epsilon: float = 1e-6,
    residual: Tensor | None = None,
    unit_offset: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """NVFP4 of RMSNorm(x [+ residual]) * weight, and the new residual x + residual (None without one).

    x, residual  [..., K] of one dtype; weight [K]
    unit_offset  the factor is 1 + weight, rounded once, as in Gemma; otherwise the norm is rounded to x's dtype before
                 it meets the weight, as in Llama
    """
    check_blocks("rms_norm_quantize", x)
    check_shape("rms_norm_quantize", "weight", weight, (x.shape[-1],))
    check_same_device("rms_norm_quantize", x=x, weight=weight, residual=residual)
    total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    h = total.float()
    normed = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + epsilon)
    y = normed * (1 + weight.float()) if unit_offset else normed.to(x.dtype).float() * weight.float()
    packed, block_scale, _ = quantize_nvfp4(y.to(x.dtype), global_scale)
    return packed, block_scale, None if residual is None else total


def silu_mul_quantize(
    gate: Tensor,
    up: Tensor,
    global_scale: Tensor,
    *,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> tuple[Tensor, Tensor]:
    """NVFP4 of activation(gate) * up, [..., K] each: silu, gelu_tanh, or clamped (gpt-oss, with alpha and limit)."""
    check_blocks("silu_mul_quantize", gate, "gate")
    check_shape("silu_mul_quantize", "up", up, tuple(gate.shape))
    check_dtype("silu_mul_quantize", "up", up, (gate.dtype,))
    g, u = gate.float(), up.float()
    if activation == "silu":
        y = torch.nn.functional.silu(g).to(gate.dtype).float() * u
    elif activation == "gelu_tanh":
        y = torch.nn.functional.gelu(g, approximate="tanh").to(gate.dtype).float() * u
    elif activation == "clamped":
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        y = (u + 1) * g * torch.sigmoid(alpha * g)
    else:
        raise UsageError(f"no activation '{activation}'", hint="silu, gelu_tanh or clamped")
    packed, block_scale, _ = quantize_nvfp4(y.to(gate.dtype), global_scale)
    return packed, block_scale


def hadamard_quantize(x: Tensor, global_scale: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """NVFP4 of x R, R = blockdiag(H / sqrt(size)), H[i, j] = (-1)^popcount(i & j); fp32, never rounded in between."""
    check_blocks("hadamard_quantize", x)
    if size not in HADAMARD_SIZES or x.shape[-1] % size:
        raise FormatError(
            f"hadamard_quantize: a rotation of size {size} over {x.shape[-1]} channels",
            hint="sizes: " + ", ".join(map(str, HADAMARD_SIZES)) + "; K must be a multiple of the size",
        )
    y, half = x.float(), 1
    while half < size:
        first, second = y.unflatten(-1, (-1, 2, half)).unbind(-2)
        y = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    packed, block_scale, _ = quantize_nvfp4(y * size**-0.5, global_scale)
    return packed, block_scale


def quantize_weight_sweep(weight: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """NVFP4 of weight [..., N, K] with the block scale of least squared error among 11 codes (15 for tiny scales).

    global_scale  fp32 0-d with headroom: amax / (6 * 256)
    """
    check_blocks("quantize_weight_sweep", weight, "weight")
    check_global_scale("quantize_weight_sweep", global_scale, weight)
    start = amax_scale(weight, global_scale).view(torch.uint8).int()
    magnitude = (weight.float().abs() / global_scale).unflatten(-1, (-1, BLOCK))
    near = _least_error(magnitude, start, lambda s: ((s + o).clamp(1, 126) for o in range(-3, 8)))
    low = _least_error(magnitude, start, lambda s: (torch.full_like(s, c) for c in range(1, 16)))
    code = torch.where(start < 8, low, near)
    code = torch.where((magnitude.amax(-1) == 0) | (start == NAN_BYTE), start, code)
    return _encode(weight, code.to(torch.uint8).view(torch.float8_e4m3fn), global_scale)


def amax_scale(x: Tensor, global_scale: Tensor) -> Tensor:
    """float8_e4m3fn [..., K/16]: what maps each block's amax to 6."""
    return nvfp4.block_scale_from_amax(nvfp4.block_amax(x), global_scale)


def four_or_six(x: Tensor, global_scale: Tensor) -> Tensor:
    """float8_e4m3fn [..., K/16]: what maps each block's amax to 6 or 4; 6 where they err alike."""
    amax = nvfp4.block_amax(x)
    magnitude = (x.float().abs() / global_scale).unflatten(-1, (-1, BLOCK))
    six = nvfp4.block_scale_from_amax(amax, global_scale).float()
    four = nvfp4.block_scale_from_amax(amax.float() * 1.5, global_scale).float()
    is_four = block_squared_error(magnitude, four) < block_squared_error(magnitude, six)
    return torch.where(is_four & (amax != 0), four, six).to(torch.float8_e4m3fn)


def _least_error(magnitude: Tensor, start: Tensor, codes: Callable[[Tensor], Iterable[Tensor]]) -> Tensor:
    """int32, the shape of `start`: the first code of the least error of each block."""
    best, best_error = start, torch.full(start.shape, torch.inf, device=start.device)
    for code in codes(start):
        error = block_squared_error(magnitude, code.to(torch.uint8).view(torch.float8_e4m3fn).float())
        best, best_error = torch.where(error < best_error, code, best), torch.minimum(error, best_error)
    return best


def _encode(x: Tensor, block_scale: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """packed and block_scale, with NaN for blocks that hold what is not finite."""
    if x.numel() == 0:
        return x.new_empty(*x.shape[:-1], x.shape[-1] // 2, dtype=torch.uint8), block_scale
    packed = nvfp4.encode_packed(x, block_scale, global_scale)
    is_broken = ~nvfp4.block_amax(x).isfinite()  # [..., K/16]
    scale = torch.where(is_broken, NAN_BYTE, block_scale.view(torch.uint8)).to(torch.uint8)
    codes = torch.where(is_broken.unsqueeze(-1), NAN_CODES, packed.unflatten(-1, (-1, BLOCK // 2)))
    return codes.to(torch.uint8).flatten(-2), scale.view(torch.float8_e4m3fn)


def check_blocks(op: str, x: Tensor, name: str = "x") -> None:
    """`x` is [..., K] of bf16, fp16 or fp32, K a multiple of 16."""
    check_dtype(op, name, x, FLOAT_DTYPES)
    check_multiple(op, f"the last dimension of {name}", x.shape[-1] if x.dim() else 0, BLOCK)


def check_global_scale(op: str, global_scale: Tensor, x: Tensor) -> None:
    """One fp32 number on the device of `x`."""
    check_dtype(op, "global_scale", global_scale, (torch.float32,))
    check_same_device(op, x=x, global_scale=global_scale)
    if global_scale.numel() != 1:
        raise FormatError(f"{op}: global_scale has shape {list(global_scale.shape)}", hint="give one number, 0-d")
