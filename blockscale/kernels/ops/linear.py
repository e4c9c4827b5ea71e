"""Linears over weights in 4 bits: W4A16, W4A8 and W4A4.

    y = x W^T + bias,  x [..., K] in bf16 or fp16, W [N, K] prepared by `linears.prepare`, y [..., N] in the dtype of x

W4A16 rounds nothing but its sums and its result. W4A8 rounds activations and weights to E4M3 as well, and W4A4
activations to NVFP4: both are other models than W4A16, so a caller asks for them by name.
"""

from functools import partial

import torch
from torch import Tensor

from blockscale.formats.spec import get_format
from blockscale.kernels import linears
from blockscale.kernels.ops.library import define
from blockscale.kernels.prepare import Layout, PreparedWeight
from blockscale.kernels.select import Op


def linear_w4a16(x: Tensor, weight: PreparedWeight, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times `weight` [N, K]: [..., N]. FormatError for operands that do not fit."""
    return _W4A16(x, *_parts(weight), bias)


def linear_w4a8(x: Tensor, weight: PreparedWeight, bias: Tensor | None = None) -> Tensor:
    """As `linear_w4a16` on FP8 tensor cores: activations in E4M3 with a scale per token, weights rounded to E4M3."""
    return _W4A8(x, *_parts(weight), bias)


def linear_w4a4(
    x: Tensor, weight: PreparedWeight, bias: Tensor | None = None, input_global_scale: Tensor | None = None
) -> Tensor:
    """As `linear_w4a16` with activations in NVFP4, by the amax of x or by a static `input_global_scale` (fp32 0-d)."""
    return _W4A4(x, *_parts(weight), bias, input_global_scale)


def _parts(weight: PreparedWeight) -> tuple[Tensor, Tensor, Tensor, list[int], str, str, torch.dtype]:
    return (
        weight.packed,
        weight.block_scale,
        weight.global_scale,
        list(weight.shape),
        weight.layout.value,
        weight.format.name,
        weight.dtype,
    )


def _run(
    op: Op,
    x: Tensor,
    packed: Tensor,
    block_scale: Tensor,
    global_scale: Tensor,
    shape: list[int],
    layout: str,
    fmt: str,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    input_global_scale: Tensor | None = None,
) -> Tensor:
    weight = PreparedWeight(Layout(layout), packed, block_scale, global_scale, tuple(shape), get_format(fmt), dtype)
    options = {"input_global_scale": input_global_scale} if op is Op.LINEAR_W4A4 else {}
    return linears.run(op, x, weight, bias, **options)


def _fake(
    x: Tensor, packed: Tensor, block_scale: Tensor, global_scale: Tensor, shape: list[int], *others: object
) -> Tensor:
    return x.new_empty(*x.shape[:-1], shape[-2])


_WEIGHT = (
    "Tensor packed, Tensor block_scale, Tensor global_scale, int[] shape, str layout, str format, ScalarType dtype"
)
_SCHEMA = f"(Tensor x, {_WEIGHT}, Tensor? bias=None) -> Tensor"
_W4A4_SCHEMA = f"(Tensor x, {_WEIGHT}, Tensor? bias=None, Tensor? input_global_scale=None) -> Tensor"
_W4A16 = define(Op.LINEAR_W4A16.value, _SCHEMA, partial(_run, Op.LINEAR_W4A16), _fake)
_W4A8 = define(Op.LINEAR_W4A8.value, _SCHEMA, partial(_run, Op.LINEAR_W4A8), _fake)
_W4A4 = define(Op.LINEAR_W4A4.value, _W4A4_SCHEMA, partial(_run, Op.LINEAR_W4A4), _fake)
