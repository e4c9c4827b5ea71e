"""Hosted linear layers against float64 products of the exactly decoded operands."""

import pytest
import torch
from torch import Tensor, nn

from blockscale.checkpoint.linear import (
    MXFP4_W4A4,
    MXFP4_W4A16,
    W4A4,
    W4A8,
    W4A16,
    W8A8,
    W8A8_DYNAMIC,
    QuantizedLinear,
    Scheme,
)
from blockscale.formats.spec import FP8, FP8_TOKEN, MXFP4, NVFP4
from blockscale.formats.tensor import decode, encode
from blockscale.host.linear import KeptLinear, PackedLinear

SCHEMES = (W4A4, W4A16, W4A8, W8A8, W8A8_DYNAMIC, MXFP4_W4A4, MXFP4_W4A16)
FP32_ULP = 2.0**-24  # rounding error of one operation, relative


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantized(weight: Tensor, scheme: Scheme, input_amax: float | None = None) -> QuantizedLinear:
    scale = None
    if scheme.needs_input_scale:
        bound = 2688.0 if scheme.activation is NVFP4 else 448.0
        scale = torch.tensor((input_amax or 4.0) / bound)
    return QuantizedLinear(scheme, encode(weight, scheme.weight), scale)


def rounded_input(x: Tensor, linear: QuantizedLinear) -> Tensor:
    """float64 values of x as the scheme stores it, without a rounding after the formats' own."""
    fmt = linear.scheme.activation
    if fmt is None:
        return x.double()
    if fmt is FP8_TOKEN:
        scale = x.abs().amax(-1, keepdim=True) / 448
        return (x / scale).to(torch.float8_e4m3fn).double() * scale.double()
    if fmt is FP8:
        scale = linear.input_global_scale
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale.double()
    if fmt is MXFP4:
        return decode(encode(x, MXFP4)).double()
    q = encode(x, NVFP4, global_scale=linear.input_global_scale)
    return decode_exactly(q)


def decode_exactly(q) -> Tensor:
    """float64: the product of element and scales without fp32's rounding."""
    if q.global_scale is None:
        return decode(q).double()
    one = type(q)(q.format, q.packed, q.block_scale, torch.tensor(1.0), q.shape, q.dtype)
    return decode(one).double() * q.global_scale.double()


@pytest.mark.parametrize("k", [32, 128, 1024])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_product_within_the_bound_of_an_fp32_sum(scheme: Scheme, k: int) -> None:
    x, weight = normal(5, 3, k), normal(24, k, seed=1) * 0.05
    linear = quantized(weight, scheme)
    a, b = rounded_input(x, linear), decode_exactly(linear.weight)
    y = PackedLinear(linear, None, is_emulating=True)(x)
    assert (y.dtype, y.shape) == (torch.float32, (5, 3, 24))
    # k products and k - 1 sums, then the factor (a product itself) and its multiplication
    bound = (2 * k + 3) * FP32_ULP * (a.abs() @ b.abs().T)
    assert ((y.double() - a @ b.T).abs() <= bound).all()
    assert (a - x.double()).abs().max() > 0 or scheme.activation is None, "the input must be rounded at all"


@pytest.mark.parametrize("scheme", [W4A4, MXFP4_W4A4, W4A16], ids=lambda s: s.name)
def test_small_integers_are_exact(scheme: Scheme) -> None:
    """Levels of E2M1 under a scale of 1: every product and sum is an integer, so any order gives the same bits."""
    levels = torch.tensor([0.0, 1, 2, 3, 4, 6, -1, -2, -3, -4, -6])
    generator = torch.Generator().manual_seed(2)

    def draw(rows: int, k: int) -> Tensor:
        x = levels[torch.randint(len(levels), (rows, k), generator=generator)]
        x[:, ::16] = 6  # fixes each block's amax
        return x

    x, weight = draw(7, 256), draw(16, 256)
    q = encode(weight, scheme.weight, global_scale=torch.tensor(1.0) if scheme.weight is NVFP4 else None)
    input_scale = torch.tensor(1.0) if scheme.needs_input_scale else None
    y = PackedLinear(QuantizedLinear(scheme, q, input_scale), None, is_emulating=True)(x)
    assert torch.equal(y.double(), x.double() @ weight.double().T)


def test_without_emulation_only_the_weight_is_rounded() -> None:
    x, linear = normal(4, 64), quantized(normal(8, 64, seed=1), W4A4)
    y = PackedLinear(linear, None, is_emulating=False)(x)
    expected = x.double() @ decode_exactly(linear.weight).T
    assert torch.allclose(y.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_bias_and_pre_quant_scale(scheme: Scheme) -> None:
    x, bias = normal(4, 64), normal(8, seed=3)
    pre = torch.rand(64, generator=torch.Generator().manual_seed(4)) + 0.5
    linear = quantized(normal(8, 64, seed=1), scheme)
    scaled = QuantizedLinear(scheme, linear.weight, linear.input_global_scale, pre)
    y = PackedLinear(scaled, bias, is_emulating=True)(x)
    expected = rounded_input(x * pre, linear) @ decode_exactly(linear.weight).T + bias.double()
    assert torch.allclose(y.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", [W4A4, W4A16, MXFP4_W4A4], ids=lambda s: s.name)
def test_a_stack_of_experts(scheme: Scheme) -> None:
    weight, bias = normal(3, 8, 64, seed=1), normal(3, 8, seed=2)
    linear = quantized(weight, scheme)
    layer = PackedLinear(linear, bias, is_emulating=True)
    assert (layer.out_features, layer.in_features) == (8, 64)
    x = normal(5, 64)
    for expert in range(3):
        expected = rounded_input(x, linear) @ decode_exactly(linear.weight)[expert].T + bias[expert].double()
        assert torch.allclose(layer(x, expert).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_16_bit_inputs_give_16_bit_outputs(scheme: Scheme, dtype: torch.dtype) -> None:
    """Unscaled NVFP4 operands reach 2688 each: of one sign, their sums pass fp16's largest number by far."""
    x, bias = normal(32, 256).abs().to(dtype), normal(16, seed=3)
    linear = quantized(normal(16, 256, seed=1).abs().to(dtype) * 0.05, scheme)
    y = PackedLinear(linear, bias, is_emulating=True)(x)
    assert y.dtype == dtype
    expected = rounded_input(x.float(), linear) @ decode_exactly(linear.weight).T + bias.double()
    assert ((y.double() - expected) / expected).abs().max() < 0.02


@pytest.mark.parametrize("scheme", [W4A4, W4A16, W8A8], ids=lambda s: s.name)
def test_scales_are_not_rounded_to_bf16(scheme: Scheme) -> None:
    """A scale halfway between two bf16 numbers would move every output by 0.2 %, and all in one direction."""
    x, weight = normal(32, 256).abs(), normal(64, 256, seed=1).abs()
    awkward = torch.tensor((1 + 181 / 256) * 2.0**-9)
    if scheme.weight is NVFP4:
        q = encode(weight, NVFP4, global_scale=awkward)
    else:
        q = encode(weight, scheme.weight, block_scale=awkward)
    input_scale = torch.tensor(2.0**-9) if scheme.needs_input_scale else None
    linear = QuantizedLinear(scheme, q, input_scale)
    x = x.to(torch.bfloat16)
    y = PackedLinear(linear, None, is_emulating=True)(x).double()
    expected = rounded_input(x.float(), linear) @ decode_exactly(q).T
    assert abs((y / expected).mean().item() - 1) < 0.0005


def test_moving_does_not_cast() -> None:
    layer = PackedLinear(quantized(normal(8, 64), W4A4), normal(8), is_emulating=True)
    moved = nn.Sequential(layer).to(torch.bfloat16).to("cpu")[0]
    assert isinstance(moved, PackedLinear)
    assert moved.linear.weight.packed.dtype == torch.uint8
    assert moved.linear.weight.block_scale.dtype == torch.float8_e4m3fn
    assert moved.linear.weight.global_scale.dtype == torch.float32
    assert moved.linear.input_global_scale.dtype == torch.float32
    on_meta = nn.Sequential(layer).to("meta")[0]
    assert on_meta.linear.weight.packed.is_meta
    assert on_meta.linear.input_global_scale.is_meta


@pytest.mark.parametrize("has_bias", [False, True])
def test_kept_linear_is_linear(has_bias: bool) -> None:
    """Exactly torch's own layer in the type of x, with the weight held in 16 bits."""
    weight, x = normal(8, 64).to(torch.bfloat16), normal(2, 5, 64, seed=1)
    bias = normal(8, seed=2).to(torch.bfloat16).float() if has_bias else None
    layer = KeptLinear(weight, bias)
    assert layer.weight.dtype == torch.bfloat16
    assert torch.equal(layer(x), nn.functional.linear(x, weight.float(), bias))
    half = layer(x.to(torch.bfloat16))
    reference = nn.functional.linear(x.to(torch.bfloat16), weight, None if bias is None else bias.to(torch.bfloat16))
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, reference)


def test_kept_linear_reports_what_it_is_given() -> None:
    seen = []
    layer = KeptLinear(normal(3, 8, 16).to(torch.bfloat16), None, "model.experts.up_proj")
    layer.observer = lambda name, x: seen.append((name, x.shape))
    assert layer(normal(5, 16), 2).shape == (5, 8)
    assert seen == [("model.experts.up_proj", (5, 16))]
