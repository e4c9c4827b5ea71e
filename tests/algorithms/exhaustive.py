"""Blocks to quantize, and their squared error under every scale, in float64 with nothing from the code under test."""

import torch
from torch import Tensor

LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
SCALES = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()  # all positive E4M3 numbers

BLOCKS = ("gaussian", "laplace", "student", "outlier", "constant", "uniform", "few levels", "wide range", "some zero")


def blocks(kind: str, count: int, seed: int) -> Tensor:
    """fp32 [count, 16]."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    x = normal(count, 16)
    if kind == "laplace":
        x = x.sign() * uniform(count, 16).clamp(min=1e-6).log()
    elif kind == "student":
        x = x / normal(count, 16).abs().clamp(min=0.01)
    elif kind == "outlier":
        x = x * 0.01
        x[:, 3] = 3 * uniform(count)
    elif kind == "constant":
        x = uniform(count, 1).repeat(1, 16)
    elif kind == "uniform":
        x = uniform(count, 16) - 0.5
    elif kind == "few levels":
        x = torch.randint(-5, 6, (count, 16), generator=generator).float()
    elif kind == "wide range":
        x = x * 2.0 ** torch.randint(-14, 3, (count, 1), generator=generator)
    elif kind == "some zero":
        x = x * (uniform(count, 16) < 0.3)
    return x


def errors(x: Tensor, step: Tensor) -> Tensor:
    """Sum of squared errors of each block [B, n] when its grid is LEVELS times a float64 step [B]."""
    step = step.unsqueeze(-1)
    nearest = (x.double().abs() / step).unsqueeze(-1).sub(LEVELS).abs().amin(-1)
    return (nearest * step).square().sum(-1)


def error_of(x: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Of blocks [B, n] with the E4M3 scales [B, 1] that were chosen."""
    return errors(x, scale.double().reshape(-1) * global_scale.double())


def all_errors(x: Tensor, global_scale: Tensor) -> Tensor:
    """[B, 126]: of blocks [B, n] under every E4M3 scale."""
    return torch.stack([errors(x, (s * global_scale.double()).expand(len(x))) for s in SCALES], -1)
