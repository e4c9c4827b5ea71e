"""Moments against float64 sums over all tokens at once."""

import pytest
import torch
from torch import Tensor

from blockscale.algorithms.statistics import MomentSums, add_moments, block_hessians, finish, importance, new_moments
from blockscale.errors import FormatError, NonFiniteError, UsageError

EPSILON = 2.0**-23


def inputs(tokens: int, k: int, seed: int) -> Tensor:
    return torch.randn(tokens, k, generator=torch.Generator().manual_seed(seed))


def assert_mean(found: Tensor, terms: Tensor, weights: Tensor) -> None:
    """`found` is the weighted mean over the first axis of float64 terms, to what T fp32 additions can lose."""
    shape = (-1,) + (1,) * (terms.dim() - 1)
    weighted = terms * weights.double().view(shape)
    total = weights.double().sum()
    bound = (len(terms) + 4) * EPSILON * weighted.abs().sum(0) / total
    assert ((found.double() - weighted.sum(0) / total).abs() <= bound + 1e-30).all()


def outer(a: Tensor, b: Tensor) -> Tensor:
    return a.double().unsqueeze(2) * b.double().unsqueeze(1)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_means_over_all_tokens(is_weighted: bool) -> None:
    x, reference = inputs(60, 32, 1), inputs(60, 32, 2)
    weights = torch.rand(60, generator=torch.Generator().manual_seed(3)) if is_weighted else torch.ones(60)
    sums = new_moments(32)
    for part in (slice(0, 7), slice(7, 8), slice(8, 60)):
        add_moments(sums, x[part], reference[part], token_weights=weights[part] if is_weighted else None)
    moments = finish(sums)
    assert moments.count == 60
    assert_mean(moments.second, outer(x, x), weights)
    assert moments.cross is not None
    assert_mean(moments.cross, outer(x, reference), weights)
    assert_mean(moments.mean_abs, x.double().abs(), weights)
    assert torch.equal(moments.amax, x.abs().amax(0))
    assert torch.equal(moments.second, moments.second.T)
    assert torch.equal(importance(moments), moments.second.diagonal())


def test_the_same_batches_give_the_same_bits() -> None:
    def run() -> MomentSums:
        sums = new_moments(48)
        for seed in range(5):
            add_moments(sums, inputs(33, 48, seed), inputs(33, 48, seed + 100))
        return sums

    one, other = finish(run()), finish(run())
    assert one.cross is not None
    assert other.cross is not None
    for a, b in ((one.second, other.second), (one.cross, other.cross), (one.mean_abs, other.mean_abs)):
        assert torch.equal(a, b)


def test_a_weight_of_two_is_a_token_twice_and_of_zero_no_token() -> None:
    x = torch.randint(-4, 5, (3, 16), generator=torch.Generator().manual_seed(0)).float()  # sums are exact
    weighted, repeated = new_moments(16), new_moments(16)
    add_moments(weighted, x, token_weights=torch.tensor([2.0, 0.0, 1.0]))
    add_moments(repeated, x[[0, 0, 2]])
    a, b = finish(weighted), finish(repeated)
    assert torch.equal(a.second, b.second)
    assert torch.equal(a.mean_abs, b.mean_abs)
    assert torch.equal(a.amax, b.amax)
    assert (a.count, b.count) == (2, 3)


def test_sixteen_bits_and_leading_dimensions() -> None:
    x = inputs(24, 16, 4).bfloat16()
    flat, deep = new_moments(16), new_moments(16)
    add_moments(flat, x.float())
    add_moments(deep, x.view(2, 12, 16))
    assert torch.equal(finish(flat).second, finish(deep).second)


def test_no_token_gives_zeros() -> None:
    sums = new_moments(16)
    add_moments(sums, torch.zeros(0, 16))
    add_moments(sums, torch.ones(2, 16), token_weights=torch.zeros(2))
    moments = finish(sums)
    assert moments.count == 0
    assert not moments.second.any()
    assert not moments.amax.any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("is_in_reference", [False, True])
def test_a_bad_batch_leaves_the_sums_alone(bad: float, is_in_reference: bool) -> None:
    x, reference = inputs(4, 16, 5), inputs(4, 16, 6)
    sums = new_moments(16)
    add_moments(sums, x, reference)
    before = finish(sums)
    broken = (reference if is_in_reference else x).clone()
    broken[1, 3] = bad
    with pytest.raises(NonFiniteError, match=r"layers\.3"):
        add_moments(sums, *((x, broken) if is_in_reference else (broken, reference)), name="layers.3")
    after = finish(sums)
    assert after.count == before.count
    assert torch.equal(after.second, before.second)
    assert torch.equal(after.amax, before.amax)


def test_what_does_not_fit_is_refused() -> None:
    sums = new_moments(16)
    with pytest.raises(FormatError):
        add_moments(sums, torch.ones(2, 32))
    with pytest.raises(FormatError):
        add_moments(sums, torch.ones(2, 16, dtype=torch.int64))
    with pytest.raises(FormatError):
        add_moments(sums, torch.ones(2, 16), torch.ones(3, 16))
    with pytest.raises(FormatError):
        add_moments(sums, torch.ones(2, 16), token_weights=torch.ones(3))
    with pytest.raises(UsageError):
        add_moments(sums, torch.ones(2, 16), token_weights=torch.tensor([1.0, -1.0]))
    add_moments(sums, torch.ones(2, 16))
    with pytest.raises(UsageError):
        add_moments(sums, torch.ones(2, 16), torch.ones(2, 16))


def test_block_hessians_are_the_diagonal_blocks() -> None:
    second = inputs(48, 48, 7)
    blocks = block_hessians(second)
    assert blocks.shape == (3, 16, 16)
    assert blocks.is_contiguous()
    for b in range(3):
        assert torch.equal(blocks[b], second[b * 16 : b * 16 + 16, b * 16 : b * 16 + 16])
    stack = torch.stack((second, second.T))
    assert torch.equal(block_hessians(stack)[1], block_hessians(second.T))
    for wrong in (torch.ones(16, 32), torch.ones(24, 24), torch.ones(16)):
        with pytest.raises(FormatError):
            block_hessians(wrong)
