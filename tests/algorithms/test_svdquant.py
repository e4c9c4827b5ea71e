"""The low-rank branch: exact at full rank, optimal where the optimum is known, never worse than none."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockscale.algorithms.svdquant import low_rank_branch
from blockscale.errors import FormatError, NonFiniteError
from blockscale.formats.spec import NVFP4
from blockscale.formats.tensor import decode, encode


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def round_weight(weight: Tensor) -> Tensor:
    return decode(encode(weight, NVFP4))


def to_nothing(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight)


def second_moment(k: int, seed: int) -> Tensor:
    """[k, k] of inputs with large and small directions."""
    x = normal(4 * k, k, seed=seed) @ normal(k, k, seed=seed + 1) * normal(k, seed=seed + 2).exp()
    return x.T @ x / len(x)


def objective(error: Tensor, second: Tensor) -> float:
    error, second = error.double(), second.double()
    return torch.trace(error @ second @ error.T).item()


@pytest.mark.parametrize("shape", [(24, 32), (48, 16)])
def test_full_rank_is_exact(shape: tuple[int, int]) -> None:
    w = normal(*shape)
    branch = low_rank_branch(w, min(shape), round_weight, dtype=torch.float64)
    assert torch.allclose(branch.up @ branch.down, w.double(), rtol=0, atol=1e-12)
    assert branch.residual.abs().max() < 1e-6
    assert branch.loss < 1e-12 < branch.baseline_loss


def test_a_low_rank_weight_needs_no_rest() -> None:
    w = normal(32, 3) @ normal(3, 48, seed=1)
    branch = low_rank_branch(w, 3, round_weight, dtype=torch.float64)
    assert (w - branch.up @ branch.down).abs().max() < 1e-5
    # bf16 factors lose 2^-9 of themselves, and 4 bits keep all but a few percent of that
    coarse = low_rank_branch(w, 3, round_weight)
    assert coarse.up.dtype == coarse.down.dtype == torch.bfloat16
    assert coarse.loss < 2.0**-14 * w.square().sum().item()


def test_rank_0_is_plain_rounding() -> None:
    w = normal(8, 32)
    branch = low_rank_branch(w, 0, round_weight)
    assert (branch.up.shape, branch.down.shape) == ((8, 0), (0, 32))
    assert torch.equal(branch.residual, w)
    assert torch.equal(branch.quantized, round_weight(w))
    assert branch.loss == branch.baseline_loss
    assert branch.loss == pytest.approx((w.double() - branch.quantized.double()).square().sum().item())


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_the_best_approximation_without_a_quantizer(rank: int) -> None:
    """Eckart-Young: with nothing kept beside the branch, the loss is the sum of the squared singular values left."""
    w = normal(16, 32, seed=2)
    branch = low_rank_branch(w, rank, to_nothing, 1, dtype=torch.float64)
    left = torch.linalg.svdvals(w.double())[rank:].square().sum().item()
    assert branch.loss == pytest.approx(left, rel=1e-9)


@pytest.mark.parametrize("rank", [1, 4])
def test_the_best_approximation_as_the_inputs_see_it(rank: int) -> None:
    w, second = normal(16, 32, seed=3), second_moment(32, seed=4)
    branch = low_rank_branch(w, rank, to_nothing, 1, second=second, damp=1e-12, dtype=torch.float64)
    # the optimum's value from another root of H
    root = torch.linalg.cholesky(second.double())
    left = torch.linalg.svdvals(w.double() @ root)[rank:].square().sum().item()
    assert objective(w.double() - branch.up @ branch.down, second) == pytest.approx(left, rel=1e-6)
    plain = low_rank_branch(w, rank, to_nothing, 1, dtype=torch.float64)
    assert objective(w.double() - plain.up @ plain.down, second) > left


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**20), st.integers(0, 6), st.integers(0, 4), st.booleans(), st.booleans())
def test_never_worse_than_no_branch(seed: int, rank: int, turns: int, has_second: bool, has_error: bool) -> None:
    w = normal(12, 32, seed=seed) / normal(12, 32, seed=seed + 1).abs().clamp(min=0.05)
    second = second_moment(32, seed + 2) if has_second else None
    error = second_moment(32, seed + 5) * 0.01 if has_error else None
    branch = low_rank_branch(w, rank, round_weight, turns, second=second, input_error=error)
    assert branch.loss <= branch.baseline_loss
    product = branch.up.double() @ branch.down.double()
    assert torch.equal(branch.residual, (w.double() - product).float())
    assert torch.equal(branch.quantized, round_weight(branch.residual))
    identity = torch.eye(32)
    expected = objective(w - product - branch.quantized.double(), identity if second is None else second)
    if error is not None:
        expected += objective(branch.quantized, error)
    assert branch.loss == pytest.approx(expected, rel=1e-9)
    zero = torch.zeros(12, 32)
    start = objective(w - round_weight(w), identity if second is None else second)
    start += objective(round_weight(w), error) if error is not None else 0
    assert branch.baseline_loss == pytest.approx(start, rel=1e-9)
    assert low_rank_branch(zero, rank, round_weight, turns, second=second).loss == 0


def test_a_branch_helps_weights_with_outlier_directions() -> None:
    w = normal(64, 64) + 4 * normal(64, 2, seed=1) @ normal(2, 64, seed=2)
    once = low_rank_branch(w, 8, round_weight, 1)
    assert once.loss < 0.5 * once.baseline_loss
    assert low_rank_branch(w, 8, round_weight, 4).loss <= once.loss


def test_moments_that_are_singular_or_not_positive() -> None:
    w, k = normal(8, 32), 32
    dead = second_moment(k, seed=9)
    dead[5] = dead[:, 5] = 0
    indefinite = dead - 0.01 * dead.diagonal().mean() * torch.eye(k)
    for second in (dead, indefinite, torch.zeros(k, k), torch.ones(k, k)):
        branch = low_rank_branch(w, 4, round_weight, second=second)
        assert torch.isfinite(branch.up).all()
        assert torch.isfinite(branch.down).all()
        assert branch.loss <= branch.baseline_loss


def test_bad_input_is_named() -> None:
    w = normal(8, 32)
    with pytest.raises(FormatError, match="rank 9"):
        low_rank_branch(w, 9, round_weight)
    with pytest.raises(FormatError, match="rank -1"):
        low_rank_branch(w, -1, round_weight)
    with pytest.raises(FormatError, match="second moment"):
        low_rank_branch(w, 2, round_weight, second=torch.eye(16))
    w[3, 3] = torch.nan
    with pytest.raises(NonFiniteError):
        low_rank_branch(w, 2, round_weight)
