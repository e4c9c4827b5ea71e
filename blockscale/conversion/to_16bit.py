"""Any checkpoint as a plain 16-bit model: quantized linears as the weights that they stand for.

    W = (e2m1(code) * block_scale * global_scale [+ up down]) [* pre_quant_scale, along K]

is computed in fp32 and rounded once to the checkpoint's own type. Sources that the reader already shows in 16 bits
(FP8 in tiles, gpt-oss, AWQ's and GPTQ's integers) are written as it shows them.
"""

import math

import torch
from torch import Tensor

from blockscale.checkpoint.dialects.stored import StoredLinear
from blockscale.checkpoint.linear import QuantizedLinear
from blockscale.checkpoint.load import load_linear
from blockscale.checkpoint.reader import Checkpoint
from blockscale.conversion.rewrite import Job, Made, keep_tensor
from blockscale.errors import CheckpointError
from blockscale.formats.spec import Granularity
from blockscale.formats.tensor import QuantizedTensor, decode

_SLICE_ELEMENTS = 1 << 20


def plain_jobs(checkpoint: Checkpoint) -> list[Job]:
    """Every tensor in 16 bits; scales of a KV cache have no place there."""
    jobs = [keep_tensor(tensor) for tensor in checkpoint.kept.values()]
    if checkpoint.quantized is None:
        return jobs
    return jobs + [_linear_job(linear, checkpoint.dtype) for linear in checkpoint.quantized.linears.values()]


def _linear_job(linear: StoredLinear, dtype: torch.dtype) -> Job:
    """A stack keeps its name and the model's own orientation [E, K, N]; a matrix is a module's `weight`."""
    *lead, n, k = linear.shape
    name, shape = (linear.name, (*lead, k, n)) if linear.is_transposed else (f"{linear.name}.weight", linear.shape)

    def make() -> Made:
        weight, error = plain_weight(load_linear(linear, dtype), linear.name)
        return Made({name: weight.transpose(-1, -2) if linear.is_transposed else weight}, {linear.name: error})

    held = 3 * linear.num_bytes + 2 * dtype.itemsize * math.prod(shape)
    return Job(linear.name, tuple(linear.tensors.values()), layout={name: (dtype, shape)}, make=make, held_bytes=held)


def plain_weight(linear: QuantizedLinear, name: str) -> tuple[Tensor, float]:
    """The weight [N, K] or [E, N, K] of the linear's own type, some rows at a time, and the relative error of rounding
    to it. CheckpointError for values beyond that type."""
    q = linear.weight
    k = q.shape[-1]
    packed = q.packed.reshape(-1, q.packed.shape[-1])
    is_shared = q.format.granularity is Granularity.TENSOR
    scale = q.block_scale if is_shared else q.block_scale.reshape(packed.shape[0], -1)
    result = torch.empty(packed.shape[0], k, dtype=q.dtype)
    squared_error, squares = 0.0, 0.0
    step = max(1, _SLICE_ELEMENTS // k)
    for first in range(0, packed.shape[0], step):
        rows = slice(first, first + step)
        part = packed[rows]
        block_scale = scale if is_shared else scale[rows]
        values = decode(QuantizedTensor(q.format, part, block_scale, q.global_scale, (part.shape[0], k), q.dtype))
        if linear.low_rank is not None:
            values += linear.low_rank.up[rows].float() @ linear.low_rank.down.float()
        if linear.pre_quant_scale is not None:
            values *= linear.pre_quant_scale.float()
        result[rows] = values
        error, size = (
            torch.linalg.vector_norm(x, dtype=torch.float64).item() for x in (result[rows].float() - values, values)
        )
        if not math.isfinite(error + size):
            raise CheckpointError(
                f"{name}: {values.abs().max().item()} is no number of {q.dtype}",
                hint="its scales are damaged, or belong to a model of another dtype; see lint",
            )
        squared_error += error**2
        squares += size**2
    return result.view(q.shape), math.sqrt(squared_error / squares) if squares else 0.0
