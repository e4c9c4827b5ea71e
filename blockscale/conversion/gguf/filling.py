"""An architecture's slots filled with a checkpoint's weights, none missing and none left over."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.checkpoint.dialects.stored import StoredLinear
from blockscale.checkpoint.source import SourceTensor
from blockscale.conversion.gguf.families import Family, Product, Slot, Source
from blockscale.conversion.gguf.rows import Geometry
from blockscale.conversion.gguf.weights import Inventory, Weight
from blockscale.errors import CheckpointError
from blockscale.formats.spec import Format

_OTHER_MODEL = "it is incomplete, or config.json belongs to another model"


@dataclass(frozen=True)
class Filled:
    """A slot of one layer.

    name      of the file's tensor, without `.weight`
    weights   one, or one an expert, all of one shape
    order     which rows of each, int64; None: all as they are
    """

    slot: Slot
    name: str
    weights: tuple[Weight, ...]
    bias: SourceTensor | None
    order: Tensor | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the file's tensor, K last."""
        shape = self.weights[0].shape
        if self.order is not None:
            shape = (*shape[:-2], len(self.order), shape[-1])
        return (len(self.weights), *shape) if "{e}" in self.slot.sources[0].name and len(shape) == 2 else shape

    @property
    def fold(self) -> str | None:
        """The norm that could take in its scale, in this layer."""
        return None if self.slot.fold is None else f"{self.name.rpartition('.')[0]}.{self.slot.fold}"

    @property
    def format(self) -> Format | None:
        """What all of its weights are packed in; None for plain ones, and for experts of different formats."""
        formats = {weight.format for weight in self.weights}
        return formats.pop() if len(formats) == 1 else None

    @property
    def is_quantized(self) -> bool:
        return any(weight.format is not None for weight in self.weights)

    def reorder(self, rows: Tensor, dim: int = -2) -> Tensor:
        """Codes, scales, values or (dim -1) a bias, with the rows that the file wants."""
        if self.order is None:
            return rows
        if rows.dtype == torch.float8_e4m3fn:  # cannot be indexed
            return rows.view(torch.uint8).index_select(dim, self.order).view(rows.dtype)
        return rows.index_select(dim, self.order)


def fill_slots(family: Family, inventory: Inventory, geometry: Geometry, *, is_tied: bool) -> list[Filled]:
    """CheckpointError for a weight that the architecture needs and the checkpoint lacks, or the other way round."""
    filled = [entry for slot, i in _slots(family, geometry) for entry in _fill(slot, i, inventory, geometry, is_tied)]
    used = {weight.name for entry in filled for weight in entry.weights}
    used |= {entry.bias.name for entry in filled if entry.bias is not None}
    stored: list[StoredLinear | SourceTensor] = [*inventory.linears.values()]
    stored += [tensor for tensor in inventory.tensors.values() if not _is_tied_head(tensor, is_tied)]
    loose = [item.name for item in stored if item.name not in used]
    if loose:
        raise CheckpointError(
            f"{len(loose)} tensors have no place in a GGUF file of architecture '{family.architecture}', "
            f"first '{loose[0]}'",
            hint="llama.cpp's graph of this architecture has no such weight",
        )
    return filled


def _slots(family: Family, geometry: Geometry) -> Iterator[tuple[Slot, int]]:
    yield from ((slot, 0) for slot in family.model)
    yield from ((slot, i) for i in range(geometry.num_layers) for slot in family.layer)


def _fill(slot: Slot, i: int, inventory: Inventory, geometry: Geometry, is_tied: bool) -> Iterator[Filled]:
    """One entry, or none for the head of a model with tied embeddings."""
    name = slot.name.format(i=i)
    for source in slot.sources:
        modules = [source.name.format(i=i, e=e) for e in range(geometry.num_experts if "{e}" in source.name else 1)]
        found = [inventory.find(module, is_transposed=source.is_transposed) for module in modules]
        weights = tuple(weight for weight in found if weight is not None)
        if not weights or _is_tied_head(weights[0].stored, is_tied):
            continue
        if len(weights) < len(found):
            missing = modules[found.index(None)]
            raise CheckpointError(f"the checkpoint lacks {missing}, and has its siblings", hint=_OTHER_MODEL)
        if len({weight.shape for weight in weights}) > 1:
            raise CheckpointError(f"{modules[0]} and its siblings have different shapes", hint=_OTHER_MODEL)
        if slot.product is not Product.SMALL and len(weights[0].shape) != (3 if source.is_stack else 2):
            raise CheckpointError(f"{weights[0].name}: {list(weights[0].shape)} is no such weight", hint=_OTHER_MODEL)
        bias = inventory.find_bias(modules[0]) if slot.has_bias else None
        if bias is not None and bias.shape != weights[0].shape[:-1]:
            raise CheckpointError(
                f"{bias.name} {list(bias.shape)} does not fit a weight {list(weights[0].shape)}", hint=_OTHER_MODEL
            )
        yield Filled(slot, name, weights, bias, _order(source, weights[0], geometry))
        return
    if not (slot.may_be_tied and is_tied):
        module = slot.sources[0].name.format(i=i, e=0)
        raise CheckpointError(f"the checkpoint lacks {module}, llama.cpp's {name}", hint=_OTHER_MODEL)


def _is_tied_head(stored: StoredLinear | SourceTensor, is_tied: bool) -> bool:
    """A plain head under tied embeddings is a copy that nothing reads."""
    return is_tied and isinstance(stored, SourceTensor) and stored.name.endswith("lm_head.weight")


def _order(source: Source, weight: Weight, geometry: Geometry) -> Tensor | None:
    if source.rows is None:
        return None
    try:
        return source.rows(geometry, weight.shape[-2])
    except ValueError as e:
        raise CheckpointError(f"{weight.name} {list(weight.shape)}: {e}", hint=_OTHER_MODEL) from e
