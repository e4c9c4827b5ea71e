"""The ops in plain torch against float64, `formats` and the library's own algorithms. Needs nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockscale.algorithms.four_over_six import four_or_six_block_scale
from blockscale.algorithms.hadamard import rotate
from blockscale.algorithms.scale_sweep import best_block_scale
from blockscale.errors import FormatError, UsageError
from blockscale.formats.layout import unswizzle
from blockscale.formats.nvfp4 import decode_packed
from blockscale.formats.spec import MXFP4, NVFP4, Format
from blockscale.formats.tensor import encode
from blockscale.kernels.paged_cache import KVFormat, allocate, dequantize_pages
from blockscale.kernels.prepare import row_major
from blockscale.kernels.reference import linear, quantize
from blockscale.kernels.reference.kv import quantize_kv

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_rounds_its_sums_and_its_result_alone(fmt: Format, dtype: torch.dtype) -> None:
    q = encode(normal(40, 96).to(dtype), fmt)
    x, bias = normal(2, 3, 112, seed=1).to(dtype)[..., 16:], normal(40, seed=2).to(dtype)
    y = linear.linear_w4a16(x, row_major(q), bias)
    w = q.dequantize(torch.float32).double()
    expected = x.double() @ w.T + bias.double()
    bound = (x.double().abs() @ w.T.abs() + bias.double().abs()) * 98 * 2.0**-23 + expected.abs() * torch.finfo(
        dtype
    ).eps
    assert y.dtype == dtype
    assert bool(((y.double() - expected).abs() <= bound).all())


def test_a_linear_without_rows() -> None:
    weight = row_major(encode(normal(16, 32), NVFP4))
    assert linear.linear_w4a16(torch.empty(2, 0, 32), weight).shape == (2, 0, 16)
    assert linear.linear_w4a8(torch.empty(0, 32), weight).shape == (0, 16)
    assert linear.linear_w4a4(torch.empty(0, 32), weight).shape == (0, 16)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    weight = row_major(encode(normal(16, 64), NVFP4))
    x = normal(3, 64)
    x[1, 7] = bad
    for op in (linear.linear_w4a16, linear.linear_w4a4):
        y = op(x, weight)
        assert not y[1].isfinite().any()
        assert y[0].isfinite().all()
        assert y[2].isfinite().all()


def test_broken_scales_show() -> None:
    weight = row_major(encode(normal(16, 64), NVFP4))
    weight.block_scale[3, 2] = 0x7F
    y = linear.linear_w4a16(torch.ones(1, 64), weight)
    assert y[0].isnan().nonzero().flatten().tolist() == [3]


def test_w4a4_is_the_product_of_what_was_stored() -> None:
    q, x = encode(normal(24, 96).bfloat16(), NVFP4), normal(5, 96, seed=1).bfloat16()
    a = encode(x, NVFP4)
    expected = a.dequantize(torch.float32).double() @ q.dequantize(torch.float32).double().T
    y = linear.linear_w4a4(x, row_major(q)).double()
    assert bool(((y - expected).abs() <= expected.abs() * 2.0**-8 + 1e-5).all())
    static = linear.linear_w4a4(x, row_major(q), input_global_scale=a.global_scale)
    assert torch.equal(static.double(), y)
    with pytest.raises(FormatError, match="the weight is mxfp4"):
        linear.linear_w4a4(x, row_major(encode(normal(24, 96), MXFP4)))


def test_w4a8_errs_by_two_roundings() -> None:
    q, x = encode(normal(64, 256).bfloat16(), NVFP4), normal(64, 256, seed=1).bfloat16()
    expected = x.double() @ q.dequantize(torch.float32).double().T
    error = (linear.linear_w4a8(x, row_major(q)).double() - expected).norm() / expected.norm()
    assert 0.02 < error < 0.05  # each operand is rounded to four significant bits: 2.6 % rms


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.sampled_from(DTYPES), st.integers(-20, 12))
def test_quantizers_give_the_bytes_of_formats(seed: int, dtype: torch.dtype, power: int) -> None:
    x = (normal(3, 64, seed=seed) * 2.0**power).to(dtype)
    x[1, 16:32] = 0
    for scale in (None, torch.tensor(0.03125 * 2.0**power)):
        packed, block_scale, global_scale = quantize.quantize_nvfp4(x, scale)
        q = encode(x, NVFP4, global_scale=scale)
        assert torch.equal(packed, q.packed)
        assert torch.equal(block_scale.view(torch.uint8), q.block_scale.view(torch.uint8))
        assert torch.equal(global_scale, q.global_scale)


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.sampled_from(DTYPES), st.integers(-12, 4))
def test_scales_are_those_of_the_algorithms(seed: int, dtype: torch.dtype, power: int) -> None:
    x = normal(2, 128, seed=seed)
    x = (x * torch.exp2(torch.linspace(power, 0, 8)).repeat_interleave(16)).to(dtype)  # some blocks very small
    x[0, :16] = 0
    scale = (x.abs().amax().float() / 1536).view(())
    _, six, _ = quantize.quantize_nvfp4(x, scale, four_over_six=True)
    assert torch.equal(six.view(torch.uint8), four_or_six_block_scale(x, scale).view(torch.uint8))
    packed, swept = quantize.quantize_weight_sweep(x, scale)
    assert torch.equal(swept.view(torch.uint8), best_block_scale(x, scale).view(torch.uint8))
    assert torch.equal(packed, encode(x, NVFP4, block_scale=swept, global_scale=scale).packed)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_broken_block_decodes_to_nan_and_no_other(dtype: torch.dtype, bad: float) -> None:
    x = normal(2, 64).to(dtype)
    x[1, 20] = bad
    for scale in (None, torch.tensor(0.01)):
        packed, block_scale, global_scale = quantize.quantize_nvfp4(x, scale)
        values = decode_packed(packed, block_scale, global_scale)
        assert values[1, 16:32].isnan().all()
        assert values.isnan().count_nonzero() == 16
        assert block_scale.view(torch.uint8)[1, 1] == 0x7F
        assert global_scale.isfinite()


def test_scales_in_the_layout_of_tensor_cores() -> None:
    x = normal(2, 5, 96)
    _, plain, _ = quantize.quantize_nvfp4(x)
    _, swizzled, _ = quantize.quantize_nvfp4(x, swizzled=True)
    assert swizzled.shape == (128 * 8,)
    assert torch.equal(unswizzle(swizzled, 10, 6).view(torch.uint8), plain.view(10, 6).view(torch.uint8))


def test_norms_gates_and_rotations_are_those_of_models() -> None:
    x, residual, weight, scale = normal(4, 64), normal(4, 64, seed=1), normal(64, seed=2), torch.tensor(0.002)
    h = x + residual
    norm = torch.nn.functional.rms_norm(h, (64,), weight, 1e-6)
    packed, block_scale, total = quantize.rms_norm_quantize(x, weight, scale, residual=residual)
    assert torch.equal(total, h)
    near(packed, block_scale, norm, scale)
    packed, block_scale, total = quantize.rms_norm_quantize(x, weight, scale, unit_offset=True)
    assert total is None
    near(packed, block_scale, torch.nn.functional.rms_norm(x, (64,), 1 + weight, 1e-6), scale)
    silu, gelu = torch.nn.functional.silu(x) * residual, torch.nn.functional.gelu(x, approximate="tanh") * residual
    near(*quantize.silu_mul_quantize(x, residual, scale), silu, scale)
    near(*quantize.silu_mul_quantize(x, residual, scale, activation="gelu_tanh"), gelu, scale)
    clamped = (residual.clamp(-1, 1) + 1) * x.clamp(max=1) * torch.sigmoid(1.702 * x.clamp(max=1))
    near(*quantize.silu_mul_quantize(x, residual, scale, activation="clamped", limit=1.0), clamped, scale)
    for size in quantize.HADAMARD_SIZES[:3]:
        near(*quantize.hadamard_quantize(x, scale, size), rotate(x, size), scale)


def near(packed: Tensor, block_scale: Tensor, expected: Tensor, scale: Tensor) -> None:
    """The values of an encoding of `expected`, but for the last bit of an fp32 result here and there."""
    q = encode(expected, NVFP4, global_scale=scale)
    assert (packed != q.packed).float().mean() < 0.02
    step = q.block_scale.float().repeat_interleave(16, -1) * scale * 2.5
    assert bool(((decode_packed(packed, block_scale, scale) - q.dequantize()).abs() <= step).all())


def test_wrong_operands_are_refused() -> None:
    x, one = normal(2, 32), torch.ones(())
    with pytest.raises(FormatError, match="last dimension of x = 24"):
        quantize.quantize_nvfp4(normal(2, 24))
    with pytest.raises(FormatError, match="global_scale has shape"):
        quantize.quantize_nvfp4(x, torch.ones(2))
    with pytest.raises(FormatError, match="global_scale is float64"):
        quantize.quantize_nvfp4(x, one.double())
    with pytest.raises(FormatError, match="rotation of size 64 over 32"):
        quantize.hadamard_quantize(x, one, 64)
    with pytest.raises(UsageError, match="no activation 'relu'"):
        quantize.silu_mul_quantize(x, x, one, activation="relu")
    with pytest.raises(FormatError, match="up is"):
        quantize.silu_mul_quantize(x, x[:1], one)


@pytest.mark.parametrize("fmt", KVFormat)
def test_tokens_go_where_their_slots_say(fmt: KVFormat) -> None:
    cache = allocate(fmt, 3, 16, 2, 32, k_scale=0.02, v_scale=0.01)
    k, v = normal(4, 2, 32).bfloat16(), normal(4, 2, 32, seed=1).bfloat16()
    v[0, 1, 3] = torch.inf
    quantize_kv(cache, k, v, torch.tensor([17, -1, 40, 48]))
    keys = dequantize_pages(fmt, cache.k, cache.k_block_scale, cache.k_scale).flatten(0, 1)
    values = dequantize_pages(fmt, cache.v, cache.v_block_scale, cache.v_scale).flatten(0, 1)
    assert keys.flatten(1).any(1).nonzero().flatten().tolist() == [17, 40]
    assert bool(((keys[40] - k[2].float()).abs() <= k[2].float().abs().amax() / 6).all())
    assert values[17, 0].isfinite().all()
    broken = {KVFormat.BITS16: 0, KVFormat.FP8: 1, KVFormat.NVFP4: 16}[fmt]
    assert values[17, 1].isnan().count_nonzero() == broken
