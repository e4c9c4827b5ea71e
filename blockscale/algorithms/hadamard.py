"""Block Hadamard rotation along K: spreads what one channel holds over its block, and leaves products alone.

With R = blockdiag(H_n / sqrt(n)), n a power of two, H_n the Sylvester matrix, H_n[i, j] = (-1)^popcount(i & j):

    W' = W R offline,   x' = x R when it runs,   x' W'^T = x W^T   because R R^T = 1

R is symmetric, so rotating twice gives the tensor back. Blocks of 16 and more cover whole NVFP4 blocks. Measured, the
rotation lowers MXFP4's error and raises NVFP4's: use it where held-back text says so.

Source: Egiazarian et al., "Bridging the Gap Between Promise and Performance for Microscaling FP4 Quantization"
(MR-GPTQ), arXiv 2509.23202.
"""

import torch
from torch import Tensor

from blockscale.errors import FormatError

SIZES = (16, 32, 64, 128)


def rotate(x: Tensor, size: int) -> Tensor:
    """x R for x [..., K], blocks of `size` along K: float64 for float64, else fp32.

    The fast Walsh-Hadamard transform: log2(size) rounds of sums and differences. FormatError if `size` is none of
    SIZES or does not divide K.
    """
    if size not in SIZES:
        raise FormatError(f"no Hadamard rotation of size {size}", hint="sizes: " + ", ".join(map(str, SIZES)))
    if x.dim() == 0 or x.shape[-1] % size:
        raise FormatError(
            f"a Hadamard rotation of size {size} does not fit a tensor of shape {list(x.shape)}",
            hint="the last dimension must be a multiple of the size: take a smaller one, or none for this layer",
        )
    y = x if x.dtype == torch.float64 else x.float()
    half = 1
    while half < size:
        first, second = y.unflatten(-1, (-1, 2, half)).unbind(-2)  # [..., K/(2 half), half] each
        y = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    return y.mul_(size**-0.5)
