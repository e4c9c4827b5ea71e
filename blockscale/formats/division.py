"""Division that rounds the same on every device."""

import torch
from torch import Tensor


def divide(x: Tensor, divisor: float) -> Tensor:
    """fp32 x / divisor, the true quotient.

    By a number, or by a 0-d tensor on the CPU, torch's CUDA kernels multiply with a rounded reciprocal instead.
    """
    return x.float() / torch.full((), divisor, dtype=torch.float32, device=x.device)
