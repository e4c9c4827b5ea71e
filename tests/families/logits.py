"""What models are asked, and how far answers lie apart."""

import torch
from torch import Tensor

EPSILON = 2.0**-23  # fp32's


def token_ids() -> Tensor:
    """Longer than the tiny models' sliding windows and blocks; without the tokens that stand for images."""
    return torch.randint(126, (2, 24), generator=torch.Generator().manual_seed(1))


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()
