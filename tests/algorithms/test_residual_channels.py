"""Residual channels: which are chosen, and what the longer product is worth."""

from functools import partial
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockscale.algorithms.fake_quantize import round_activation
from blockscale.algorithms.residual_channels import (
    augment_input,
    augment_weight,
    bits_per_weight,
    choose_channels,
    outlier_count,
    residual_energy,
)
from blockscale.errors import FormatError
from blockscale.formats.spec import FP8_TOKEN, NVFP4


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outlier_input(tokens: int, k: int, seed: int = 0) -> Tensor:
    return normal(tokens, k, seed=seed) * normal(k, seed=seed + 1).mul(1.5).exp()


def nvfp4(x: Tensor) -> partial[tuple[Tensor, Tensor]]:
    return partial(round_activation, fmt=NVFP4, scale=x.abs().amax() / 2688)


def output_error(x: Tensor, w: Tensor, channels: Tensor) -> float:
    values, factor = augment_input(x, channels, nvfp4(x))
    product = (values * factor).double() @ augment_weight(w, channels).double().T
    return (product - x.double() @ w.double().T).square().sum().item()


def test_energy_by_hand() -> None:
    weight = torch.tensor([[3.0, 0.0, 1.0], [4.0, 0.0, -1.0]])
    assert residual_energy(torch.tensor([2.0, 7.0, 5.0]), weight).tolist() == [50, 0, 10]


def test_energy_is_the_expected_output_error() -> None:
    """Where the errors of different channels do not go together: here only one channel errs in each token."""
    error = torch.diag(normal(16, seed=1))  # [T = 16, 16]
    w = normal(5, 16, seed=2)
    total = (error @ w.T).square().sum() / 16
    assert residual_energy(error.square().mean(0), w).sum().item() == pytest.approx(total.item(), rel=1e-5)


def test_the_largest_come_first() -> None:
    score = torch.zeros(48)
    score[[7, 30, 2]] = torch.tensor([3.0, 9.0, 5.0])
    chosen = choose_channels(score, 16)
    assert chosen[:3].tolist() == [30, 2, 7]
    assert chosen[3:].tolist() == [0, 1, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14]
    assert choose_channels(score, 0).shape == (0,)


def test_no_other_set_leaves_less() -> None:
    """All sets of 16 of 20 channels."""
    energy = normal(20, seed=3).square()
    left = [energy.sum() - energy[list(s)].sum() for s in combinations(range(20), 16)]
    chosen = choose_channels(energy, 16)
    assert (energy.sum() - energy[chosen].sum()).item() == pytest.approx(min(left).item(), rel=1e-5)


@pytest.mark.parametrize("count", [-16, 8, 17, 48])
def test_counts_that_do_not_fit(count: int) -> None:
    with pytest.raises(FormatError, match=str(count)):
        choose_channels(torch.ones(32), count)


def test_the_parts_of_an_augmented_input() -> None:
    x = outlier_input(6, 64).view(2, 3, 64)
    channels = torch.tensor([5, 63, *range(20, 34)])
    round_input = nvfp4(x)
    values, factor = augment_input(x, channels, round_input)
    rounded, _ = round_input(x)
    assert values.shape == (2, 3, 80)
    assert torch.equal(values[..., :64], rounded)
    error = (x - rounded * factor)[..., channels]
    assert torch.equal(values[..., 64:], round_input(error)[0])
    assert torch.equal(values.to(torch.bfloat16).float(), values), "as exact in bf16 as any rounded input"


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**20))
def test_every_channel_leaves_only_the_error_of_the_error(seed: int) -> None:
    """S = K: within a block an error is at most 1/6 of the amax, plus what its own scale's rounding allows."""
    x = outlier_input(8, 32, seed)
    values, factor = augment_input(x, torch.arange(32), nvfp4(x))
    rounded = values[:, :32] * factor
    both = rounded + values[:, 32:] * factor
    # the smallest scale of a block keeps errors below half of .5 * 2^-9 * factor, however small the block
    floor = 0.25 * 2.0**-9 * factor.item()
    first = (x - rounded).unflatten(-1, (-1, 16)).abs().amax(-1)
    second = (x - both).unflatten(-1, (-1, 16)).abs().amax(-1)
    # codes lie at most 2 apart, so errors are within 1 grid step, amax / 6 of it, scales within 1/16 of that
    assert (second <= first * (1 / 6) * (1 + 1 / 8) + floor).all()
    assert (x - both).square().sum() < 0.5 * (x - rounded).square().sum()


@pytest.mark.parametrize("seed", range(4))
def test_more_channels_less_error(seed: int) -> None:
    x, w = outlier_input(64, 128, seed), normal(32, 128, seed=seed + 9)
    rounded, factor = nvfp4(x)(x)
    energy = residual_energy((x - rounded * factor).square().mean(0), w)
    errors = [output_error(x, w, choose_channels(energy, s)) for s in (0, 16, 32, 64, 128)]
    assert errors == sorted(errors, reverse=True)
    assert errors[1] < 0.6 * errors[0]
    assert errors[-1] < 0.05 * errors[0]
    worst = output_error(x, w, choose_channels(-energy, 16))
    assert errors[1] < worst


def test_zeros() -> None:
    x = torch.zeros(2, 32)
    values, _ = augment_input(x, torch.arange(16), partial(round_activation, fmt=NVFP4, scale=torch.tensor(1.0)))
    assert not values.any()


def test_a_scale_per_token_cannot_be_shared() -> None:
    with pytest.raises(FormatError, match="global scale"):
        augment_input(normal(2, 32), torch.arange(16), partial(round_activation, fmt=FP8_TOKEN, scale=None))


def test_the_papers_count() -> None:
    x = torch.full((4, 256), 0.1)
    x[:, 0] = 1.0  # 0.1 < 1/8
    assert outlier_count(x) == 64
    x[:, 1:65] = 0.2  # 65 above
    assert outlier_count(x) == 128
    assert outlier_count(torch.ones(3, 256)) == 256
    assert outlier_count(torch.ones(3, 48)) == 48
    assert outlier_count(torch.zeros(3, 48)) == 0


def test_bits() -> None:
    assert bits_per_weight(4096, 0) == 4.5
    assert bits_per_weight(1024, 64) == pytest.approx(4.5 * 1.0625)
