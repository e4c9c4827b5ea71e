"""Linears over NVFP4 and MXFP4 weights in plain torch, a few rows of the weight at a time.

Codes times block scales are exact in fp32, so the fp32 sums are the only rounding before the global scale.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.formats import mx, nvfp4
from blockscale.formats.packing import unpack_nibbles
from blockscale.formats.spec import E2M1, E4M3, NVFP4
from blockscale.kernels.checks import ACTIVATION_DTYPES, check_activation, check_bias, check_same_device, rows
from blockscale.kernels.layouts import from_fragments
from blockscale.kernels.prepare import Layout, PreparedWeight
from blockscale.kernels.reference.quantize import quantize_nvfp4

_CHUNK_WEIGHTS = 1 << 24  # 64 MB in fp32
DTYPES = (*ACTIVATION_DTYPES, torch.float32)


def linear_w4a16(x: Tensor, weight: PreparedWeight, bias: Tensor | None = None) -> Tensor:
    """x [..., K] (bf16, fp16 or fp32) times the weight [N, K], in the dtype of x: [..., N]; fp32 sums."""
    _check("linear_w4a16", x, weight, bias)
    y = product(rows(x).float(), weight) * weight.global_scale
    return finish(y, x, bias)


def linear_w4a8(x: Tensor, weight: PreparedWeight, bias: Tensor | None = None) -> Tensor:
    """As `linear_w4a16` with E4M3 operands: a scale per token and per row of the weight, each amax / 448 in fp32.

    Activations and weights are rounded to E4M3 once more, which FP8 tensor cores demand; sums in fp32.
    """
    _check("linear_w4a8", x, weight, bias)
    flat = rows(x)
    scale = token_scale(flat)
    codes = (flat.float() / scale).clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn).float()
    y = torch.empty(flat.shape[0], weight.n, device=x.device)
    for first, values in decoded_rows(weight):
        row_scale = token_scale(values)
        rounded = (values / row_scale).clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn).float()
        y[:, first : first + len(values)] = (codes @ rounded.T) * row_scale.T
    return finish(y * scale * weight.global_scale, x, bias)


def linear_w4a4(
    x: Tensor, weight: PreparedWeight, bias: Tensor | None = None, input_global_scale: Tensor | None = None
) -> Tensor:
    """As Blackwell's tensor cores would: x becomes NVFP4, then codes are multiplied and summed in fp32.

    input_global_scale  fp32 0-d of a static activation scale; None takes it from the amax of x
    """
    _check("linear_w4a4", x, weight, bias)
    if weight.format != NVFP4:
        raise FormatError(f"linear_w4a4: the weight is {weight.format.name}", hint="activations in NVFP4 go with NVFP4")
    if x.numel() == 0:
        return x.new_empty(*x.shape[:-1], weight.n)
    packed, block_scale, global_scale = quantize_nvfp4(rows(x), input_global_scale)
    values = nvfp4.decode_unscaled(packed, block_scale).view(-1, weight.k)
    y = product(values, weight) * (global_scale * weight.global_scale)
    return finish(y, x, bias)


def token_scale(x: Tensor) -> Tensor:
    """fp32 [M, 1]: the E4M3 scale of each row, 1 for a row of zeros."""
    amax = x.abs().amax(-1, keepdim=True).float()
    return torch.where(amax == 0, 1.0, amax / torch.full_like(amax, E4M3.max))


def product(x: Tensor, weight: PreparedWeight) -> Tensor:
    """fp32 or fp64 x [M, K] times the weight without its global scale: [M, N] of that dtype."""
    y = torch.empty(x.shape[0], weight.n, dtype=x.dtype, device=x.device)
    for first, values in decoded_rows(weight):
        torch.matmul(x, values.to(x.dtype).T, out=y[:, first : first + len(values)])
    return y


def decoded_rows(weight: PreparedWeight) -> Iterator[tuple[int, Tensor]]:
    """(first row, fp32 values [rows, K] without the global scale), a piece of the weight at a time."""
    weight = row_major_of(weight)
    step = max(1, _CHUNK_WEIGHTS // weight.k)
    for first in range(0, weight.n, step):
        codes, scales = weight.packed[first : first + step], weight.block_scale[first : first + step]
        if weight.format == NVFP4:
            yield first, nvfp4.decode_unscaled(codes, scales.view(torch.float8_e4m3fn))
        else:
            yield first, mx.decode_codes(unpack_nibbles(codes), scales, E2M1)


def row_major_of(weight: PreparedWeight) -> PreparedWeight:
    """The weight in the checkpoint's order; FormatError for a layout that cannot be undone."""
    if weight.layout is Layout.ROW_MAJOR:
        return weight
    if weight.layout is Layout.FRAGMENTS:
        return from_fragments(weight)
    raise FormatError(
        f"a weight in the layout {weight.layout.value} has left its own order", hint="prepare it again as row_major"
    )


def finish(y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """[M, N] fp32 plus the bias, rounded once to the dtype of x [..., K]: [..., N]."""
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])


def _check(op: str, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> None:
    check_activation(op, x, weight.k, DTYPES)
    check_bias(op, bias, weight.n, x)
    check_same_device(op, x=x, weight=weight.packed, bias=bias)
