"""A low-rank branch in 16 bits beside the 4-bit weight: it carries what rounding handles worst.

    y = q(x) q(W - U D)^T + (x D^T) U^T      U [N, r], D [r, K]

Minimised is what the layer's output loses on average, with H = E[x x^T] (the identity where not given), and, where the
inputs are rounded too, with E = E[e e^T] of their errors e, taken as uncorrelated with x:

    tr((W - U D - Q) H (W - U D - Q)^T) + tr(Q E Q^T),   Q = q(W - U D)

U D and Q are found in turns. For a fixed Q the first term is least for U D = svd_r((W - Q) S) S^-1, S S^T = H: the
Frobenius norm of a difference times S is that term, and multiplying by S loses no rank. S comes from H's eigenvalues,
none below `damp` of their mean, in float64. The factors are rounded to their 16 bits before the rest is taken, so what
they lose goes into Q. The best turn is kept, and no branch at all (Q = q(W)) is one of them.

Source: Li et al., "SVDQuant", arXiv 2411.05007 (the branch, H = 1); Li et al., "LoftQ", arXiv 2310.08659 (turns).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.errors import FormatError, NonFiniteError


@dataclass(frozen=True)
class LowRankBranch:
    """W ~= up @ down + quantized.

    up, down        [N, r], [r, K] of the dtype asked for; r = 0 where no branch was better
    residual        fp32 [N, K] = W - up @ down: what was given to `quantize`
    quantized       fp32 [N, K] = quantize(residual)
    loss            the objective
    baseline_loss   the objective without a branch
    """

    up: Tensor
    down: Tensor
    residual: Tensor
    quantized: Tensor
    loss: float
    baseline_loss: float


def low_rank_branch(
    weight: Tensor,
    rank: int,
    quantize: Callable[[Tensor], Tensor],
    iterations: int = 3,
    *,
    second: Tensor | None = None,
    input_error: Tensor | None = None,
    damp: float = 0.01,
    dtype: torch.dtype = torch.bfloat16,
) -> LowRankBranch:
    """The branch of `rank` for a weight [N, K].

    quantize      fp32 [N, K] -> the same as decoded
    iterations    turns: one is SVDQuant's own
    second        [K, K] = E[x x^T] of the inputs: weighs the error as the output sees it
    input_error   [K, K] = E[e e^T] of the inputs' rounding errors, where they are rounded
    dtype         of the factors

    FormatError for a rank past min(N, K) or moments of another shape; NonFiniteError for NaN or Inf.
    """
    _check(weight, rank, second, input_error)
    source = weight.double()
    n, k = source.shape
    root, inverse = (None, None) if second is None else _roots(second.double(), damp)

    def turn(up: Tensor, down: Tensor) -> LowRankBranch:
        rest = source - up.double() @ down.double()
        residual = rest.float()
        quantized = quantize(residual).float()
        loss = _energy(rest - quantized.double(), second)
        if input_error is not None:
            loss += _energy(quantized.double(), input_error)
        return LowRankBranch(up, down, residual, quantized, loss, loss)

    best = turn(source.new_zeros(n, 0).to(dtype), source.new_zeros(0, k).to(dtype))
    baseline = best.loss
    target = source  # of the branch: the weight less what is quantized
    for _ in range(iterations if rank else 0):
        u, s, vh = torch.linalg.svd(target if root is None else target @ root, full_matrices=False)
        balance = s[:rank].sqrt()
        down = balance.unsqueeze(1) * vh[:rank]
        down = down if inverse is None else down @ inverse
        found = turn((u[:, :rank] * balance).to(dtype), down.to(dtype))
        if found.loss < best.loss:
            best = found
        target = source - found.quantized.double()
    return LowRankBranch(best.up, best.down, best.residual, best.quantized, best.loss, baseline)


def _roots(second: Tensor, damp: float) -> tuple[Tensor, Tensor]:
    """Symmetric square root of H and its inverse, float64 [K, K]; small and negative eigenvalues are raised."""
    values, vectors = torch.linalg.eigh((second + second.T) / 2)
    mean = values.mean()
    floor = damp * mean if mean > 0 else torch.ones_like(mean)  # no input at all: as without H
    root = values.clamp(min=floor).sqrt()
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T


def _energy(matrix: Tensor, second: Tensor | None) -> float:
    """tr(M H M^T) for M float64 [N, K]."""
    weighted = matrix if second is None else matrix @ second.double()
    return torch.sum(weighted * matrix).item()


def _check(weight: Tensor, rank: int, second: Tensor | None, input_error: Tensor | None) -> None:
    if weight.dim() != 2 or not 0 <= rank <= min(weight.shape):
        raise FormatError(
            f"a low-rank branch of rank {rank} does not fit a weight of shape {list(weight.shape)}",
            hint="a rank from 0 to min(N, K) of a weight [N, K]",
        )
    k = weight.shape[1]
    for name, moment in (("second moment", second), ("input error", input_error)):
        if moment is not None and moment.shape != (k, k):
            raise FormatError(f"low-rank branch: {name} of shape {list(moment.shape)}, not [{k}, {k}]")
    tensors = [t for t in (weight, second, input_error) if t is not None]
    if not all(torch.isfinite(t).all() for t in tensors):
        raise NonFiniteError(
            "low-rank branch: the weight or its input's moments hold NaN or Inf",
            hint="a layer before this one overflows, or the source checkpoint is damaged",
        )
