"""The loss is the measured divergence, its gradient autograd's, and both whatever the chunks are."""

import pytest
import torch
from torch import Tensor

from blockscale.algorithms import divergence_loss
from blockscale.algorithms.divergence import score_tokens
from blockscale.algorithms.divergence_loss import mean_divergence
from blockscale.errors import ModelError


def logits(num: int, vocabulary: int, seed: int) -> Tensor:
    return torch.randn(num, vocabulary, generator=torch.Generator().manual_seed(seed)) * 4


def in_float64(student: Tensor, teacher: Tensor) -> Tensor:
    log_p, log_q = teacher.double().log_softmax(-1), student.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


@pytest.mark.parametrize("chunk", [1, 3 * 50, 2**24])
def test_loss_and_gradient_are_autograds(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence_loss, "CHUNK_ELEMENTS", chunk)
    student, teacher = logits(7, 50, 1).requires_grad_(), logits(7, 50, 2)
    exact = student.detach().clone().requires_grad_()
    expected = in_float64(exact, teacher)
    (3 * expected).backward()
    found = mean_divergence(student, teacher)
    (3 * found).backward()
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert student.grad is not None
    assert exact.grad is not None
    # probabilities are at most 1, fp32 has 2^-24 of that, and a few roundings meet
    assert (student.grad - exact.grad).abs().max() <= 3 / 7 * 8 * 2.0**-24


def test_it_is_the_figure_that_evaluation_reports() -> None:
    student, teacher = logits(9, 300, 3).bfloat16(), logits(9, 300, 4).bfloat16()
    kl = score_tokens(student, torch.zeros(9, dtype=torch.int64), teacher).kl
    assert kl is not None
    assert mean_divergence(student, teacher).item() == torch.tensor(kl.mean().item()).item()


def test_equal_logits_are_at_no_distance_and_have_no_gradient() -> None:
    student = logits(5, 40, 5).requires_grad_()
    loss = mean_divergence(student, student.detach().clone())
    loss.backward()
    assert loss.item() == 0
    assert student.grad is not None
    assert not student.grad.any()


def test_what_the_teacher_rules_out_adds_nothing() -> None:
    student, teacher = logits(2, 6, 6), logits(2, 6, 7)
    student[:, 3], teacher[:, 3] = -torch.inf, -torch.inf
    without = [0, 1, 2, 4, 5]
    student.requires_grad_()
    loss = mean_divergence(student, teacher)
    loss.backward()
    assert loss.item() == pytest.approx(in_float64(student.detach()[:, without], teacher[:, without]).item(), rel=1e-6)
    assert student.grad is not None
    assert torch.isfinite(student.grad).all()
    assert not student.grad[:, 3].any()


def test_gradients_of_16_bit_logits_have_their_dtype() -> None:
    student = logits(4, 30, 8).bfloat16().requires_grad_()
    mean_divergence(student, logits(4, 30, 9)).backward()
    assert student.grad is not None
    assert student.grad.dtype == torch.bfloat16


def test_two_vocabularies_are_refused() -> None:
    with pytest.raises(ModelError, match=r"\[4, 30\] and its teacher \[4, 31\]"):
        mean_divergence(logits(4, 30, 1), logits(4, 31, 1))
