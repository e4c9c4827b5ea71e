"""Activations rounded as the tensor core sees them, against the formats' own encode and decode."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockscale.algorithms.fake_quantize import round_activation
from blockscale.errors import FormatError
from blockscale.formats.nvfp4 import block_amax, block_scale_from_amax, decode_unscaled, encode_packed
from blockscale.formats.spec import FORMATS, FP8, FP8_TOKEN, MXFP4, NVFP4
from blockscale.formats.tensor import decode, encode

from .exhaustive import BLOCKS, blocks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def activations(kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """[2, 5, 64]"""
    return blocks(kind, 40, seed=7).view(2, 5, 64).to(dtype)


# the calibrated range can be met, missed by far, or far too wide
@pytest.mark.parametrize("amax", [None, 0.02, 3000.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", BLOCKS)
def test_nvfp4_is_encode_and_decode(kind: str, dtype: torch.dtype, amax: float | None) -> None:
    x = activations(kind, dtype)
    scale = (x.abs().amax().float() if amax is None else torch.tensor(amax)) / 2688
    values, factor = round_activation(x, NVFP4, scale)
    block_scale = block_scale_from_amax(block_amax(x), scale)
    expected = decode_unscaled(encode_packed(x, block_scale, scale), block_scale)
    assert values.dtype == torch.float32
    assert torch.equal(values, expected)
    assert torch.equal(values.to(torch.bfloat16).float(), values), "bf16 holds element * block scale exactly"
    assert torch.equal(factor, scale)


def test_nvfp4_saturates_at_the_calibrated_range() -> None:
    x = torch.full((1, 16), 100.0)
    values, factor = round_activation(x, NVFP4, torch.tensor(1.0 / 2688))
    assert torch.equal(values * factor, torch.full((1, 16), 1.0))


def test_nvfp4_zeros() -> None:
    values, _ = round_activation(torch.zeros(3, 32), NVFP4, torch.tensor(0.01))
    assert torch.equal(values, torch.zeros(3, 32))


def test_exact_inputs_come_back() -> None:
    """Small integers on E2M1's grid, under a scale of 1."""
    x = torch.tensor([0.0, 1, -2, 3, 4, -6, 6, 2] * 4).view(2, 16)
    values, factor = round_activation(x, NVFP4, torch.tensor(1.0))
    assert torch.equal(values * factor, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", BLOCKS)
def test_mxfp4_is_encode_and_decode(kind: str, dtype: torch.dtype) -> None:
    x = activations(kind, dtype)
    values, factor = round_activation(x, MXFP4, None)
    assert torch.equal(values, decode(encode(x, MXFP4)))
    assert torch.equal(values.to(torch.bfloat16).float(), values)
    assert factor.item() == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", BLOCKS)
def test_fp8_static(kind: str, dtype: torch.dtype) -> None:
    x = activations(kind, dtype)
    scale = x.abs().amax().float() / 448 / 2  # half the range: large values saturate
    values, factor = round_activation(x, FP8, scale)
    expected = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(values, expected)
    assert values.abs().max() == 448
    assert torch.equal(factor, scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", BLOCKS)
def test_fp8_per_token(kind: str, dtype: torch.dtype) -> None:
    x = activations(kind, dtype)
    x[0, 2] = 0
    values, factor = round_activation(x, FP8_TOKEN, None)
    assert factor.shape == (2, 5, 1)
    for i, j in ((0, 0), (0, 2), (1, 4)):
        amax = x[i, j].abs().amax().float()
        scale = amax / 448 if amax > 0 else torch.tensor(1.0)
        assert torch.equal(factor[i, j, 0], scale)
        assert torch.equal(values[i, j], (x[i, j].float() / scale).to(torch.float8_e4m3fn).float())
    assert torch.isfinite(values).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(-60, 60))
def test_scaling_by_a_power_of_two_scales_the_result(seed: int, exponent: float) -> None:
    x = blocks("student", 4, seed % 1000).view(1, 64)
    factor = 2.0 ** round(exponent)
    scale = x.abs().amax() / 2688
    plain, _ = round_activation(x, NVFP4, scale)
    scaled, _ = round_activation(x * factor, NVFP4, scale * factor)
    assert torch.equal(plain, scaled)


@pytest.mark.parametrize("fmt", [NVFP4, FP8])
def test_static_formats_need_a_scale(fmt) -> None:
    with pytest.raises(FormatError, match="calibrated"):
        round_activation(torch.ones(1, 16), fmt, None)


def test_unknown_activation_format_lists_the_known() -> None:
    with pytest.raises(FormatError, match="mxfp8") as error:
        round_activation(torch.ones(1, 32), FORMATS["mxfp8"], None)
    assert "nvfp4" in error.value.hint
