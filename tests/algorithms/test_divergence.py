import math

import pytest
import torch

from blockscale.algorithms import divergence
from blockscale.algorithms.divergence import score_tokens
from blockscale.errors import ModelError


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def exact(candidate: torch.Tensor, targets: torch.Tensor, reference: torch.Tensor):
    """The textbook formulas in float64."""
    log_c, log_r = candidate.double().log_softmax(-1), reference.double().log_softmax(-1)
    rows = torch.arange(len(targets))
    return -log_c[rows, targets], -log_r[rows, targets], (log_r.exp() * (log_r - log_c)).sum(-1)


def test_kl_of_known_distributions() -> None:
    found = score_tokens(logits_of(0.5, 0.25, 0.25), torch.tensor([1]), logits_of(0.25, 0.25, 0.5))
    assert found.kl.item() == pytest.approx(0.25 * math.log(0.5) + 0.5 * math.log(2), abs=1e-7)
    assert found.nll.item() == pytest.approx(math.log(4), abs=1e-7)
    assert found.nll_reference.item() == pytest.approx(math.log(4), abs=1e-7)
    assert found.agrees.tolist() == [False]


def test_kl_of_gaussian_like_shift() -> None:
    """Bernoulli: KL(p || q) in closed form."""
    p, q = 0.9, 0.6
    found = score_tokens(logits_of(q, 1 - q), torch.tensor([0]), logits_of(p, 1 - p))
    assert found.kl.item() == pytest.approx(p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)), abs=1e-7)
    assert found.agrees.item()


@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_against_float64(scale) -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(50, 997, generator=generator) * scale
    candidate = reference + 0.3 * torch.randn(50, 997, generator=generator)
    targets = torch.randint(997, (50,), generator=generator)
    found = score_tokens(candidate, targets, reference)
    nll, nll_reference, kl = exact(candidate, targets, reference)
    # one fp32 rounding of the shifted logits, which reach 2 * 4 sigma
    bound = 2**-23 * 10 * scale + 1e-6
    torch.testing.assert_close(found.nll, nll, rtol=0, atol=bound)
    torch.testing.assert_close(found.nll_reference, nll_reference, rtol=0, atol=bound)
    torch.testing.assert_close(found.kl, kl, rtol=0, atol=bound)


def test_small_divergences_are_not_lost_behind_large_logits() -> None:
    generator = torch.Generator().manual_seed(1)
    reference = 5 * torch.randn(20, 5000, generator=generator) + 100
    candidate = reference + 2e-3 * torch.randn(20, 5000, generator=generator)
    targets = torch.zeros(20, dtype=torch.int64)
    kl = exact(candidate, targets, reference)[2]
    assert kl.max() < 1e-5
    torch.testing.assert_close(score_tokens(candidate, targets, reference).kl, kl, rtol=0, atol=3e-7)


def test_equal_logits_give_exactly_nothing() -> None:
    logits = torch.randn(40, 1000) * 20
    found = score_tokens(logits, torch.arange(40), logits.clone())
    assert (found.kl == 0).all()
    assert found.agrees.all()
    assert torch.equal(found.nll, found.nll_reference)


def test_a_constant_added_to_all_logits_changes_nothing() -> None:
    logits = torch.randn(8, 64).round(decimals=2)
    found = score_tokens(logits * 256 + 2.0**14, torch.arange(8), logits * 256)
    assert found.kl.max() < 0.01  # the addition itself rounds


def test_huge_logits_do_not_overflow() -> None:
    found = score_tokens(torch.tensor([[3e38, 0.0]]), torch.tensor([1]), torch.tensor([[0.0, 0.0]]))
    assert found.nll.item() == pytest.approx(3e38)
    assert found.kl.item() == pytest.approx(1.5e38)


def test_tokens_that_a_model_rules_out() -> None:
    masked = torch.tensor([[0.0, 0.0, -torch.inf]])
    assert score_tokens(masked, torch.tensor([0]), masked).kl.item() == 0
    half = score_tokens(torch.zeros(1, 3), torch.tensor([0]), masked)
    assert half.kl.item() == pytest.approx(math.log(3) - math.log(2), abs=1e-7)
    assert score_tokens(masked, torch.tensor([2]), torch.zeros(1, 3)).kl.item() == math.inf
    assert score_tokens(masked, torch.tensor([2])).nll.item() == math.inf


def test_nan_stays_nan() -> None:
    found = score_tokens(torch.tensor([[0.0, torch.nan], [0.0, 0.0]]), torch.tensor([0, 0]), torch.zeros(2, 2))
    assert math.isnan(found.kl[0])
    assert found.kl[1] == 0
    assert math.isnan(found.nll[0])


def test_without_reference() -> None:
    found = score_tokens(torch.zeros(5, 7), torch.arange(5))
    assert found.nll.tolist() == pytest.approx([math.log(7)] * 5)
    assert (found.nll_reference, found.kl, found.agrees) == (None, None, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits(dtype) -> None:
    logits = torch.randn(10, 100).to(dtype)
    found = score_tokens(logits, torch.arange(10), logits.float())
    assert (found.kl == 0).all()


def test_chunks_change_nothing(monkeypatch) -> None:
    candidate, reference, targets = torch.randn(23, 50), torch.randn(23, 50), torch.randint(50, (23,))
    whole = score_tokens(candidate, targets, reference)
    monkeypatch.setattr(divergence, "CHUNK_ELEMENTS", 4 * 50)
    parts = score_tokens(candidate, targets, reference)
    for name in ("nll", "nll_reference", "kl", "agrees"):
        assert torch.equal(getattr(whole, name), getattr(parts, name))


def test_inputs_are_left_alone() -> None:
    candidate, reference = torch.randn(5, 9), torch.randn(5, 9)
    copies = candidate.clone(), reference.clone()
    score_tokens(candidate, torch.arange(5), reference)
    assert torch.equal(candidate, copies[0])
    assert torch.equal(reference, copies[1])


def test_vocabularies_that_differ() -> None:
    with pytest.raises(ModelError, match="reference"):
        score_tokens(torch.zeros(2, 8), torch.tensor([0, 1]), torch.zeros(2, 9))
