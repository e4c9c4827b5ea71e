"""Smoothing: the formula by hand, exact folding, and a choice that is never worse than none on its sample."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockscale.algorithms.awq import (
    EXPONENTS,
    awq_scales,
    best_smoothing,
    bounded_scale,
)
from blockscale.algorithms.fake_quantize import round_activation
from blockscale.algorithms.smoothquant import smoothquant_scales
from blockscale.errors import FormatError, NonFiniteError
from blockscale.formats.nvfp4 import global_scale_from_amax
from blockscale.formats.spec import NVFP4
from blockscale.formats.tensor import decode, encode


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def outlier_input(tokens: int, k: int, seed: int = 0) -> Tensor:
    """[tokens, k] whose channels differ in size, a few of them by far."""
    x = normal(tokens, k, seed=seed) * normal(k, seed=seed + 1).exp()
    x[:, :: k // 4] *= 20
    return x


def round_weight(weight: Tensor, scale: Tensor) -> Tensor:
    return decode(encode(weight, NVFP4))


def round_input(x: Tensor, scale: Tensor) -> Tensor:
    values, factor = round_activation(x, NVFP4, global_scale_from_amax(x.abs().amax()))
    return values * factor


def test_scales_by_hand() -> None:
    weight = torch.zeros(2, 16)
    weight[0, :3] = torch.tensor([4.0, -2.0, 1.0])
    weight[1, :3] = torch.tensor([1.0, 0.5, -2.0])
    # magnitudes over their block's largest: 1, 1/2, 1/4 and 1/2, 1/4, 1; of the rest nothing
    relative = [0.75, 0.375, 0.625]
    mean_abs = torch.zeros(16)
    mean_abs[:4] = torch.tensor([2.0, 8.0, 0.5, 3.0])
    scales = awq_scales(mean_abs, weight, [0.0, 0.25, 1.0])
    for a, scale in scales.items():
        raw = [m**a / r ** (1 - a) for m, r in zip((2.0, 8.0, 0.5), relative, strict=True)]
        middle = math.sqrt(max(raw) * min(raw))
        assert scale[:3].tolist() == pytest.approx([s / middle for s in raw], rel=1e-6)
        assert (scale[3:] == 1).all(), "no weight, or neither weight nor input"
    plain = awq_scales(mean_abs, weight, [0.5], use_weights=False)[0.5]
    assert plain[:3].tolist() == pytest.approx([math.sqrt(m / 2) for m in (2.0, 8.0, 0.5)], rel=1e-6)


def test_scales_are_clamped() -> None:
    scale = bounded_scale(torch.tensor([1e-9, 1.0, 1e9, 5.0]), torch.tensor([True, True, True, False]))
    assert scale.tolist() == pytest.approx([1e-4, 1.0, 1e4, 1.0])
    assert torch.equal(bounded_scale(torch.ones(3) * 7, torch.zeros(3, dtype=torch.bool)), torch.ones(3))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([*EXPONENTS, 0.33]), st.booleans())
def test_smoothing_leaves_the_product(seed: int, exponent: float, is_smoothquant: bool) -> None:
    x, w = outlier_input(9, 48, seed % 1000).double(), normal(5, 48, seed=seed, dtype=torch.float64)
    if is_smoothquant:
        scale = smoothquant_scales(x.abs().amax(0), w, [exponent])[exponent].double()
    else:
        scale = awq_scales(x.abs().mean(0), w, [exponent])[exponent].double()
    assert torch.allclose((x / scale) @ (w * scale).T, x @ w.T, rtol=1e-10, atol=1e-10)
    assert (scale.max() * scale.min()).item() == pytest.approx(1, rel=1e-5)


def test_smoothquant_by_hand() -> None:
    amax = torch.tensor([8.0, 2.0, 0.0, 1.0])
    weight = torch.tensor([[2.0, -0.5, 3.0, 0.0], [1.0, 0.25, 1.0, 0.0]])
    scale = smoothquant_scales(amax, weight, [0.5])[0.5]
    # sqrt(8 / 2) = 2 and sqrt(2 / .5) = 2: both in the middle; the others are dead
    assert scale.tolist() == pytest.approx([1, 1, 1, 1])
    scale = smoothquant_scales(amax, weight, [1.0])[1.0]
    assert scale.tolist() == pytest.approx([2, 0.5, 1, 1])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_input_rounded", [True, False])
def test_never_worse_than_none_and_truly_the_best(seed: int, is_input_rounded: bool) -> None:
    x = outlier_input(64, 64, seed)
    weights = [normal(24, 64, seed=seed + 7), normal(8, 64, seed=seed + 8)]
    scales = awq_scales(x.abs().mean(0), torch.cat(weights))
    rounding = round_input if is_input_rounded else None
    found = best_smoothing(weights, x, round_weight, rounding, scales)

    def loss(scale: Tensor) -> float:
        seen = rounding(x / scale, scale) if rounding else x / scale
        parts = [(seen.double() @ round_weight(w * scale, scale).double().T - (x @ w.T).double()) for w in weights]
        return sum(p.square().sum().item() for p in parts)

    losses = {a: loss(s) for a, s in scales.items()} | {None: loss(torch.ones(64))}
    assert found.baseline_loss == pytest.approx(losses[None], rel=1e-4)
    assert found.loss == pytest.approx(losses[found.exponent], rel=1e-4)
    assert found.loss <= found.baseline_loss
    assert found.loss == pytest.approx(min(losses.values()), rel=1e-4)


def test_outliers_are_worth_smoothing() -> None:
    x, w = outlier_input(256, 64), normal(32, 64, seed=3)
    found = best_smoothing([w], x, round_weight, None, awq_scales(x.abs().mean(0), w))
    assert found.exponent is not None
    assert found.loss < 0.7 * found.baseline_loss


def test_none_wins_where_all_others_are_worse() -> None:
    x, w = outlier_input(32, 16), torch.tensor([[0.0, 0.5, 1, 1.5, 2, 3, 4, 6] * 2])  # exact as it is
    found = best_smoothing([w], x, round_weight, None, awq_scales(x.abs().mean(0), w, EXPONENTS[1:]))
    assert found.exponent is None
    assert found.loss == found.baseline_loss < 1e-6
    assert torch.equal(found.scale, torch.ones(16))


def test_dead_channels_and_zeros() -> None:
    x, w = outlier_input(32, 32), normal(8, 32, seed=4)
    x[:, 5] = 0
    w[:, 9] = 0
    w[:, 16:] = 0  # a whole block
    scales = awq_scales(x.abs().mean(0), w)
    for scale in scales.values():
        assert torch.isfinite(scale).all()
        assert (scale > 0).all()
        assert (scale[[5, 9, 16, 31]] == 1).all()
    zero = awq_scales(torch.zeros(32), torch.zeros(4, 32))
    assert all(torch.equal(s, torch.ones(32)) for s in zero.values())
    found = best_smoothing([w], x, round_weight, round_input, scales)
    assert math.isfinite(found.loss)
    silent = best_smoothing([w], torch.zeros(4, 32), round_weight, round_input, zero)
    assert (silent.exponent, silent.loss) == (None, 0.0)


def test_the_quantizers_are_told_the_scale() -> None:
    x, w = outlier_input(16, 16), normal(4, 16, seed=5)
    told: list[tuple[Tensor, Tensor]] = []

    def exact(t: Tensor, scale: Tensor) -> Tensor:
        told.append((t, scale))
        return t

    scales = awq_scales(x.abs().mean(0), w, [0.5])
    best_smoothing([w], x, exact, exact, scales)
    (_, one), (_, also_one), (seen, given), (scaled, same) = told
    assert torch.equal(one, torch.ones(16))
    assert torch.equal(also_one, torch.ones(16))
    assert torch.equal(given, scales[0.5])
    assert torch.equal(same, scales[0.5])
    assert torch.equal(seen, x / scales[0.5])
    assert torch.equal(scaled, w * scales[0.5])


def test_a_candidate_that_overflows_is_passed_over() -> None:
    x, w = normal(8, 16), normal(4, 16, seed=1)

    def overflow(t: Tensor, scale: Tensor) -> Tensor:
        return t if (scale == 1).all() else t * torch.inf

    found = best_smoothing([w], x, overflow, None, awq_scales(x.abs().mean(0), w))
    assert (found.exponent, found.loss) == (None, 0.0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_numbers_are_named(bad: float) -> None:
    x, w = normal(8, 16), normal(4, 16, seed=1)
    broken = x.clone()
    broken[2, 3] = bad
    with pytest.raises(NonFiniteError, match="smoothing"):
        awq_scales(broken.abs().mean(0), w)
    with pytest.raises(NonFiniteError, match="smoothing"):
        smoothquant_scales(broken.abs().amax(0), w)
    with pytest.raises(NonFiniteError, match="smoothing"):
        best_smoothing([w], broken, round_weight, None, {})


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(FormatError, match=r"\[15\]"):
        awq_scales(torch.ones(15), torch.ones(4, 16))
    with pytest.raises(FormatError, match=r"\[4, 20\]"):
        awq_scales(torch.ones(20), torch.ones(4, 20))
    with pytest.raises(FormatError, match=r"\[16\]"):
        smoothquant_scales(torch.ones(16), torch.ones(16))
