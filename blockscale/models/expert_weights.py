"""Reads a layer's experts from a checkpoint, one at a time, into the stacks that run them.

Checkpoints keep experts as one linear an expert and projection, or as one stack a projection. A stack in memory is
made once, on its device, and each expert is copied to its place: beside it there is never more than one expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockscale.checkpoint.dialects.stored import StoredLinear
from blockscale.checkpoint.header import TensorInfo
from blockscale.checkpoint.linear import MXFP4_W4A16
from blockscale.checkpoint.load import load_linear
from blockscale.checkpoint.reader import Checkpoint
from blockscale.checkpoint.source import SourceTensor
from blockscale.errors import ModelError
from blockscale.kernels.prepare import FORMATS, Layout, PreparedWeight
from blockscale.models.cut import Stored, cut_columns, cut_rows
from blockscale.models.shard import Part, Shard

_OF_EVERY_EXPERT = ("packed", "block_scale")  # the roles of a stored stack that have an entry an expert
_OF_A_WEIGHT = (*_OF_EVERY_EXPERT, "global_scale", "input_global_scale")  # of a linear with nothing beside its weight


@dataclass(frozen=True)
class Projection:
    """One projection of all experts of a layer, as a checkpoint keeps it.

    experts  [N, K] each
    biases   [N] each, or none
    """

    experts: tuple[Stored, ...]
    biases: tuple[SourceTensor, ...] = ()

    @property
    def is_plain(self) -> bool:
        return all(isinstance(stored, SourceTensor) for stored in self.experts)


def find_projection(
    checkpoint: Checkpoint, prefix: str, leaf: str, num_experts: int, *, is_transposed: bool = False
) -> Projection | None:
    """The projection `leaf` of the experts at `prefix`, a stack `prefix.leaf` or linears `prefix.E.leaf`; None where
    the first expert has none.

    is_transposed  16-bit stacks are stored [E, K, N]
    """
    linears = checkpoint.quantized.linears if checkpoint.quantized else {}
    kept, name = checkpoint.kept, f"{prefix}.{leaf}"
    if name in linears:
        _check_count(name, linears[name].shape, num_experts)
        stored: list[Stored] = [_linear_part(linears[name], e) for e in range(num_experts)]
        return Projection(tuple(stored), biases=_biases(checkpoint, f"{name}_bias", num_experts))
    if name in kept:
        _check_count(name, kept[name].shape, num_experts)
        is_mxfp4 = not kept[name].is_plain and checkpoint.folder.method == "mxfp4"
        stored = [
            _mxfp4_part(kept[name], e) if is_mxfp4 else _tensor_part(kept[name], e, is_transposed=is_transposed)
            for e in range(num_experts)
        ]
        return Projection(tuple(stored), _biases(checkpoint, f"{name}_bias", num_experts))
    names = [f"{prefix}.{e}.{leaf}" for e in range(num_experts)]
    if names[0] not in linears and f"{names[0]}.weight" not in kept:
        return None
    found: list[Stored] = []
    for module in names:
        one = linears.get(module) or kept.get(f"{module}.weight")
        if one is None:
            raise ModelError(f"{module}: the checkpoint has no weight for it", hint="the checkpoint is incomplete")
        found.append(one)
    biases = [kept[f"{module}.bias"] for module in names if f"{module}.bias" in kept]
    return Projection(tuple(found), biases=tuple(biases))


def cut_experts(
    first: Sequence[Projection],
    down: Projection,
    part: Part,
    shard: Shard,
    *,
    is_interleaved: bool,
    is_emulating: bool,
) -> tuple[list[Projection], Projection]:
    """What a rank holds of every expert, of whose inner width it has `part`; results are summed over all ranks, so the
    biases of `down` are one rank's.

    is_interleaved  where gate and up are one projection, their rows lie in turn
    """
    if len(first) > 1:
        own = [_rows_of(projection, part) for projection in first]
    elif is_interleaved:
        own = [_rows_of(first[0], part.times(2))]
    else:
        own = [_rows_of(first[0], part.within(begin, 2 * part.whole)) for begin in (0, part.whole)]
    columns = [cut_columns(one, part, is_emulating=is_emulating) for one in down.experts]
    return own, Projection(tuple(columns), down.biases if shard.rank == 0 else ())


def _rows_of(projection: Projection, part: Part) -> Projection:
    biases = [cut_rows(bias, part) for bias in projection.biases]
    return Projection(
        tuple(cut_rows(one, part) for one in projection.experts),
        tuple(bias for bias in biases if isinstance(bias, SourceTensor)),
    )


def can_pack(projections: Sequence[Projection], *, is_emulating: bool) -> bool:
    """Whether the mixture-of-experts op runs them: all in one four-bit format, and nothing beside the weights.

    is_emulating  inputs are rounded where the scheme says so, which the op does not do
    """
    formats = set()
    for stored in (one for projection in projections for one in projection.experts):
        if not isinstance(stored, StoredLinear) or stored.scheme.weight not in FORMATS:
            return False
        if not set(stored.tensors) <= set(_OF_A_WEIGHT):
            return False
        if is_emulating and stored.scheme.activation is not None:
            return False
        formats.add(stored.scheme.weight.name)
    return len(formats) == 1


def packed_stack(
    parts: Sequence[Projection], shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> PreparedWeight:
    """The row-major stack [E, N, K] of `shape` whose rows are those of `parts`, one below the other.

    ModelError for an expert of another shape.
    """
    num_experts, n, k = shape
    first = parts[0].experts[0]
    assert isinstance(first, StoredLinear)
    fmt = first.scheme.weight
    packed = torch.empty(num_experts, n, k // 2, dtype=torch.uint8, device=device)
    block_scale = torch.empty(num_experts, n, k // fmt.block_size, dtype=torch.uint8, device=device)
    global_scale = torch.ones(num_experts, len(parts), dtype=torch.float32)
    rows = n // len(parts)
    for expert in range(num_experts):
        for i, projection in enumerate(parts):
            stored = projection.experts[expert]
            assert isinstance(stored, StoredLinear)
            _check_shape(stored.name, stored.shape, (rows, k))
            weight = load_linear(stored, dtype).weight
            place = slice(i * rows, (i + 1) * rows)
            packed[expert, place].copy_(weight.packed)
            block_scale[expert, place].copy_(weight.block_scale.view(torch.uint8))
            if weight.global_scale is not None:
                global_scale[expert, i] = weight.global_scale
    scale = global_scale if len(parts) > 1 else global_scale.squeeze(1)
    return PreparedWeight(Layout.ROW_MAJOR, packed, block_scale, scale.to(device), shape, fmt, dtype)


def plain_stack(
    parts: Sequence[Projection], shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> Tensor:
    """The same of 16-bit experts, [E, N, K] in `dtype`."""
    num_experts, n, k = shape
    stack = torch.empty(shape, dtype=dtype, device=device)
    rows = n // len(parts)
    for expert in range(num_experts):
        for i, projection in enumerate(parts):
            stored = projection.experts[expert]
            assert isinstance(stored, SourceTensor)
            _check_shape(stored.name, stored.shape, (rows, k))
            stack[expert, i * rows : (i + 1) * rows].copy_(stored.read())
    return stack


def bias_stack(parts: Sequence[Projection], num_experts: int, n: int, device: torch.device) -> Tensor | None:
    """fp32 [E, N], or None where no part has a bias."""
    if not any(projection.biases for projection in parts):
        return None
    rows = []
    for expert in range(num_experts):
        for projection in parts:
            if len(projection.biases) != num_experts:
                name = projection.experts[0].name
                raise ModelError(f"{name}: {len(projection.biases)} biases for {num_experts} experts")
            rows.append(projection.biases[expert].read().float())
    stack = torch.cat(rows)
    if stack.numel() != num_experts * n:
        raise ModelError(
            f"{parts[0].biases[0].name}: {stack.numel()} biases, the model has {num_experts} x {n}",
            hint="config.json belongs to another model",
        )
    return stack.view(num_experts, n).to(device)


def _entry(info: TensorInfo, index: int) -> TensorInfo:
    """Entry `index` of a stored tensor's first dimension, which lies in the file as one piece."""
    num_bytes = info.num_bytes // info.shape[0]
    offset = info.offset + index * num_bytes
    return info._replace(name=f"{info.name}[{index}]", shape=info.shape[1:], offset=offset, num_bytes=num_bytes)


def _linear_part(stack: StoredLinear, expert: int) -> StoredLinear:
    tensors = {role: _entry(info, expert) if role in _OF_EVERY_EXPERT else info for role, info in stack.tensors.items()}
    return replace(stack, name=f"{stack.name}[{expert}]", tensors=tensors)


def _mxfp4_part(stack: SourceTensor, expert: int) -> StoredLinear:
    """Of a stack in 4 bits as its makers publish it: blocks [E, N, K/32, 16] and scales [E, N, K/32]."""
    blocks, scales = (_entry(info, expert) for info in stack.stored)
    packed = blocks._replace(shape=(blocks.shape[0], blocks.shape[1] * blocks.shape[2]))
    return StoredLinear(f"{stack.name}[{expert}]", MXFP4_W4A16, {"packed": packed, "block_scale": scales})


def _tensor_part(stack: SourceTensor, expert: int, *, is_transposed: bool = False) -> SourceTensor:
    if not stack.is_plain:
        raise ModelError(
            f"{stack.name}: a stack of experts in a format that is read as a whole",
            hint="convert the checkpoint to 16 bits first",
        )
    info = _entry(stack.stored[0], expert)
    if is_transposed:
        return SourceTensor(info.name, stack.dtype, info.shape[::-1], (info,), _transposed)
    return SourceTensor(info.name, stack.dtype, info.shape, (info,))


def _transposed(weight: Tensor) -> Tensor:
    return weight.transpose(-1, -2).contiguous()


def _biases(checkpoint: Checkpoint, name: str, num_experts: int) -> tuple[SourceTensor, ...]:
    """The rows of a stack [E, N]."""
    if name not in checkpoint.kept:
        return ()
    _check_count(name, checkpoint.kept[name].shape, num_experts)
    return tuple(_tensor_part(checkpoint.kept[name], e) for e in range(num_experts))


def _check_count(name: str, shape: tuple[int, ...], num_experts: int) -> None:
    if not shape or shape[0] != num_experts:
        raise ModelError(
            f"{name}: the checkpoint has {list(shape)}, the model {num_experts} experts",
            hint="config.json belongs to another model",
        )


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(found) != expected:
        raise ModelError(
            f"{name}: the checkpoint has {list(found)}, the model {list(expected)}",
            hint="config.json belongs to another model",
        )
