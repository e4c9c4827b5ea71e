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
    rows = torch.ones((), device=stored.device)
    for _ in range(_ROUNDS):  # each in units of the other, so that a large row does not outweigh the rest of a column
        columns = _ratio(stored / rows, source, -2)
        rows = _ratio(stored / columns, source, -1)
    scaled = source * rows * columns
    error, energy = (scaled - stored).square().sum(), stored.square().sum()
    return scaled if error <= _MAX_ERROR**2 * energy else None


def _ratio(stored: Tensor, source: Tensor, dim: int) -> Tensor:
    """The multiple of `source` next to `stored` in least squares, of each column (dim -2) or row (dim -1); 1 where
    there is none."""
    ratio = (stored * source).sum(dim, keepdim=True) / source.square().sum(dim, keepdim=True)
    return torch.where(torch.isfinite(ratio) & (ratio != 0), ratio, torch.ones_like(ratio))
