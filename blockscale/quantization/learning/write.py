"""A checkpoint with some of its codes, block scales and gains replaced; everything else byte for byte."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from blockscale.checkpoint.dialects import branches
from blockscale.checkpoint.dialects.stored import StoredLinear
from blockscale.checkpoint.reader import Checkpoint
from blockscale.checkpoint.source import SourceTensor
from blockscale.checkpoint.tensors import torch_dtype
from blockscale.conversion.rewrite import Job, Made, Progress, keep_tensor, write_checkpoint
from blockscale.conversion.to_dialect import kv_jobs, linear_job
from blockscale.formats.packing import pack_nibbles

_CHANGED = ("packed", "block_scale")


def write_learned(
    checkpoint: Checkpoint,
    linears: Mapping[str, tuple[Tensor, Tensor]],
    gains: Mapping[str, Tensor],
    out: Path,
    provenance: Mapping[str, Any],
    progress: Progress | None = None,
) -> int:
    """Writes `checkpoint` to the folder `out` in its own dialect, and says how many bytes that took.

    linears     stored module name -> (codes uint8 [..., K], block_scale float8_e4m3fn [..., K/16]) of those that change
    gains       stored tensor name -> values, of those that change
    provenance  what blockscale.json shall say
    """
    model = checkpoint.quantized
    assert model is not None
    jobs = [
        _gain_job(tensor, gains[name]) if name in gains else keep_tensor(tensor)
        for name, tensor in checkpoint.kept.items()
    ]
    jobs += [
        _changed_linear(linear, *linears[name]) if name in linears else linear_job(linear, checkpoint, model.dialect)
        for name, linear in model.linears.items()
    ]
    written = write_checkpoint(
        out,
        jobs + kv_jobs(checkpoint, model.dialect),
        dialect=model.dialect,
        config=checkpoint.folder.config,
        kv_format=model.kv_format,
        has_pre_quant_scale=any("pre_quant_scale" in linear.tensors for linear in model.linears.values()),
        low_rank={name for name, linear in model.linears.items() if branches.has_low_rank(linear.tensors)},
        companions=checkpoint.folder.companions,
        provenance=provenance,
        progress=progress,
        stage="writing",
    )
    return written.num_bytes


def _gain_job(tensor: SourceTensor, value: Tensor) -> Job:
    return Job(
        tensor.name,
        tensor.stored,
        layout={tensor.name: (tensor.dtype, tensor.shape)},
        make=lambda: Made({tensor.name: value.cpu()}),
    )


def _changed_linear(linear: StoredLinear, codes: Tensor, block_scale: Tensor) -> Job:
    changed = {role: linear.tensors[role] for role in _CHANGED}

    def make() -> Made:
        values = {"packed": pack_nibbles(codes.cpu()), "block_scale": block_scale.cpu()}
        if linear.is_transposed:
            values = {role: value.transpose(-1, -2).contiguous() for role, value in values.items()}
        return Made({changed[role].name: value for role, value in values.items()})

    return Job(
        linear.name,
        tuple(linear.tensors.values()),
        copies={info.name: info for role, info in linear.tensors.items() if role not in _CHANGED},
        layout={info.name: (torch_dtype(info), info.shape) for info in changed.values()},
        make=make,
        linears={linear.name: (linear.scheme, linear.shape)},
        held_bytes=2 * linear.num_bytes,
    )
