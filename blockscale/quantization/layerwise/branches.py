"""What a method puts beside a linear's weight: a low-rank branch in 16 bits, residual channels."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from blockscale.algorithms.scale_sweep import best_block_scale
from blockscale.algorithms.svdquant import low_rank_branch
from blockscale.checkpoint.linear import LowRank, Residual
from blockscale.formats.nvfp4 import encode_packed
from blockscale.formats.spec import NVFP4
from blockscale.formats.tensor import QuantizedTensor, empty_like_quantized
from blockscale.quantization.layerwise.method import Method
from blockscale.quantization.layerwise.rounding import swept
from blockscale.quantization.plan import PlannedLinear


def num_residual_channels(method: Method, k: int) -> int:
    """Whole blocks, and no more than there are."""
    return min(method.residual_channels, k // NVFP4.block_size * NVFP4.block_size)


def has_branches(linear: PlannedLinear) -> bool:
    """Stacks of experts have neither, nor has what lies outside the decoder layers, which alone have numbers."""
    is_numbered = any(part.isdigit() for part in linear.module.split("."))
    return linear.scheme.weight is NVFP4 and len(linear.shape) == 2 and is_numbered


def empty_branches(linear: PlannedLinear, method: Method) -> Mapping[str, Any]:
    """Fields of a QuantizedLinear on the meta device, as they will be stored."""
    found: dict[str, Any] = {}
    if not has_branches(linear):
        return found
    (n, k), dtype = linear.shape, linear.tensor.dtype
    if method.rank:
        rank = min(method.rank, n, k)
        up, down = torch.empty(n, rank, dtype=dtype, device="meta"), torch.empty(rank, k, dtype=dtype, device="meta")
        found["low_rank"] = LowRank(up, down)
    if method.residual_channels and linear.scheme.activation is NVFP4:
        count = num_residual_channels(method, k)
        channels = torch.empty(count, dtype=torch.int32, device="meta")
        found["residual"] = Residual(channels, empty_like_quantized((n, count), NVFP4, dtype))
    return found


def needs_text(linear: PlannedLinear, method: Method) -> bool:
    """Whether something that is stored of it can only be found from what it is given."""
    return linear.scheme.needs_input_scale or bool(empty_branches(linear, method))


def low_rank(weight: Tensor, method: Method, second: Tensor | None, dtype: torch.dtype) -> tuple[LowRank, Tensor]:
    """The branch of a weight fp32 [N, K], and what is left of it to quantize. `second` [K, K]: of the inputs."""
    rank = min(method.rank, *weight.shape)

    importance = None if second is None else second.diagonal()

    def quantize(residual: Tensor) -> Tensor:
        return swept(residual, importance).decode()

    branch = low_rank_branch(weight, rank, quantize, second=second, dtype=dtype)
    missing = rank - branch.up.shape[1]  # a branch that did not help has no rank, and is stored as zeros
    up = torch.nn.functional.pad(branch.up, (0, missing))
    down = torch.nn.functional.pad(branch.down, (0, 0, 0, missing))
    return LowRank(up, down), branch.residual


def residual(weight: Tensor, channels: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Residual:
    """The columns of a weight fp32 [N, K] that are multiplied once more."""
    columns = weight[:, channels]
    block = best_block_scale(columns, global_scale)
    packed = encode_packed(columns, block, global_scale)
    return Residual(channels.int(), QuantizedTensor(NVFP4, packed, block, global_scale, tuple(columns.shape), dtype))


def given_by(branches: Sequence[LowRank], x: Tensor) -> Tensor:
    """[T, N]: what the branches of a group add, for inputs [T, K] that are not rounded."""
    return torch.cat([x.float() @ b.down.float().T @ b.up.float().T for b in branches], -1)
