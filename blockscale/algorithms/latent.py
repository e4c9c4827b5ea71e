"""Latent weights: each code follows a fp32 weight behind it, which Adam moves as in quantization-aware training.

For each weight a latent u in units of the starting grid, for each block a multiplier m; s is the block scale at the
start, g the global scale:

    S = e4m3(m s),   z = u s / S,   w = e2m1(z) S g

u begins at the weight's position in the grid, w / (s g), inside the cell of its code at the start, and m at 1, which
gives that code. Rounding has no gradient, so it is passed through. With G = dloss/dw:

    dloss/du = G s g   and   dloss/dm = s sum over the block of G g (e2m1(z) - z)

Unlike AutoRound's offset and FAAR's choice a latent may pass through several cells, and unlike a sign's its step is
small where its gradients disagree.

Source: straight-through latents, Bengio et al. arXiv 1308.3432; learned steps, Esser et al. arXiv 1902.08153; NVFP4
models trained so against a teacher's distribution, NVIDIA, "Quantization-Aware Distillation" (2026).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.algorithms.rounding_cells import place_in_cell
from blockscale.formats.minifloat import encode, round_magnitude
from blockscale.formats.nvfp4 import MIN_BLOCK_SCALE
from blockscale.formats.spec import E2M1, E4M3

_REACH = 7.0  # 6's cell is open at the end: as far beyond it as its inner edge lies below
_MIN_MULTIPLIER, _MAX_MULTIPLIER = 0.5, 2.0
_BETAS = (0.9, 0.95)  # of a few hundred steps
_EPSILON = 1e-15  # a gradient is a mean over all tokens by one of very many weights


@dataclass(frozen=True)
class LatentState:
    """One weight's parameters. `latent`, `multiplier` and the optimizer are updated in place."""

    block_scale: Tensor  # fp32 [..., B, 1], at the start
    global_scale: Tensor  # fp32, broadcasts against block_scale
    latent: Tensor  # u, fp32 [..., B, 16]
    multiplier: Tensor  # m, fp32 [..., B, 1]
    optimizer: torch.optim.Adam  # of u, then m


def start(weight: Tensor, codes: Tensor, block_scale: Tensor, global_scale: Tensor) -> LatentState:
    """Of blocks: weight fp32 and codes uint8 [..., B, 16], block_scale fp32 [..., B, 1]."""
    latent = place_in_cell(weight / (block_scale * global_scale), codes).clamp_(-_REACH, _REACH)
    multiplier = torch.ones_like(block_scale)
    groups = [{"params": [latent]}, {"params": [multiplier]}]
    optimizer = torch.optim.Adam(groups, betas=_BETAS, eps=_EPSILON, fused=True)
    return LatentState(block_scale, global_scale, latent, multiplier, optimizer)


def forward_weight(state: LatentState, progress: float) -> Tensor:
    """fp32 [..., B, 16]: the weight as decoded."""
    scale, moved = _moved(state)
    rounded = round_magnitude(moved.abs(), E2M1).copysign_(moved)
    return rounded.mul_(scale).mul_(state.global_scale)


def update(state: LatentState, gradient: Tensor, lr: float, scale_lr: float, progress: float) -> None:
    """One step against `gradient` = dloss/dw [..., B, 16] at `forward_weight`."""
    step = state.block_scale * state.global_scale
    state.multiplier.grad = None
    if scale_lr:
        _, moved = _moved(state)
        error = round_magnitude(moved.abs(), E2M1).copysign_(moved).sub_(moved)
        state.multiplier.grad = error.mul_(gradient).sum(-1, keepdim=True).mul_(step)
    state.latent.grad = gradient * step
    for group, rate in zip(state.optimizer.param_groups, (lr, scale_lr), strict=True):
        group["lr"] = rate
    state.optimizer.step()
    state.latent.grad = None
    state.latent.clamp_(-_REACH, _REACH)
    state.multiplier.clamp_(_MIN_MULTIPLIER, _MAX_MULTIPLIER)


def chosen(state: LatentState) -> tuple[Tensor, Tensor]:
    """(codes uint8 [..., B, 16], block_scale fp32 [..., B, 1])."""
    scale, moved = _moved(state)
    return encode(moved, E2M1), scale


def _moved(state: LatentState) -> tuple[Tensor, Tensor]:
    """(S, z)."""
    scale = (state.block_scale * state.multiplier).clamp_(MIN_BLOCK_SCALE, E4M3.max)
    scale = scale.to(torch.float8_e4m3fn).float()
    return scale, state.latent * (state.block_scale / scale)
