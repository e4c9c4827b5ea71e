"""The global scale by least squares.

With the codes' levels v and the block scales s held, the error sum h (W - v s g)^2 is a parabola in the global scale g:

    g* = <W, v s>_h / <v s, v s>_h          <a, b>_h = sum h a b

Block scales and codes are then searched again for g*, and so on. Source: MR-GPTQ (arXiv 2509.23202) alternates the two
levels of scales on a grid; the closed form is plain least squares.
"""

import torch
from torch import Tensor

from blockscale.algorithms.scale_sweep import best_block_scale
from blockscale.formats.nvfp4 import block_amax, decode_unscaled, encode_packed
from blockscale.formats.spec import E2M1, E4M3


def refine_global_scale(
    x: Tensor,
    global_scale: Tensor,
    importance: Tensor | None = None,
    rounds: int = 3,
    block_size: int = 16,
) -> tuple[Tensor, Tensor]:
    """(global_scale fp32 0-d, block_scale float8_e4m3fn [..., K/block]) for x [..., K], at most `rounds` alternations.

    Weights that share a global scale go in together, one below the other. `importance` as in `best_block_scale`, though
    here its size counts from block to block too. The error is no larger than that of the scale given with its sweep;
    the result never falls so low that the largest block's amax scale leaves E4M3.
    """
    weights = torch.ones((), device=x.device) if importance is None else importance.to(x.device, torch.float32)
    if not (weights > 0).any():
        weights = torch.ones((), device=x.device)
    weights = weights / weights.amax()
    amax = block_amax(x, block_size).amax().float()
    floor = torch.minimum(amax / torch.full_like(amax, E2M1.max * E4M3.max), global_scale)
    unit = global_scale  # all sums in units of the scale given, or squares of extreme weights would leave the range
    values = x.float() / unit

    def solve(scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(block scales, error, next global scale) under `scale`."""
        block_scale = best_block_scale(x, scale, block_size, importance)
        levels = decode_unscaled(encode_packed(x, block_scale, scale), block_scale)
        power = (levels.square() * weights).sum(dtype=torch.float64)
        error = ((levels * (scale / unit) - values).square_() * weights).sum(dtype=torch.float64)
        wanted = (levels * values * weights).sum(dtype=torch.float64) / power * unit
        is_usable = torch.isfinite(wanted) & (wanted > 0)
        return block_scale, error, torch.where(is_usable, torch.maximum(wanted.float(), floor), scale)

    best_scale = global_scale
    best_block, best_error, candidate = solve(global_scale)
    for _ in range(rounds):
        block_scale, error, following = solve(candidate)
        if not error < best_error:
            break
        best_scale, best_block, best_error, candidate = candidate, block_scale, error, following
    return best_scale, best_block
