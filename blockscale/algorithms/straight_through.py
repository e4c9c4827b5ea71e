"""Rounding that gradients pass straight through, so that what lies before it can be learned."""

from typing import Any

import torch
from torch import Tensor


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        ctx.dtype = x.dtype
        return rounded

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (factor,) = ctx.saved_tensors
        return (gradient / factor).to(ctx.dtype), None, None


def straight_through(x: Tensor, rounded: Tensor, factor: Tensor | None = None) -> Tensor:
    """The values of `rounded`, bit for bit, with the gradient of x / factor (default: of x).

    x [...] any float dtype; rounded [...] likewise; factor broadcasts against both. Where no gradient is asked for, it
    is `rounded` itself.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return rounded
    result: Tensor = _StraightThrough.apply(x, rounded, x.new_ones(()) if factor is None else factor)
    return result
