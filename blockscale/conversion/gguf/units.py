"""What makes the bytes of each tensor of the file."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from blockscale.checkpoint.dialects.stored import StoredLinear
from blockscale.conversion.gguf.blocks import packed_blocks, plain_blocks
from blockscale.conversion.gguf.filling import Filled
from blockscale.conversion.gguf.folding import Fold, lowered
from blockscale.conversion.gguf.weights import Weight
from blockscale.formats.spec import MXFP4, NVFP4

F32 = GGMLQuantizationType.F32
PACKED_KINDS = {NVFP4: GGMLQuantizationType.NVFP4, MXFP4: GGMLQuantizationType.MXFP4}


@dataclass(frozen=True)
class TensorPlan:
    """`shape` as torch has it, K last."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType

    @property
    def byte_shape(self) -> tuple[int, ...]:
        return tuple(gguf.quants.quant_shape_to_byte_shape(self.shape, self.kind))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.byte_shape)


@dataclass(frozen=True)
class Unit:
    """Tensors made in one reading. `make` gives the bytes of each, uint8 of its `byte_shape`."""

    tensors: tuple[TensorPlan, ...]
    make: Callable[[], Sequence[np.ndarray]]


def packed_unit(entry: Filled, fold: Fold | None) -> Unit:
    """Codes and block scales as they are; beside them the global scales, one an expert, unless a norm took them in."""
    fmt = entry.format
    assert fmt is not None
    tensors = [TensorPlan(f"{entry.name}.weight", entry.shape, PACKED_KINDS[fmt])]
    if fmt is NVFP4 and fold is None:
        tensors.append(TensorPlan(f"{entry.name}.scale", (len(entry.weights),), F32))
        if all(_has_input_scale(weight) for weight in entry.weights):
            tensors.append(TensorPlan(f"{entry.name}.input_scale", (len(entry.weights),), F32))
    return Unit(tuple(tensors), partial(_make_packed, entry, tensors, fold.shift if fold else 0))


def _has_input_scale(weight: Weight) -> bool:
    return isinstance(weight.stored, StoredLinear) and "input_global_scale" in weight.stored.tensors


def _make_packed(entry: Filled, tensors: Sequence[TensorPlan], shift: int) -> list[np.ndarray]:
    blocks = _empty(tensors[0], len(entry.weights))
    global_scales: list[Tensor | None] = []
    input_scales: list[Tensor | None] = []
    for part, weight in zip(blocks, entry.weights, strict=True):
        linear = weight.load()
        block_scale = lowered(linear, shift) if shift else linear.weight.block_scale
        assert block_scale is not None
        packed = entry.reorder(linear.weight.packed)
        part[:] = packed_blocks(linear.weight.format, packed, entry.reorder(block_scale)).reshape(-1)
        global_scales.append(linear.weight.global_scale)
        input_scales.append(linear.input_global_scale)
    sides = (global_scales, input_scales)[: len(tensors) - 1]
    return [
        blocks.reshape(tensors[0].byte_shape),
        *(plain_blocks(torch.stack([s for s in side if s is not None]), F32, entry.name) for side in sides),
    ]


def plain_unit(entry: Filled, kind: GGMLQuantizationType, factor: float = 1.0) -> Unit:
    """What the weights stand for, plus the slot's offset, times `factor`."""
    tensor = TensorPlan(f"{entry.name}.weight", entry.shape, kind)
    return Unit((tensor,), partial(_make_plain, entry, tensor, factor))


def _make_plain(entry: Filled, tensor: TensorPlan, factor: float) -> list[np.ndarray]:
    blocks = _empty(tensor, len(entry.weights))
    for part, weight in zip(blocks, entry.weights, strict=True):
        values = entry.reorder(weight.values())
        if entry.slot.offset or factor != 1.0:
            values = (values.float() + entry.slot.offset) * factor
        part[:] = plain_blocks(values, tensor.kind, weight.name).reshape(-1)
    return [blocks.reshape(tensor.byte_shape)]


def _empty(tensor: TensorPlan, parts: int) -> np.ndarray:
    """A row of bytes for each part, so that experts are read one by one."""
    return np.empty((parts, tensor.num_bytes // parts), np.uint8)


def bias_unit(entry: Filled) -> Unit:
    """fp32 [N], or [E, N] of a stack, in the order of the weight's rows."""
    bias = entry.bias
    assert bias is not None
    tensor = TensorPlan(f"{entry.name}.bias", entry.shape[:-1], F32)
    return Unit((tensor,), lambda: [plain_blocks(entry.reorder(bias.read(), -1), F32, bias.name)])


def generated_unit(name: str, values: Tensor) -> Unit:
    """An fp32 tensor that follows from the config."""
    return Unit((TensorPlan(name, tuple(values.shape), F32),), lambda: [plain_blocks(values, F32, name)])
