"""A checkpoint whose MXFP4 weights become NVFP4 (`mxfp4_cast`): of either dialect, or gpt-oss as it was released.

Activations that were MXFP4 stay in 16 bits: NVFP4's have a scale that only calibration finds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from blockscale.checkpoint.dialects.stored import StoredLinear
from blockscale.checkpoint.groups import fused_groups
from blockscale.checkpoint.header import TensorInfo
from blockscale.checkpoint.linear import W4A16, QuantizedLinear
from blockscale.checkpoint.load import load_linear
from blockscale.checkpoint.reader import Checkpoint
from blockscale.checkpoint.source import SourceTensor
from blockscale.checkpoint.tensors import read_tensor
from blockscale.conversion.mxfp4_cast import cast_group
from blockscale.conversion.rewrite import Job, keep_tensor
from blockscale.conversion.to_dialect import Linears, kv_jobs, linear_job, made_linears
from blockscale.errors import CheckpointError
from blockscale.formats.spec import MXFP4, NVFP4
from blockscale.formats.tensor import QuantizedTensor, empty_like_quantized

GPT_OSS = "mxfp4"  # its quant_method


@dataclass(frozen=True)
class _Weight:
    """An MXFP4 weight [N, K] or [E, N, K]."""

    module: str
    shape: tuple[int, ...]
    stored: tuple[TensorInfo, ...]
    load: Callable[[], QuantizedTensor]


def nvfp4_jobs(checkpoint: Checkpoint, dialect: str) -> list[Job]:
    """Every tensor on its way into `dialect`, MXFP4 weights as NVFP4. CheckpointError if there are none, and for what
    the dialect has no place for."""
    weights = {weight.module: weight for weight in _weights(checkpoint)}
    if not weights:
        raise CheckpointError(
            f"{checkpoint.path}: no weight is stored in MXFP4",
            hint="--format nvfp4 casts MXFP4; anything else has to be quantized from the 16-bit model",
        )
    model = checkpoint.quantized
    jobs = [keep_tensor(tensor) for tensor in checkpoint.kept.values() if tensor.name not in weights]
    if model is not None:
        others = [linear for name, linear in model.linears.items() if name not in weights]
        jobs += [linear_job(linear, checkpoint, dialect) for linear in others]
        jobs += kv_jobs(checkpoint, dialect)
    groups = fused_groups(weights).values()
    return jobs + [_group_job([weights[name] for name in group], checkpoint, dialect) for group in groups]


def _weights(checkpoint: Checkpoint) -> list[_Weight]:
    if checkpoint.quantized is not None:
        linears = checkpoint.quantized.linears.values()
        return [_stored(linear, checkpoint) for linear in linears if linear.scheme.weight is MXFP4]
    if checkpoint.folder.method == GPT_OSS:
        return [_gpt_oss(tensor) for tensor in checkpoint.kept.values() if not tensor.is_plain]
    return []


def _stored(linear: StoredLinear, checkpoint: Checkpoint) -> _Weight:
    if "pre_quant_scale" in linear.tensors:
        raise CheckpointError(f"{linear.name}: an MXFP4 weight with a pre_quant_scale is not cast", hint="--to bf16")
    dtype = checkpoint.dtype
    stored = tuple(linear.tensors.values())
    return _Weight(linear.name, linear.shape, stored, lambda: load_linear(linear, dtype).weight)


def _gpt_oss(tensor: SourceTensor) -> _Weight:
    """Blocks [E, N, K/32, 16] and scales [E, N, K/32]; what the reader shows is the model's parameter, [E, K, N]."""
    blocks, scales = tensor.stored
    experts, k, n = tensor.shape
    shape = (experts, n, k)

    def load() -> QuantizedTensor:
        block_scale = read_tensor(scales)
        if (block_scale == 255).any():
            position = (block_scale == 255).nonzero()[0].tolist()
            raise CheckpointError(f"{scales.name}: NaN scale at {position}", hint="download the file again")
        packed = read_tensor(blocks).flatten(-2)
        return QuantizedTensor(MXFP4, packed, block_scale, None, shape, tensor.dtype)

    return _Weight(tensor.name, shape, tensor.stored, load)


def _group_job(group: Sequence[_Weight], checkpoint: Checkpoint, dialect: str) -> Job:
    dtype = checkpoint.dtype

    def make() -> tuple[Linears, Mapping[str, float]]:
        casts = cast_group([weight.load() for weight in group])
        linears = {w.module: QuantizedLinear(W4A16, c.weight) for w, c in zip(group, casts, strict=True)}
        return linears, {w.module: c.error for w, c in zip(group, casts, strict=True) if c.error}

    outline = {w.module: QuantizedLinear(W4A16, empty_like_quantized(w.shape, NVFP4, dtype)) for w in group}
    stored = [info for weight in group for info in weight.stored]
    return made_linears(outline, make, stored, dialect, checkpoint.folder.config)
