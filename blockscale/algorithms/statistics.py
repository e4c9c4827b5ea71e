"""What a layer's inputs look like: the sums over calibration tokens that the other algorithms ask for.

For tokens x of weight w (1 unless given), x~ what the quantized model feeds the layer and x what the 16-bit model does:

    second = sum w x~ x~^T / sum w        [K, K]
    cross  = sum w x~ x^T  / sum w        [K, K]
    mean_abs_j = sum w |x~_j| / sum w,    amax_j = max |x~_j|

The Hessian of || (W - Q) X~^T ||^2 with respect to a row of Q is 2 T * second; every use here is blind to that factor.
Batches are added in the order in which they come, so the same batches on the same machine give the same bytes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.errors import FormatError, NonFiniteError, UsageError


@dataclass(frozen=True)
class Moments:
    """Means over `count` tokens; zeros where no token came."""

    count: int
    second: Tensor  # [K, K] fp32, symmetric to the bit: mean of x~ x~^T
    cross: Tensor | None  # [K, K] fp32: mean of x~ x^T
    amax: Tensor  # [K] fp32
    mean_abs: Tensor  # [K] fp32


@dataclass
class MomentSums:
    """The sums so far; `add_moments` changes it in place."""

    count: int  # tokens of positive weight
    total_weight: float
    second: Tensor  # [K, K] fp32
    cross: Tensor | None  # [K, K] fp32, from the first batch that brings a reference
    amax: Tensor  # [K] fp32
    sum_abs: Tensor  # [K] fp32


def new_moments(k: int, device: torch.device | str = "cpu") -> MomentSums:
    """Sums over no token, for inputs of K channels."""
    second = torch.zeros(k, k, device=device)
    return MomentSums(0, 0.0, second, None, torch.zeros(k, device=device), torch.zeros(k, device=device))


def add_moments(
    sums: MomentSums,
    x_quantized: Tensor,
    x_reference: Tensor | None = None,
    *,
    token_weights: Tensor | None = None,
    name: str = "activations",
) -> None:
    """Adds tokens [T, K] of any float dtype (more leading dimensions are tokens too); products and sums are fp32.

    x_reference    the same tokens in the 16-bit model, for `cross`: with every batch or with none
    token_weights  [T], not negative; a token of weight 0 does not count

    NonFiniteError for NaN or Inf, naming `name`: nothing of the batch is added then, so that a caller can skip it.
    """
    k = sums.amax.shape[0]
    x = _tokens(x_quantized, k, name)
    reference = None if x_reference is None else _tokens(x_reference, k, name)
    if reference is not None and len(reference) != len(x):
        raise FormatError(f"{name}: {len(x)} quantized tokens, but {len(reference)} reference tokens")
    if sums.count and (reference is None) != (sums.cross is None):
        raise UsageError(f"{name}: reference inputs must come with every batch or with none")
    if token_weights is not None:
        weights = token_weights.reshape(-1).to(x.device, torch.float32)
        if len(weights) != len(x):
            raise FormatError(f"{name}: {len(weights)} token weights for {len(x)} tokens")
        if not (torch.isfinite(weights) & (weights >= 0)).all():
            raise UsageError(f"{name}: token weights must be finite and not negative")
        kept = weights > 0
        x, weights = x[kept], weights[kept]
        reference = None if reference is None else reference[kept]
    if len(x) == 0:
        return
    magnitude = x.abs()
    amax = magnitude.amax(0)
    is_finite = torch.isfinite(amax).all() & (True if reference is None else torch.isfinite(reference).all())
    if not is_finite:
        raise NonFiniteError(f"{name}: NaN or Inf among {len(x)} tokens", hint="leave this sample out")
    torch.maximum(sums.amax, amax, out=sums.amax)
    weighted = x
    if token_weights is not None:
        weighted = x * weights.unsqueeze(-1)
        magnitude = magnitude.mul_(weights.unsqueeze(-1))
    sums.sum_abs.add_(magnitude.sum(0))
    sums.second.addmm_(weighted.T, x)
    if reference is not None:
        if sums.cross is None:
            sums.cross = torch.zeros_like(sums.second)
        sums.cross.addmm_(weighted.T, reference)
    sums.count += len(x)
    sums.total_weight += len(x) if token_weights is None else weights.double().sum().item()


def _tokens(x: Tensor, k: int, name: str) -> Tensor:
    if x.dim() == 0 or x.shape[-1] != k or not x.is_floating_point():
        raise FormatError(f"{name}: {x.dtype} {list(x.shape)}, expected floats [tokens, {k}]")
    return x.detach().reshape(-1, k).float()


def finish(sums: MomentSums) -> Moments:
    """The means; `sums` stays as it is and can take more tokens."""
    total = sums.total_weight or 1.0
    upper = sums.second.triu()
    second = (upper + upper.triu(1).T).div_(total)
    cross = None if sums.cross is None else sums.cross / total
    return Moments(sums.count, second, cross, sums.amax.clone(), sums.sum_abs / total)


def importance(moments: Moments) -> Tensor:
    """[K] fp32: E[x~_j^2], what an error in column j of the weight costs."""
    return moments.second.diagonal().clone()


def block_hessians(second: Tensor, block_size: int = 16) -> Tensor:
    """[K, K] (or [E, K, K]) -> [K/block, block, block] (or [E, ...]): the blocks on the diagonal, contiguous."""
    k = second.shape[-1]
    if second.dim() < 2 or second.shape[-2] != k or k % block_size:
        raise FormatError(f"no blocks of {block_size} along the diagonal of a matrix {list(second.shape)}")
    blocks = second.unflatten(-2, (-1, block_size)).unflatten(-1, (-1, block_size))  # [.., B, 16, B, 16]
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3).contiguous()
