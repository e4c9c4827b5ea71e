"""FAAR: a choice between the two levels around each weight, softened by a sigmoid that sharpens as it learns.

For each weight v in [0, 1], for each block a multiplier m; lo and hi are the magnitudes of E2M1 around the weight's
position p = w / (s g) (inside the cell of its code at the start), s the block scale at the start, g the global scale:

    S = e4m3(m s),   w = sign(p) S g (lo + sigmoid(b (v - 1/2)) (hi - lo)),   b grows from 4 to 40

v begins as p's place between lo and hi, where the sigmoid of slope 1 gives about the weight itself; v > 1/2 means hi,
so the codes at the start come back. Trained by Adam on the loss and a pull of v towards 0 and 1: the gradient of
c (1 - (2v - 1)^2), c a tenth of the mean size over the tensor of the loss's own gradient by v.

Source: "FAAR: Format-Aware Adaptive Rounding for NVFP4", arXiv 2603.22370.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.algorithms.rounding_cells import levels, lower_level, place_in_cell, signed_code
from blockscale.formats.nvfp4 import MIN_BLOCK_SCALE
from blockscale.formats.spec import E4M3

_FIRST_SHARPNESS, _LAST_SHARPNESS = 4.0, 40.0
_PULL = 0.1
_EPSILON = 1e-15  # a gradient is a mean over all tokens by one of very many weights
_MIN_MULTIPLIER, _MAX_MULTIPLIER = 0.5, 2.0


@dataclass(frozen=True)
class FaarState:
    """One weight's parameters. `choice`, `multiplier` and the optimizer are updated in place."""

    position: Tensor  # fp32 [..., B, 16], in units of the starting grid: its sign, and where lo and hi lie
    lower: Tensor  # int32 [..., B, 16]: index of lo
    block_scale: Tensor  # fp32 [..., B, 1], at the start
    global_scale: Tensor  # fp32, broadcasts against block_scale
    choice: Tensor  # v, fp32 [..., B, 16]
    multiplier: Tensor  # m, fp32 [..., B, 1]
    optimizer: torch.optim.Adam


def start(weight: Tensor, codes: Tensor, block_scale: Tensor, global_scale: Tensor) -> FaarState:
    """Of blocks: weight fp32 and codes uint8 [..., B, 16], block_scale fp32 [..., B, 1]."""
    position = place_in_cell(weight / (block_scale * global_scale), codes) + 0.0  # no -0: its code is 0's
    lower = lower_level(position)
    low, gap = _levels_around(lower)
    choice = (position.abs() - low).div_(gap).clamp_(0, 1)
    multiplier = torch.ones_like(block_scale)
    groups = [{"params": [choice]}, {"params": [multiplier]}]
    optimizer = torch.optim.Adam(groups, eps=_EPSILON, foreach=False)
    return FaarState(position, lower, block_scale, global_scale, choice, multiplier, optimizer)


def forward_weight(state: FaarState, progress: float) -> Tensor:
    """fp32 [..., B, 16]: the softened weight; `progress` from 0 to 1 sharpens it."""
    low, gap = _levels_around(state.lower)
    soft = torch.sigmoid(_sharpness(progress) * (state.choice - 0.5))
    return torch.addcmul(low, soft, gap).copysign_(state.position).mul_(_scale(state)).mul_(state.global_scale)


def update(state: FaarState, gradient: Tensor, lr: float, scale_lr: float, progress: float) -> None:
    """One step against `gradient` = dloss/dw [..., B, 16] at `forward_weight`."""
    low, gap = _levels_around(state.lower)
    sharpness = _sharpness(progress)
    soft = torch.sigmoid(sharpness * (state.choice - 0.5))
    along = torch.copysign(gradient, gradient * state.position)  # dloss/d|w|
    slope = along * _scale(state) * state.global_scale * gap * (sharpness * soft * (1 - soft))
    pull = 4 * (1 - 2 * state.choice)
    slope += pull.mul_(_PULL * slope.abs().mean())
    state.choice.grad = slope
    if scale_lr:
        state.multiplier.grad = (
            torch.addcmul(low, soft, gap).mul_(along).sum(-1, keepdim=True).mul_(state.block_scale * state.global_scale)
        )
    for group, rate in zip(state.optimizer.param_groups, (lr, scale_lr), strict=True):
        group["lr"] = rate
    state.optimizer.step()
    state.choice.grad = state.multiplier.grad = None
    state.choice.clamp_(0, 1)
    state.multiplier.clamp_(_MIN_MULTIPLIER, _MAX_MULTIPLIER)


def chosen(state: FaarState) -> tuple[Tensor, Tensor]:
    """(codes uint8 [..., B, 16], block_scale fp32 [..., B, 1])."""
    index = state.lower + (state.choice > 0.5)
    return signed_code(index, state.position), _scale(state)


def _levels_around(lower: Tensor) -> tuple[Tensor, Tensor]:
    """(lo, hi - lo), fp32."""
    table = levels(lower.device)
    return table[lower], table.diff()[lower]


def _scale(state: FaarState) -> Tensor:
    scale = (state.block_scale * state.multiplier).clamp_(MIN_BLOCK_SCALE, E4M3.max)
    return scale.to(torch.float8_e4m3fn).float()


def _sharpness(progress: float) -> float:
    return _FIRST_SHARPNESS * (_LAST_SHARPNESS / _FIRST_SHARPNESS) ** progress
