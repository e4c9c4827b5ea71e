"""A quantized checkpoint in another dialect, or written anew in its own: the same codes under other names.

Codes and block scales are copied bit for bit. A global scale that the other dialect stores the other way round becomes
its reciprocal, which fp32 holds to one unit in the last place; nothing else is computed. Residual channels, which only
Model Optimizer's dialect holds, are left out on the way to another.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blockscale.checkpoint.dialects import branches
from blockscale.checkpoint.dialects.stored import StoredLinear
from blockscale.checkpoint.header import TensorInfo
from blockscale.checkpoint.linear import KVScales, LowRank, QuantizedLinear, Scheme
from blockscale.checkpoint.load import assemble, check_scales, load_kv_scales
from blockscale.checkpoint.output import Layout
from blockscale.checkpoint.reader import DIALECTS, Checkpoint
from blockscale.checkpoint.tensors import read_tensor, torch_dtype
from blockscale.conversion.rewrite import Job, Made, copy_kv_scales, copy_linear, keep_tensor
from blockscale.conversion.stacks import unstack
from blockscale.errors import CheckpointError
from blockscale.formats.spec import Granularity
from blockscale.formats.tensor import empty_like_quantized

Linears = Mapping[str, QuantizedLinear]

_LOOK_BYTES = 8  # held for each byte of block scales: a copy, fp32, masks
_SMALLEST = 2.0**-126  # fp32's smallest normal number
_TO_16BIT = "take --to bf16, and quantize that; or leave it in its dialect"


def dialect_jobs(checkpoint: Checkpoint, dialect: str) -> list[Job]:
    """Every tensor of a quantized checkpoint on its way into `dialect`, but KV scales that it cannot announce.

    CheckpointError for what the dialect has no place for: a format, a pre_quant_scale, a low-rank branch, a stack of
    experts.
    """
    model = checkpoint.quantized
    assert model is not None
    jobs = [keep_tensor(tensor) for tensor in checkpoint.kept.values()]
    jobs += [linear_job(linear, checkpoint, dialect) for linear in model.linears.values()]
    return jobs + kv_jobs(checkpoint, dialect)


def linear_job(linear: StoredLinear, checkpoint: Checkpoint, dialect: str) -> Job:
    """One linear: copied into its own dialect, made anew for another. In either case its scales are looked at."""
    assert checkpoint.quantized is not None
    if dialect == checkpoint.quantized.dialect:
        held = _LOOK_BYTES * linear.tensors["block_scale"].num_bytes
        return _checked(copy_linear(linear), lambda: check_scales(linear), held)

    linear = replace(linear, tensors={r: i for r, i in linear.tensors.items() if r not in branches.RESIDUAL_ROLES})

    def make() -> tuple[Linears, Mapping[str, float]]:
        data = {role: read_tensor(info) for role, info in linear.tensors.items()}
        _check_reciprocals(linear, data)
        quantized = assemble(linear, data, checkpoint.dtype)
        if not linear.scheme.needs_input_scale:  # one that is there all the same is nobody's
            quantized = replace(quantized, input_global_scale=None)
        return {linear.name: quantized}, {}

    outline = {linear.name: _outline(linear, checkpoint.dtype)}
    return made_linears(outline, make, list(linear.tensors.values()), dialect, checkpoint.folder.config)


def _checked(copy: Job, check: Callable[[], object], held_bytes: int = 0) -> Job:
    def make() -> Made:
        check()
        return Made({})

    return replace(copy, make=make, held_bytes=max(copy.held_bytes, held_bytes))


def made_linears(
    outline: Linears,
    make: Callable[[], tuple[Linears, Mapping[str, float]]],
    stored: Sequence[TensorInfo],
    dialect: str,
    config: Mapping[str, Any],
) -> Job:
    """Linears that `make` computes from `stored`, with what it says of their errors, in the names of `dialect`.

    `outline`: the same linears as meta tensors. CheckpointError for what the dialect has no place for.
    """

    def tensors(linears: Linears) -> dict[str, Tensor]:
        placed = _placed(linears, dialect, config).items()
        return {n: t for module, linear in placed for n, t in DIALECTS[dialect].to_tensors(module, linear).items()}

    def run() -> Made:
        linears, errors = make()
        return Made(tensors(linears), errors)

    with _own_hints():
        layout: Layout = {n: (t.dtype, tuple(t.shape)) for n, t in tensors(outline).items()}
    schemes = {m: (linear.scheme, linear.weight.shape) for m, linear in _placed(outline, dialect, config).items()}
    held = 3 * sum(info.num_bytes for info in stored)  # as read, in memory's order, in the dialect's
    return Job(next(iter(outline)), tuple(stored), layout=layout, make=run, linears=schemes, held_bytes=held)


def kv_jobs(checkpoint: Checkpoint, dialect: str) -> list[Job]:
    """The scales of every attention layer's KV cache."""
    model = checkpoint.quantized
    assert model is not None
    if dialect == model.dialect:
        return [
            _checked(copy_kv_scales(attention, infos), partial(load_kv_scales, infos))
            for attention, infos in model.kv_tensors.items()
        ]
    if kv_format_in(checkpoint, dialect) != model.kv_format:
        return []
    return [_kv_job(attention, infos, dialect) for attention, infos in model.kv_tensors.items()]


def kv_format_in(checkpoint: Checkpoint, dialect: str) -> str | None:
    """The format of the KV cache that `dialect` can announce; None for one that it has no name for."""
    assert checkpoint.quantized is not None
    kv_format = checkpoint.quantized.kv_format
    return None if kv_format == "nvfp4" and dialect == "compressed-tensors" else kv_format


def check_schemes(jobs: Sequence[Job], dialect: str) -> None:
    """CheckpointError, before any work, for a mixture of formats that the dialect's config cannot describe."""
    schemes: dict[str, Scheme] = {module: scheme for job in jobs for module, (scheme, _) in job.linears.items()}
    with _own_hints():
        DIALECTS[dialect].config_files({}, schemes, [], None)


def _placed(linears: Linears, dialect: str, config: Mapping[str, Any]) -> Linears:
    """Stacks are Model Optimizer's only."""
    if dialect == "modelopt":
        return linears
    placed: dict[str, QuantizedLinear] = {}
    for name, linear in linears.items():
        placed |= {name: linear} if len(linear.weight.shape) == 2 else unstack(name, linear, config)
    return placed


def _outline(linear: StoredLinear, dtype: torch.dtype) -> QuantizedLinear:
    """What it is in memory, as meta tensors."""

    def meta(role: str, shape: tuple[int, ...] | None = None) -> Tensor | None:
        info = linear.tensors.get(role)
        if info is None:
            return None
        return torch.empty(info.shape if shape is None else shape, dtype=torch_dtype(info), device="meta")

    weight = empty_like_quantized(linear.shape, linear.scheme.weight, dtype)
    if linear.scheme.weight.granularity is Granularity.CHANNEL:  # bf16 or fp32, as it is stored
        weight = replace(weight, block_scale=weight.block_scale.to(torch_dtype(linear.tensors["block_scale"])))
    scalar = torch.empty((), dtype=torch.float32, device="meta")
    input_scale = scalar if linear.scheme.needs_input_scale else None
    up, down = meta(branches.UP), meta(branches.DOWN)
    low_rank = LowRank(up, down) if up is not None and down is not None else None
    return QuantizedLinear(linear.scheme, weight, input_scale, meta("pre_quant_scale"), low_rank)


def _kv_job(attention: str, infos: tuple[TensorInfo, TensorInfo], dialect: str) -> Job:
    writer = DIALECTS[dialect]
    scalar = torch.empty((), dtype=torch.float32, device="meta")
    outline = writer.kv_to_tensors(attention, KVScales(scalar, scalar))
    return Job(
        attention,
        infos,
        layout={name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in outline.items()},
        make=lambda: Made(writer.kv_to_tensors(attention, load_kv_scales(infos))),
        attention=attention,
    )


def _check_reciprocals(linear: StoredLinear, data: Mapping[str, Tensor]) -> None:
    """CheckpointError for a scale whose reciprocal is no normal number: engines may take that for 0, and it would not
    come back to a unit in the last place."""
    activation = linear.scheme.activation
    reversed_roles = ["global_scale"] if linear.scheme.weight.has_global_scale else []
    reversed_roles += ["input_global_scale"] if activation is not None and activation.has_global_scale else []
    for role in reversed_roles:
        scale = data[role].float().item()
        if not _SMALLEST <= scale <= 1 / _SMALLEST:
            raise CheckpointError(
                f"{linear.tensors[role].name}: {scale} has no reciprocal in fp32 that it could be stored as",
                hint="lint names such scales; take --to bf16",
            )


@contextmanager
def _own_hints() -> Iterator[None]:
    """A dialect's hints speak of quantizing."""
    try:
        yield
    except CheckpointError as e:
        raise CheckpointError(str(e), hint=_TO_16BIT) from e
