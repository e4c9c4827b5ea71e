"""Parts of stored weights [N, K]: some outputs (rows), or some inputs (columns), with the scales that belong to them.

Global scales and those of inputs are one a tensor and stay. Where a weight is decoded as a whole (`SourceTensor`s that
are not plain), it is read as a whole, one at a time, and cut then.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from blockscale.checkpoint.dialects import branches
from blockscale.checkpoint.dialects.stored import StoredLinear
from blockscale.checkpoint.header import TensorInfo
from blockscale.checkpoint.parts import columns_of, rows_of
from blockscale.checkpoint.source import SourceTensor
from blockscale.errors import ModelError, UsageError
from blockscale.formats.spec import Granularity
from blockscale.models.shard import Part

Stored = StoredLinear | SourceTensor
_BLOCKWISE = ("packed", "block_scale")


def cut_rows(stored: Stored, part: Part) -> Stored:
    """[part.size, K] of a weight [N, K], or of a vector. ModelError unless N is what the model has."""
    _check_whole(stored, stored.shape[0], part)
    if part.is_whole:
        return stored
    if isinstance(stored, SourceTensor):
        return _of_source(stored, part, is_rows=True)
    tensors = dict(stored.tensors)
    granularity = stored.scheme.weight.granularity
    if granularity is Granularity.CHANNEL:
        tensors["block_scale"] = _vector(tensors["block_scale"], part)
    of_blocks = ["block_scale"] if granularity is Granularity.BLOCK else []
    for role in ("packed", branches.UP, branches.PACKED, branches.BLOCK_SCALE, *of_blocks):
        if role in tensors:
            is_turned = stored.is_transposed and role in _BLOCKWISE
            tensors[role] = (columns_of if is_turned else rows_of)(tensors[role], part.begin, part.end)
    return replace(stored, tensors=tensors)


def cut_columns(stored: Stored, part: Part, *, is_emulating: bool) -> Stored:
    """[N, part.size] of a weight [N, K]: summed over all parts, their products are those of the weight.

    is_emulating  inputs are rounded. Where a token has a scale of its own (FP8 per token), each part then has its own
    ModelError unless K is what the model has. UsageError where a block of scales, or of channels that are corrected,
    would have to be cut.
    """
    _check_whole(stored, stored.shape[-1], part)
    if part.is_whole:
        return stored
    if isinstance(stored, SourceTensor):
        return _of_source(stored, part, is_rows=False)
    fmt, tensors = stored.scheme.weight, dict(stored.tensors)
    if branches.CHANNELS in tensors:
        if is_emulating:
            raise UsageError(
                f"{stored.name}: corrected channels of its inputs share blocks, which cannot be divided among devices",
                hint="use one device, or leave activations in 16 bits",
            )
        for role in branches.RESIDUAL_ROLES:
            del tensors[role]
    per_byte = 2 if fmt.element.bits == 4 else 1
    unit = fmt.block_size if fmt.granularity is Granularity.BLOCK else per_byte
    if part.begin % unit or part.end % unit:
        raise UsageError(
            f"{stored.name}: columns {part.begin} to {part.end} of {part.whole} cut {fmt.name}'s blocks of {unit}",
            hint="tensor_parallel: choose a smaller number",
        )
    steps = {"packed": per_byte, branches.DOWN: 1}
    if fmt.granularity is Granularity.BLOCK:
        steps["block_scale"] = fmt.block_size
    for role, step in steps.items():
        if role in tensors:
            is_turned = stored.is_transposed and role in _BLOCKWISE
            tensors[role] = (rows_of if is_turned else columns_of)(tensors[role], part.begin // step, part.end // step)
    if "pre_quant_scale" in tensors:
        tensors["pre_quant_scale"] = _vector(tensors["pre_quant_scale"], part)
    return replace(stored, tensors=tensors)


def _vector(info: TensorInfo, part: Part) -> TensorInfo:
    """Of one scale a row or a column, [N] or [K], or with dimensions of 1 beside it."""
    return rows_of(info._replace(shape=(part.whole,)), part.begin, part.end)


def _of_source(stored: SourceTensor, part: Part, *, is_rows: bool) -> SourceTensor:
    shape = (part.size, *stored.shape[1:]) if is_rows else (*stored.shape[:-1], part.size)
    if stored.decode is not None:
        return replace(stored, shape=shape, decode=_then_cut(stored.decode, part, is_rows=is_rows))
    cut = rows_of if is_rows else columns_of
    return replace(stored, shape=shape, stored=(cut(stored.stored[0], part.begin, part.end),))


def _then_cut(decode: Callable[..., Tensor], part: Part, *, is_rows: bool) -> Callable[..., Tensor]:
    def cut(*stored: Tensor) -> Tensor:
        whole = decode(*stored)
        return (whole[part.begin : part.end] if is_rows else whole[..., part.begin : part.end]).contiguous()

    return cut


def _check_whole(stored: Stored, found: int, part: Part) -> None:
    if found != part.whole:
        raise ModelError(
            f"{stored.name}: the checkpoint has {list(stored.shape)}, the model {part.whole} where it is cut",
            hint="config.json belongs to another model",
        )
