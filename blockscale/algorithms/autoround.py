"""AutoRound: rounding offsets and block scales learned by the sign of their gradients.

For each weight an offset V in [-1/2, 1/2] of the local step of E2M1's grid, for each block a multiplier m:

    S = e4m3(m s),   z = p s / S + V step(p s / S),   w = e2m1(z) S g

with s the scale at the start, g the global scale and p the weight's position in its grid, w / (s g), inside the cell of
its code at the start. V = 0 and m = 1 give that code. Rounding has no gradient, so it is passed through (straight
through), except where z saturates. With G = dloss/dw:

    dloss/dV = G S g step   and   dloss/dS = sum over the block of G g (e2m1(z) - p s / S)     (G g 6 where z saturates)

Each step moves V and m by their learning rates against the sign.

Source: Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent", arXiv 2309.05516; intel/auto-round.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.algorithms.rounding_cells import local_step, place_in_cell
from blockscale.formats.minifloat import encode, round_magnitude
from blockscale.formats.nvfp4 import MIN_BLOCK_SCALE
from blockscale.formats.spec import E2M1, E4M3

_REACH = 0.5
_MIN_MULTIPLIER, _MAX_MULTIPLIER = 0.5, 2.0


@dataclass(frozen=True)
class AutoRoundState:
    """One weight's parameters. `offset` and `multiplier` are updated in place."""

    position: Tensor  # fp32 [..., B, 16], in units of the starting grid
    block_scale: Tensor  # fp32 [..., B, 1], at the start
    global_scale: Tensor  # fp32, broadcasts against block_scale
    offset: Tensor  # V, fp32 [..., B, 16]
    multiplier: Tensor  # m, fp32 [..., B, 1]


def start(weight: Tensor, codes: Tensor, block_scale: Tensor, global_scale: Tensor) -> AutoRoundState:
    """Of blocks: weight fp32 and codes uint8 [..., B, 16], block_scale fp32 [..., B, 1]."""
    position = place_in_cell(weight / (block_scale * global_scale), codes)
    return AutoRoundState(position, block_scale, global_scale, torch.zeros_like(position), torch.ones_like(block_scale))


def forward_weight(state: AutoRoundState, progress: float) -> Tensor:
    """fp32 [..., B, 16]: the weight as decoded."""
    scale, _, moved = _moved(state)
    rounded = round_magnitude(moved.abs(), E2M1).copysign_(moved)
    return rounded.mul_(scale).mul_(state.global_scale)


def update(state: AutoRoundState, gradient: Tensor, lr: float, scale_lr: float, progress: float) -> None:
    """One step against `gradient` = dloss/dw [..., B, 16] at `forward_weight`."""
    _, base, moved = _moved(state)
    is_inside = moved.abs() <= E2M1.max
    if scale_lr:
        rounded = round_magnitude(moved.abs(), E2M1).copysign_(moved)
        slope = torch.where(is_inside, rounded - base, rounded).mul_(gradient).sum(-1, keepdim=True)
        state.multiplier.sub_(slope.sign_(), alpha=scale_lr).clamp_(_MIN_MULTIPLIER, _MAX_MULTIPLIER)
    direction = torch.where(is_inside, gradient, 0.0).sign_()
    state.offset.sub_(direction, alpha=lr).clamp_(-_REACH, _REACH)


def chosen(state: AutoRoundState) -> tuple[Tensor, Tensor]:
    """(codes uint8 [..., B, 16], block_scale fp32 [..., B, 1])."""
    scale, _, moved = _moved(state)
    return encode(moved, E2M1), scale


def _moved(state: AutoRoundState) -> tuple[Tensor, Tensor, Tensor]:
    """(S, p s / S, z)."""
    scale = (state.block_scale * state.multiplier).clamp_(MIN_BLOCK_SCALE, E4M3.max)
    scale = scale.to(torch.float8_e4m3fn).float()
    base = state.position * (state.block_scale / scale)
    return scale, base, torch.addcmul(base, state.offset, local_step(base))
