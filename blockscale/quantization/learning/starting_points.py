"""Where in their cells the weights of a checkpoint lay before they were rounded, as far as the 16-bit model tells.

Smoothing has multiplied rows and columns of the weights it rounded, and left no note of it. A weight Q that was rounded
from diag(r) W diag(c) tells r and c again: each is a ratio of sums over a whole row or column, in which the rounding
errors of hundreds of weights cancel.
"""

import torch
from torch import Tensor

_ROUNDS = 3
_MAX_ERROR = 0.5  # relative: beyond it Q is no rounding of the W that was given


def unrounded_weight(stored: Tensor, source: Tensor) -> Tensor | None:
    """The scaled `source` next to `stored` in least squares; None if it cannot be what `stored` was rounded from.

    Both fp32 [N, K], or [E, N, K] with scales of each expert's own.
    """
    if source.shape != stored.shape:
        return None
    scaled = source
    for _ in range(_ROUNDS):
        for dim in (-2, -1):
            scaled = scaled * _ratio(stored, scaled, dim)
    error, energy = (scaled - stored).square().sum(), stored.square().sum()
    return scaled if error <= _MAX_ERROR**2 * energy else None


def _ratio(stored: Tensor, scaled: Tensor, dim: int) -> Tensor:
    """The multiple of `scaled` next to `stored` in least squares, of each column (dim -2) or row (dim -1)."""
    energy = scaled.square().sum(dim, keepdim=True)
    ratio = (stored * scaled).sum(dim, keepdim=True) / energy
    return torch.where(energy > 0, ratio, torch.ones_like(ratio))
