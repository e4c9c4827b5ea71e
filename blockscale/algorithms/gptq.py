"""GPTQ: round a weight column by column, and let the columns not yet rounded make up for each error.

Minimises tr((W - Q) H (W - Q)^T) greedily. With H = M M^T, M upper triangular, that is

    sum_j M_jj^2 |t_j - q_j|^2,    t_j = w_j + sum_{i<j} (w_i - q_i) M_ij / M_jj

so column j is rounded at t_j. These are the numbers of the usual formulation through the Cholesky factor of H^-1,
without the inverse. Block scales are fixed beforehand on the original weight, so columns may be taken in any order: the
ones with the largest H_jj first (static activation order), which costs nothing when the weight is used.

Sources: Frantar et al., "GPTQ", arXiv 2210.17323; the triangular form: Chen et al., "The Geometry of LLM Quantization",
arXiv 2507.18553; the corrected target: Zhang et al., "Qronos", arXiv 2505.11695, in one step.
"""

import torch
from torch import Tensor

from blockscale.algorithms.column_rounding import round_columns
from blockscale.algorithms.damping import damped_cholesky, prepare_hessian
from blockscale.algorithms.statistics import Moments
from blockscale.errors import FormatError, NonFiniteError, UsageError
from blockscale.formats.spec import NVFP4


def gptq(
    weight: Tensor,
    hessian: Tensor,
    block_scale: Tensor,
    global_scale: Tensor,
    *,
    damp: float = 0.01,
    act_order: bool = True,
    block: int = 128,
    name: str = "weight",
) -> Tensor:
    """Codes, uint8 [N, K], for `formats.packing.pack_nibbles`; decoded with the same scales they are GPTQ's values.

    weight        [N, K] of any float dtype, or a stack [E, N, K] (then everything else but damp is stacked too)
    hessian       [K, K]: mean of x x^T over the inputs as the quantized model has them, times any positive factor
    block_scale   float8_e4m3fn [N, K/16]
    global_scale  fp32 0-d multiplier, or [E]
    damp          times the mean of the live diagonal, added to it; tenfold after a failed factorisation, up to 4 times
    block         columns rounded one by one before a matrix product carries their errors on: a power of two

    Takes three fp32 copies of the weight and four float64 ones of the Hessian: cut a large stack into parts.
    Dead channels (H_jj = 0) are rounded to nearest and their errors move nothing. What passes 6 * scale saturates.
    FormatError for shapes that do not fit, NonFiniteError for NaN or Inf, UsageError if the Hessian cannot be factored.
    """
    check_scaled(weight, block_scale, name)
    if block < 1 or block & (block - 1):
        raise UsageError(f"{name}: blocks of {block} columns", hint="give a power of two")
    matrix, is_live = prepare_hessian(hessian, weight.shape[-1], name)
    if act_order:
        order = matrix.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=True, stable=True)  # [E, K]
    else:
        order = torch.arange(weight.shape[-1], device=weight.device).expand(len(matrix), -1)
    matrix = take_rows(take_rows(matrix, order).mT, order)
    factor, _ = damped_cholesky(matrix.flip(-1, -2), is_live.gather(-1, order).flip(-1), damp, name)
    upper = factor.flip(-1, -2)  # M: the reversed factor of the reversed matrix
    coefficients = (upper / upper.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)).float()

    stack = as_stack(weight)
    references = take_rows(stack.float().mT, order)
    scales = take_rows(as_stack(block_scale).view(torch.uint8).mT, order // NVFP4.block_size)
    scale = as_scales(global_scale, weight)
    codes, _ = round_columns(
        references.clone(), references, coefficients, scales.view(torch.float8_e4m3fn), scale, block
    )
    return take_rows(codes, order.argsort(-1)).mT.reshape(weight.shape)


def corrected_target(
    weight: Tensor, moments: Moments, strength: float = 1.0, damp: float = 0.01, *, name: str = "weight"
) -> Tensor:
    """W + strength * (W* - W), fp32 [N, K]: what to quantize so that earlier layers' errors are made up for.

    W* minimises || X W^T - X~ Q^T ||^2 / T + lam || Q - W ||^2, X the inputs of the 16-bit model, X~ of the quantized:

        W* = W + W (C^T - H) (H + lam I)^-1,    H = mean x~ x~^T,  C = mean x~ x^T,  lam = damp * mean diag H

    which is W C^T H^-1 for lam = 0; damping pulls towards W, so equal inputs and dead channels change nothing.
    Full strength fits the calibration text closely and can hurt on others: blend, or damp more.
    """
    if moments.cross is None:
        raise UsageError(f"{name}: a corrected target needs inputs of the 16-bit model beside the quantized one's")
    if not 0 <= strength <= 1:
        raise UsageError(f"{name}: a strength of {strength}", hint="from 0 (no correction) to 1")
    hessian, is_live = prepare_hessian(moments.second, weight.shape[-1], name)
    cross = moments.cross.double()
    if not torch.isfinite(cross.sum()):
        raise NonFiniteError(f"{name}: NaN or Inf in the cross moments", hint="leave the samples out that cause it")
    factor, _ = damped_cholesky(hessian, is_live, damp, name)
    difference = (cross.mT - hessian[0]) * is_live  # columns of dead channels: no change
    change = torch.cholesky_solve((weight.double() @ difference).mT, factor[0]).mT
    return (weight.double() + strength * change).float()


def check_scaled(weight: Tensor, block_scale: Tensor, name: str) -> None:
    """FormatError unless the scales fit the weight [N, K] or [E, N, K]; NonFiniteError for NaN or Inf in the weight."""
    wanted = (*weight.shape[:-1], weight.shape[-1] // NVFP4.block_size)
    if weight.dim() not in (2, 3) or weight.numel() == 0 or weight.shape[-1] % NVFP4.block_size:
        raise FormatError(f"{name}: {list(weight.shape)} is no weight [N, K] with K a multiple of {NVFP4.block_size}")
    if block_scale.dtype != torch.float8_e4m3fn or tuple(block_scale.shape) != wanted:
        raise FormatError(
            f"{name}: block scales {block_scale.dtype} {list(block_scale.shape)}, expected E4M3 {list(wanted)}"
        )
    if not torch.isfinite(weight.abs().amax()):
        raise NonFiniteError(f"{name}: NaN or Inf in the weight")


def as_stack(x: Tensor) -> Tensor:
    """[N, K] -> [1, N, K]; a stack stays."""
    return x.detach().unsqueeze(0) if x.dim() == 2 else x.detach()


def as_scales(global_scale: Tensor, weight: Tensor) -> Tensor:
    """fp32 [1, 1] or [E, 1] on the weight's device."""
    return global_scale.to(weight.device, torch.float32).reshape(-1, 1)


def take_rows(x: Tensor, order: Tensor) -> Tensor:
    """x [E, J, N], order int64 [E, K] -> contiguous [E, K, N] of x[e, order[e, k], n]."""
    if len(x) == 1:
        return x[0].index_select(0, order[0]).unsqueeze(0)
    return torch.stack([part.index_select(0, rows) for part, rows in zip(x, order, strict=True)])
