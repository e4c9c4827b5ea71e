"""Block scales of activations by search: the scales that the weights' searches find, and never a larger error."""

import pytest
import torch
from torch import Tensor

from blockscale.algorithms import fake_quantize
from blockscale.algorithms.activation_scale import ActivationScale
from blockscale.algorithms.fake_quantize import round_activation
from blockscale.algorithms.four_over_six import four_or_six_block_scale
from blockscale.algorithms.scale_sweep import best_block_scale
from blockscale.formats.nvfp4 import decode_unscaled, encode_packed
from blockscale.formats.spec import FP8, FP8_TOKEN, MXFP4, NVFP4

from .exhaustive import BLOCKS, blocks

SEARCHES = {ActivationScale.FOUR_OVER_SIX: four_or_six_block_scale, ActivationScale.SWEEP: best_block_scale}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ULP = 2.0**-24


def activations(kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """[2, 5, 64]"""
    return blocks(kind, 40, seed=7).view(2, 5, 64).to(dtype)


def headroom_scale(x: Tensor) -> Tensor:
    return x.abs().amax().float() / (6 * 256)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("method", SEARCHES, ids=lambda m: m.value)
def test_the_scales_are_those_of_the_search(method: ActivationScale, kind: str, dtype: torch.dtype) -> None:
    x = activations(kind, dtype)
    scale = headroom_scale(x)
    values, factor = round_activation(x, NVFP4, scale, method)
    block_scale = SEARCHES[method](x, scale)
    assert values.dtype == torch.float32
    assert torch.equal(values, decode_unscaled(encode_packed(x, block_scale, scale), block_scale))
    assert torch.equal(values.to(torch.bfloat16).float(), values), "bf16 holds element * block scale exactly"
    assert torch.equal(factor, scale)


def block_errors(x: Tensor, scale: Tensor, method: ActivationScale) -> Tensor:
    """float64, squared, by block."""
    values, factor = round_activation(x, NVFP4, scale, method)
    return (values.double() * factor.double() - x.double()).square().unflatten(-1, (-1, 16)).sum(-1)


# the calibrated range can be met, missed by far, or far too wide
@pytest.mark.parametrize("amax", [None, 0.02, 3000.0])
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("method", SEARCHES, ids=lambda m: m.value)
def test_no_block_errs_more_than_by_amax(method: ActivationScale, kind: str, amax: float | None) -> None:
    x = activations(kind)
    scale = headroom_scale(x) if amax is None else torch.tensor(amax / (6 * 256))
    searched, plain = (block_errors(x, scale, m) for m in (method, ActivationScale.AMAX))
    # what a search sums in fp32: 16 squares of differences of numbers that are each off by two roundings
    slack = 64 * ULP * x.double().square().unflatten(-1, (-1, 16)).sum(-1)
    assert (searched <= plain + slack).all()
    if amax is None and kind == "gaussian":
        assert searched.sum() < 0.95 * plain.sum(), "and the search must find something"


def test_a_sweep_errs_no_more_than_four_over_six() -> None:
    x = activations("gaussian")
    scale = headroom_scale(x)
    swept, chosen = (block_errors(x, scale, m) for m in (ActivationScale.SWEEP, ActivationScale.FOUR_OVER_SIX))
    assert swept.sum() <= chosen.sum()


def test_amax_is_what_is_done_without_being_asked() -> None:
    x = activations("student")
    scale = headroom_scale(x)
    for values, asked in zip(
        round_activation(x, NVFP4, scale), round_activation(x, NVFP4, scale, ActivationScale.AMAX), strict=True
    ):
        assert torch.equal(values, asked)


@pytest.mark.parametrize("method", SEARCHES, ids=lambda m: m.value)
def test_many_rows_are_searched_piece_by_piece(method: ActivationScale, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 7, 64, generator=torch.Generator().manual_seed(1))
    scale = headroom_scale(x)
    whole, _ = round_activation(x, NVFP4, scale, method)
    for size in (1, 64, 200, 64 * 20):
        monkeypatch.setattr(fake_quantize, "_SLICE_ELEMENTS", size)
        assert torch.equal(round_activation(x, NVFP4, scale, method)[0], whole)


@pytest.mark.parametrize("method", SEARCHES, ids=lambda m: m.value)
def test_zeros_stay_zeros_and_nan_shows(method: ActivationScale) -> None:
    x = torch.zeros(3, 32)
    assert torch.equal(round_activation(x, NVFP4, torch.tensor(0.01), method)[0], x)
    x[1, 5] = torch.nan
    values, _ = round_activation(x, NVFP4, torch.tensor(0.01), method)
    assert values[1, 5].isnan()
    assert not values[0].isnan().any()


@pytest.mark.parametrize("fmt", [MXFP4, FP8, FP8_TOKEN], ids=lambda f: f.name)
def test_other_formats_have_one_way(fmt) -> None:
    x, scale = activations("gaussian"), torch.tensor(0.01)
    expected = round_activation(x, fmt, scale)[0]
    for method in SEARCHES:
        assert torch.equal(round_activation(x, fmt, scale, method)[0], expected)
