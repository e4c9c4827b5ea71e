"""Mean KL divergence from a teacher's next-token distributions, as a loss to learn from.

    loss = mean over tokens of KL(teacher || student),   dloss/dz = (softmax(z) - softmax(z_teacher)) / N

The gradient is found with the loss, in chunks of tokens, so beside the student's logits there is one tensor of their
size, whatever the vocabulary. Figures are those of `divergence`: differences of shifted logits, scalars in float64.
"""

from typing import Any

import torch
from torch import Tensor

from blockscale.algorithms.divergence import CHUNK_ELEMENTS, log_sum, shifted
from blockscale.errors import ModelError


class _MeanDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor) -> Tensor:
        gradient = torch.empty_like(student) if ctx.needs_input_grad[0] else None
        loss = _accumulate(student, teacher, gradient)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None


def mean_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """fp32 0-d, nats a token. Logits [N, V], any float dtype; gradients reach `student`. ModelError for two
    vocabularies."""
    if student.shape != teacher.shape:
        raise ModelError(
            f"the model gives logits {list(student.shape)} and its teacher {list(teacher.shape)}",
            hint="learn from the model that the checkpoint was made from",
        )
    result: Tensor = _MeanDivergence.apply(student, teacher)
    return result


def _accumulate(student: Tensor, teacher: Tensor, gradient: Tensor | None) -> Tensor:
    """The loss; its gradient by the student's logits goes into `gradient`, where there is one."""
    num_tokens, vocabulary = student.shape
    total = torch.zeros((), dtype=torch.float64, device=student.device)
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    for begin in range(0, num_tokens, size):
        rows = slice(begin, begin + size)
        u, u_teacher = shifted(student[rows]), shifted(teacher[rows].to(student.device))
        weights, weights_teacher = u.exp(), u_teacher.exp()
        log_s, log_s_teacher = log_sum(weights), log_sum(weights_teacher)
        # what the teacher rules out adds nothing, even where both logits are -inf
        difference = u_teacher.sub_(u).masked_fill_(weights_teacher == 0, 0.0)
        mean = difference.mul_(weights_teacher).sum(-1).double() / log_s_teacher.exp()
        total += (mean - log_s_teacher + log_s).clamp_(min=0.0).sum()
        if gradient is not None:
            share = weights.mul_(((-log_s).exp() / num_tokens).float().unsqueeze(-1))
            share -= weights_teacher.mul_(((-log_s_teacher).exp() / num_tokens).float().unsqueeze(-1))
            gradient[rows] = share
    return (total / num_tokens).float()
