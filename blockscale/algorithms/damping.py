"""Hessians made fit for a Cholesky factorisation: dead channels set apart, the diagonal damped, more where it fails."""

import math

import torch
from torch import Tensor

from blockscale.errors import FormatError, NonFiniteError, UsageError

_RETRIES = 4
_NOISE = 2.0**-24  # what rounding to fp32 does to a diagonal element, relatively
_FIRST_DAMP = 1e-4  # after a damping of 0 has failed


def prepare_hessian(hessian: Tensor, columns: int, name: str) -> tuple[Tensor, Tensor]:
    """(float64 [E, K, K] symmetric with dead rows and columns zeroed, bool [E, K] which channels live).

    `hessian` [K, K] or [E, K, K] of any float dtype. A channel whose diagonal is not positive is dead.
    FormatError for another shape, NonFiniteError for NaN or Inf.
    """
    if hessian.dim() not in (2, 3) or hessian.shape[-1] != columns or hessian.shape[-2] != columns:
        raise FormatError(f"{name}: a Hessian {list(hessian.shape)} for {columns} input channels")
    matrix = hessian.double().reshape(-1, columns, columns)
    if not torch.isfinite(matrix.sum()):  # a sum of finite fp32 numbers stays inside float64
        raise NonFiniteError(f"{name}: NaN or Inf in the Hessian", hint="leave the samples out that cause it")
    matrix = (matrix + matrix.mT).mul_(0.5)
    is_live = matrix.diagonal(dim1=-2, dim2=-1) > 0
    return matrix.mul_(is_live.unsqueeze(-1)).mul_(is_live.unsqueeze(-2)), is_live


def mean_diagonal(matrix: Tensor, is_live: Tensor) -> Tensor:
    """float64 [E]: over the live channels; 0 where there is none."""
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1) / is_live.sum(-1).clamp(min=1)


def check_damp(damp: float, name: str) -> None:
    """UsageError unless `damp` is finite and not negative."""
    if not 0 <= damp < math.inf:
        raise UsageError(f"{name}: a damping of {damp}", hint="give a number from 0 up, usually 0.01")


def damped_cholesky(matrix: Tensor, is_live: Tensor, damp: float, name: str) -> tuple[Tensor, Tensor]:
    """(L, lam): lower factors, float64 [E, K, K], of matrix + lam I on live channels and 1 on dead ones; lam [E].

    lam = damp * mean of the live diagonal. Where the factorisation fails, damp grows tenfold, up to 4 times; then
    UsageError naming `name`. The arguments are `prepare_hessian`'s results.
    """
    check_damp(damp, name)
    diagonal, mean = matrix.diagonal(dim1=-2, dim2=-1), mean_diagonal(matrix, is_live)
    damps = torch.full_like(mean, damp)
    for attempt in range(_RETRIES + 1):
        lam = damps * mean
        damped = matrix.clone()
        damped.diagonal(dim1=-2, dim2=-1).copy_(torch.where(is_live, diagonal + lam.unsqueeze(-1), 1.0))
        factor, info = torch.linalg.cholesky_ex(damped)
        pivots = factor.diagonal(dim1=-2, dim2=-1).square()
        is_noise = pivots <= _NOISE * damped.diagonal(dim1=-2, dim2=-1)  # coefficients would be noise over noise
        has_failed = (info != 0) | is_noise.any(-1)
        if not has_failed.any():
            return factor, lam
        if attempt < _RETRIES:
            damps = torch.where(has_failed, (damps * 10).clamp(min=_FIRST_DAMP), damps)
    last = damps[has_failed].max().item()
    raise UsageError(
        f"{name}: the Hessian is not positive definite, not even damped by {last:g} of its mean diagonal",
        hint="it is no mean of x x^T; collect the statistics again",
    )
