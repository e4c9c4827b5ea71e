"""Coordinate descent on codes and block scales: goes on where GPTQ's one greedy pass ends, from any start.

The error of a row is a quadratic in the weight's quantized values,

    f(q) = d H d^T,   d = w - q,   G = d H

so with all else held, one value's best place is the level nearest to q_j + G_j / H_jj; and the best scale of block b,
whose values are v s g (levels v, global scale g), is the E4M3 number nearest to s + <v g, G_b> / <v g, v g H_bb>, since
a parabola's best point on a grid is the nearest one. Neither step can raise f. A sweep over the columns is
`round_columns` with targets q + G / H_jj and coefficients H_ij / H_jj: it costs what GPTQ does, and one product for G.

Source: Behdin et al., "QuantEase", arXiv 2309.01885, for the codes; the scale step is the same idea, derived here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.algorithms.column_rounding import earlier_and_later, round_columns
from blockscale.algorithms.damping import check_damp, mean_diagonal, prepare_hessian
from blockscale.algorithms.gptq import as_scales, as_stack, check_scaled
from blockscale.errors import FormatError
from blockscale.formats.minifloat import decode_table
from blockscale.formats.nvfp4 import MIN_BLOCK_SCALE
from blockscale.formats.spec import E2M1, E4M3, NVFP4

_LEAF = 128
_BLOCK = NVFP4.block_size
_SLICE = 1 << 22  # elements in float64 at a time


@dataclass(frozen=True)
class _Problem:
    """What stays fixed, transposed as in `round_columns`."""

    weight: Tensor  # fp32 [E, K, N]
    hessian: Tensor  # fp32 [E, K, K], dead rows and columns zero
    is_live: Tensor  # bool [E, K]
    global_scale: Tensor  # fp32 [1 or E, 1, 1]

    @property
    def diagonal(self) -> Tensor:
        """fp32 [E, K, 1], 1 where a channel is dead."""
        return torch.where(self.is_live, self.hessian.diagonal(dim1=-2, dim2=-1), 1.0).unsqueeze(-1)


@dataclass(frozen=True)
class _Point:
    """What is searched for, transposed likewise."""

    codes: Tensor  # uint8 [E, K, N]
    block_scale: Tensor  # float8_e4m3fn [E, K/16, N]

    @property
    def scale_bytes(self) -> Tensor:
        """uint8 [E, K/16, N]."""
        return self.block_scale.view(torch.uint8)

    def expanded_scale(self) -> Tensor:
        """float8_e4m3fn [E, K, N]."""
        return self.scale_bytes.repeat_interleave(_BLOCK, 1).view(torch.float8_e4m3fn)


def coordinate_descent(
    weight: Tensor,
    hessian: Tensor,
    codes: Tensor,
    block_scale: Tensor,
    global_scale: Tensor,
    *,
    sweeps: int = 4,
    damp: float = 0.0,
    name: str = "weight",
) -> Tensor:
    """Codes uint8 [N, K] from which no row has a larger error than from the ones given; at most `sweeps` sweeps.

    weight        [N, K] of any float dtype, or a stack [E, N, K] (then all else is stacked too)
    hessian       [K, K], as for GPTQ; it need not be positive definite. damp * mean diagonal is added to the diagonal
    codes         uint8 [N, K], GPTQ's or rounded to nearest
    block_scale   float8_e4m3fn [N, K/16]
    global_scale  fp32 0-d multiplier, or [E]

    Dead channels are rounded to nearest. FormatError for shapes that do not fit, NonFiniteError for NaN or Inf.
    """
    problem, point = _problem(weight, hessian, codes, block_scale, global_scale, damp, name)
    return _swept(problem, point, _sweep_codes, sweeps).codes.mT.reshape(weight.shape)


def refit_scales(
    weight: Tensor,
    hessian: Tensor,
    codes: Tensor,
    block_scale: Tensor,
    global_scale: Tensor,
    *,
    sweeps: int = 1,
    damp: float = 0.0,
    name: str = "weight",
) -> Tensor:
    """Block scales float8_e4m3fn [N, K/16] for fixed codes, each the best given all others; no row gets worse.

    Arguments as for `coordinate_descent`. A block whose levels are all zero keeps its scale.
    """
    problem, point = _problem(weight, hessian, codes, block_scale, global_scale, damp, name)
    return _swept(problem, point, _sweep_scales, sweeps).block_scale.mT.reshape(block_scale.shape)


def refine_codes_and_scales(
    weight: Tensor,
    hessian: Tensor,
    codes: Tensor,
    block_scale: Tensor,
    global_scale: Tensor,
    *,
    rounds: int = 4,
    damp: float = 0.0,
    name: str = "weight",
) -> tuple[Tensor, Tensor]:
    """(codes, block_scale): a sweep over the scales and one over the codes, in turn, until neither moves.

    Arguments as for `coordinate_descent`. No round raises any row's error.
    """
    problem, point = _problem(weight, hessian, codes, block_scale, global_scale, damp, name)
    error = _errors(problem, point)
    for _ in range(rounds):
        moved, has_new_scales = _sweep_scales(problem, point)
        moved, has_new_codes = _sweep_codes(problem, moved)
        if not (has_new_scales or has_new_codes):
            break
        point, error = _better(problem, point, error, moved)
    return point.codes.mT.reshape(weight.shape), point.block_scale.mT.reshape(block_scale.shape)


def quadratic_error(
    weight: Tensor,
    hessian: Tensor,
    codes: Tensor,
    block_scale: Tensor,
    global_scale: Tensor,
    *,
    damp: float = 0.0,
    name: str = "weight",
) -> Tensor:
    """float64 [N] (or [E, N]): each row's f; the whole is tr((W - Q) H (W - Q)^T). Dead channels count nothing."""
    problem, point = _problem(weight, hessian, codes, block_scale, global_scale, damp, name)
    return _errors(problem, point).reshape(weight.shape[:-1])


def _problem(
    weight: Tensor,
    hessian: Tensor,
    codes: Tensor,
    block_scale: Tensor,
    global_scale: Tensor,
    damp: float,
    name: str,
) -> tuple[_Problem, _Point]:
    check_scaled(weight, block_scale, name)
    if codes.shape != weight.shape or codes.dtype != torch.uint8:
        raise FormatError(f"{name}: codes {codes.dtype} {list(codes.shape)} for a weight {list(weight.shape)}")
    check_damp(damp, name)
    matrix, is_live = prepare_hessian(hessian, weight.shape[-1], name)
    matrix.diagonal(dim1=-2, dim2=-1).add_(damp * mean_diagonal(matrix, is_live).unsqueeze(-1) * is_live)
    scales = as_stack(block_scale).view(torch.uint8).mT.contiguous().view(torch.float8_e4m3fn)
    transposed, scale = as_stack(weight).float().mT.contiguous(), as_scales(global_scale, weight).unsqueeze(-1)
    problem = _Problem(transposed, matrix.float(), is_live, scale)
    return problem, _Point(as_stack(codes).mT.contiguous(), scales)


def _levels(codes: Tensor) -> Tensor:
    return decode_table(E2M1, codes.device)[codes.int()]


def _values(problem: _Problem, point: _Point) -> Tensor:
    """fp32 [E, K, N], what packing and decoding gives."""
    return _levels(point.codes).mul_(point.expanded_scale().float()).mul_(problem.global_scale)


def _errors(problem: _Problem, point: _Point) -> Tensor:
    """float64 [E, N]."""
    difference = problem.weight - _values(problem, point)
    hessian = problem.hessian.double()
    parts = difference.split(max(1, _SLICE // difference.shape[1]), -1)
    doubles = (part.double() for part in parts)
    return torch.cat([(hessian @ part).mul_(part).sum(1) for part in doubles], -1)


def _better(problem: _Problem, old: _Point, old_error: Tensor, new: _Point) -> tuple[_Point, Tensor]:
    """Row by row, the new point where its error is smaller. (fp32 sums can mistake a tie for a gain.)"""
    new_error = _errors(problem, new)
    is_better = new_error < old_error  # [E, N]
    codes = torch.where(is_better.unsqueeze(1), new.codes, old.codes)
    scales = torch.where(is_better.unsqueeze(1), new.scale_bytes, old.scale_bytes)
    return _Point(codes, scales.view(torch.float8_e4m3fn)), torch.minimum(new_error, old_error)


def _swept(
    problem: _Problem, start: _Point, sweep: Callable[[_Problem, _Point], tuple[_Point, bool]], sweeps: int
) -> _Point:
    """At most `sweeps` sweeps on from `start`, until one moves nothing; rows that got worse stay as they were."""
    point = start
    for _ in range(sweeps):
        point, has_changed = sweep(problem, point)
        if not has_changed:
            break
    return _better(problem, start, _errors(problem, start), point)[0]


def _sweep_codes(problem: _Problem, point: _Point) -> tuple[_Point, bool]:
    values = _values(problem, point)
    diagonal = problem.diagonal
    gradient = torch.bmm(problem.hessian, problem.weight - values)
    targets = torch.where(problem.is_live.unsqueeze(-1), gradient.div_(diagonal).add_(values), problem.weight)
    coefficients = problem.hessian / diagonal.mT
    codes, moves = round_columns(
        targets, values, coefficients, point.expanded_scale(), problem.global_scale.squeeze(-1), _LEAF
    )
    return _Point(codes, point.block_scale), bool(moves.any())


def _sweep_scales(problem: _Problem, point: _Point) -> tuple[_Point, bool]:
    columns = problem.weight.shape[1]
    levels = _levels(point.codes).mul_(problem.global_scale)
    gradient = torch.bmm(problem.hessian, problem.weight - _values(problem, point))
    scales, moves = point.block_scale.float(), torch.empty_like(levels)
    for block in range(columns // _BLOCK):
        start, end = block * _BLOCK, (block + 1) * _BLOCK
        v, h = levels[:, start:end], problem.hessian[:, start:end, start:end]
        curvature = torch.bmm(h, v).mul_(v).sum(1)  # [E, N]
        step = (v * gradient[:, start:end]).sum(1) / curvature
        old = scales[:, block]
        best = (old + step).clamp_(MIN_BLOCK_SCALE, E4M3.max).to(torch.float8_e4m3fn).float()
        new = torch.where(curvature > 0, best, old)
        torch.mul(v, (old - new).unsqueeze(1), out=moves[:, start:end])
        scales[:, block] = new
        if end < columns:
            first, last = earlier_and_later(end, columns)
            gradient[:, end:last].baddbmm_(problem.hessian[:, end:last, first:end], moves[:, first:end])
    return _Point(point.codes, scales.to(torch.float8_e4m3fn)), bool(moves.any())
