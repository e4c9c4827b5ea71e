"""Vectors that are stored in 16 bits, such as norms' gains, learned beside codes: fp32 behind, as stored in front.

Adam moves a fp32 copy; the model sees it rounded to the dtype it will be stored in, and the gradient passes through
that rounding. Steps are in units of the vector's root mean square at the start.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_BETAS = (0.9, 0.95)
_EPSILON = 1e-15


@dataclass(frozen=True)
class VectorState:
    """`latent` fp32 and the optimizer are updated in place. `size`: the root mean square at the start."""

    latent: Tensor
    dtype: torch.dtype
    size: float
    optimizer: torch.optim.Adam


def start(vector: Tensor) -> VectorState:
    """Of a vector in the dtype that it is stored in."""
    latent = vector.detach().float().clone()
    optimizer = torch.optim.Adam([latent], betas=_BETAS, eps=_EPSILON, fused=True)
    return VectorState(latent, vector.dtype, latent.square().mean().sqrt().item(), optimizer)


def forward_vector(state: VectorState) -> Tensor:
    """fp32: the vector as stored."""
    return chosen(state).float()


def update(state: VectorState, gradient: Tensor, lr: float) -> None:
    """One step against `gradient` = dloss/dv at `forward_vector`."""
    state.latent.grad = gradient.float()
    state.optimizer.param_groups[0]["lr"] = lr * state.size
    state.optimizer.step()
    state.latent.grad = None


def chosen(state: VectorState) -> Tensor:
    """In the dtype that it is stored in."""
    return state.latent.to(state.dtype, copy=True)
