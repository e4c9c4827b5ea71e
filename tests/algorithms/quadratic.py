"""Layers with correlated inputs, and their exact errors in float64 with nothing from the code under test."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .exhaustive import LEVELS

SIGNED = torch.cat((LEVELS, -LEVELS[1:]))  # the 15 values


@dataclass(frozen=True)
class Layer:
    weight: Tensor  # fp32 [N, K]
    hessian: Tensor  # fp32 [K, K]
    block_scale: Tensor  # float8_e4m3fn [N, K/16]
    global_scale: Tensor  # fp32 0-d


def layer(rows: int, columns: int, tokens: int, seed: int, *, dead: int = 0) -> Layer:
    """Gaussian weights; inputs from a few directions with channels of unlike size; amax scales with some headroom.

    The last `dead` channels never fire.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weight = normal(rows, columns)
    inputs = normal(tokens, columns) + 2 * normal(tokens, 3) @ normal(3, columns)
    inputs = inputs * normal(columns).exp()
    if dead:
        inputs[:, -dead:] = 0
    global_scale = torch.tensor(2.0**-7)
    amax = weight.unflatten(-1, (-1, 16)).abs().amax(-1)
    return Layer(weight, inputs.T @ inputs / tokens, (amax / 5 / global_scale).to(torch.float8_e4m3fn), global_scale)


def values(codes: Tensor, block_scale: Tensor, global_scale: Tensor) -> Tensor:
    """float64 [..., N, K] from codes a byte."""
    levels = LEVELS[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)
    return levels * block_scale.double().repeat_interleave(16, -1) * global_scale.double()


def row_errors(weight: Tensor, hessian: Tensor, quantized: Tensor) -> Tensor:
    """float64 [..., N] of (w - q) H (w - q)^T."""
    difference = weight.double() - quantized
    return ((difference @ hessian.double()) * difference).sum(-1)


def errors_of(problem: Layer, codes: Tensor, block_scale: Tensor | None = None) -> Tensor:
    """float64 [N]."""
    scale = problem.block_scale if block_scale is None else block_scale
    return row_errors(problem.weight, problem.hessian, values(codes, scale, problem.global_scale))
