"""A decoder's weights out of a checkpoint, one at a time, each to its place on the device.

Besides what has its place already there is one linear in memory: as it is read, and as its kernel wants it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockscale.checkpoint.dialects.stored import StoredLinear
from blockscale.checkpoint.load import load_linear, plain_values
from blockscale.checkpoint.reader import Checkpoint
from blockscale.checkpoint.source import SourceTensor
from blockscale.checkpoint.structure import layer_number
from blockscale.errors import ModelError
from blockscale.models.cut import Stored, cut_columns, cut_rows
from blockscale.models.layers import JoinedProduct, PlainProduct, Product, can_join, join, make_linear
from blockscale.models.moe import load_moe
from blockscale.models.moe_config import MoEConfig
from blockscale.models.parallel import Group, Summed
from blockscale.models.shard import WHOLE, Part, Shard

_EMBEDDING = "embed_tokens.weight"
_OTHER_MODEL = "config.json belongs to another model"


@dataclass(frozen=True)
class Reader:
    """Names are those below `prefix` (`model.`).

    is_emulating     inputs are rounded as each linear's scheme says
    has_unit_offset  norms are read as 1 + weight
    shard, group     where the model is divided among several devices: which part is read, and whom it is summed with
    used             stored names that were asked for
    """

    checkpoint: Checkpoint
    prefix: str
    device: torch.device
    dtype: torch.dtype
    is_emulating: bool
    has_unit_offset: bool
    shard: Shard = WHOLE
    group: Group | None = None
    used: set[str] = field(default_factory=set)

    @property
    def linears(self) -> Mapping[str, StoredLinear]:
        return self.checkpoint.quantized.linears if self.checkpoint.quantized else {}

    def has(self, name: str) -> bool:
        full = self.prefix + name
        return full in self.checkpoint.kept or full.removesuffix(".weight") in self.linears

    def tensor(self, name: str, *shape: int, rows: Part | None = None) -> Tensor:
        """As it is stored, on the device; decoded where it is packed all the same. `rows`: of the first dimension."""
        full = self.prefix + name
        stored = self._find(full.removesuffix(".weight")) if name.endswith(".weight") else self._kept(full)
        _check_shape(full, stored.shape, shape)
        if rows is not None:
            stored = cut_rows(stored, rows)
        if isinstance(stored, StoredLinear):
            value = plain_values(load_linear(stored, self.checkpoint.dtype)).to(self.checkpoint.dtype)
        else:
            value = stored.read()
        return value.to(self.device)

    def norm(self, module: str, size: int) -> Tensor:
        """fp32 [size]: what an RMSNorm multiplies by."""
        weight = self.tensor(f"{module}.weight", size).float()
        return 1.0 + weight if self.has_unit_offset else weight

    def linear(
        self,
        module: str,
        shape: tuple[int, int],
        *,
        has_bias: bool,
        rows: Part | None = None,
        columns: Part | None = None,
    ) -> Product:
        """`shape` is [N, K] of the whole weight. `rows` or `columns` of it are read where it is divided; products of
        columns are still to be summed, and the bias is one rank's."""
        full = self.prefix + module
        stored = self._find(full)
        _check_shape(full, stored.shape, shape)
        bias = self._bias(full, rows or Part(0, shape[0], shape[0])) if has_bias else None
        if rows is not None:
            stored = cut_rows(stored, rows)
        if columns is not None:
            stored = cut_columns(stored, columns, is_emulating=self.is_emulating)
            bias = bias if self.shard.rank == 0 else None
        return self.of_stored(stored, bias)

    def summed(self, product: Product) -> Product:
        """The product over all ranks."""
        return product if self.group is None else Summed(product, self.group)

    def joined(
        self, parent: str, leaves: Sequence[str], rows: Sequence[Part], k: int, *, has_bias: bool, fused: str
    ) -> Product:
        """Linears [.., k] that read the same x, as one, with `rows` of each; a checkpoint may keep them so, under the
        name `fused`."""
        if not self.has(f"{parent}.{fused}.weight"):
            names = [f"{self.prefix}{parent}.{leaf}" for leaf in leaves]
            for name, part in zip(names, rows, strict=True):
                _check_shape(name, self._find(name).shape, (part.whole, k))
            own = list(rows)
        else:
            whole = sum(part.whole for part in rows)
            if self.shard.size == 1:
                return self.linear(f"{parent}.{fused}", (whole, k), has_bias=has_bias)
            names = [f"{self.prefix}{parent}.{fused}"] * len(rows)
            _check_shape(names[0], self._find(names[0]).shape, (whole, k))
            begins = [sum(part.whole for part in rows[:i]) for i in range(len(rows))]
            own = [part.within(begin, whole) for part, begin in zip(rows, begins, strict=True)]
        stored = [cut_rows(self._find(name), part) for name, part in zip(names, own, strict=True)]
        biases = [self._bias(name, part) for name, part in zip(names, own, strict=True)] if has_bias else []
        return self._join(stored, biases, sum(part.size for part in rows), k)

    def _join(self, stored: Sequence[Stored], biases: Sequence[Tensor], n: int, k: int) -> Product:
        """[n, k], the rows of `stored` below one another."""
        bias = torch.cat(list(biases)) if biases else None
        plain = [one for one in stored if isinstance(one, SourceTensor)]
        if len(plain) == len(stored) and len({one.dtype for one in plain}) == 1:
            return PlainProduct(self._stacked(plain, n, k), bias)
        if not plain:
            packed = [one for one in stored if isinstance(one, StoredLinear)]
            loaded = [load_linear(one, self.checkpoint.dtype).to(self.device) for one in packed]
            if can_join(loaded):
                whole = join(loaded)
                del loaded
                return make_linear(whole, bias, is_emulating=self.is_emulating, method=self.checkpoint.activation_scale)
            del loaded
        own = list(biases) if biases else [None for _ in stored]
        return JoinedProduct(tuple(self.of_stored(one, b) for one, b in zip(stored, own, strict=True)))

    def of_stored(self, stored: Stored, bias: Tensor | None) -> Product:
        """A linear, whichever way it is stored; bias fp32 [N]."""
        if isinstance(stored, SourceTensor):
            return PlainProduct(self._placed(stored.read()), bias)
        linear = load_linear(stored, self.checkpoint.dtype).to(self.device)
        return make_linear(linear, bias, is_emulating=self.is_emulating, method=self.checkpoint.activation_scale)

    def read_linear(self, stored: Stored, bias: SourceTensor | None) -> Product:
        """The same with a stored bias."""
        return self.of_stored(stored, None if bias is None else bias.read().float().to(self.device))

    def experts(self, parent: str, config: MoEConfig, hidden: int, shared: Product | None) -> Product:
        """The layer of experts at `parent`; where the model is divided, this rank's part of the sum."""
        return load_moe(
            self.checkpoint,
            self.prefix + parent,
            config,
            hidden,
            self.read_linear,
            device=self.device,
            dtype=self.dtype,
            is_emulating=self.is_emulating,
            shared=shared,
            shard=self.shard,
        )

    def check_all_used(self, num_layers: int) -> None:
        """ModelError for weights of decoder layers that nobody asked for: the model would not be the checkpoint's."""
        modules = [f"{name}.weight" for name in self.linears] + list(self.checkpoint.kept)
        for name in modules:
            layer = layer_number(name)
            is_inside = name.startswith(f"{self.prefix}layers.") and layer is not None and layer < num_layers
            if is_inside and name not in self.used and name.endswith((".weight", ".bias")):
                raise ModelError(
                    f"{name}: the decoder of this model type has no place for it",
                    hint="config.json names another architecture than the weights have, or one with a variant",
                )

    def _find(self, module: str) -> Stored:
        self.used.add(f"{module}.weight")
        stored = self.linears.get(module) or self.checkpoint.kept.get(f"{module}.weight")
        if stored is None:
            raise ModelError(f"{module}: the checkpoint has no weight for it", hint="the checkpoint is incomplete")
        return stored

    def _kept(self, name: str) -> SourceTensor:
        self.used.add(name)
        if name not in self.checkpoint.kept:
            raise ModelError(f"{name}: the checkpoint has no such tensor", hint="the checkpoint is incomplete")
        return self.checkpoint.kept[name]

    def _bias(self, module: str, part: Part) -> Tensor:
        bias = self._kept(f"{module}.bias")
        _check_shape(f"{module}.bias", bias.shape, (part.whole,))
        return bias.read()[part.begin : part.end].float().to(self.device)

    def _placed(self, weight: Tensor) -> Tensor:
        """On the CPU as it is stored: products there decode. On a GPU in the model's dtype."""
        return weight if self.device.type == "cpu" else weight.to(self.device, self.dtype)

    def _stacked(self, parts: Sequence[SourceTensor], n: int, k: int) -> Tensor:
        """[n, k]: the parts below one another, each read into its place."""
        first = parts[0].read()
        dtype = first.dtype if self.device.type == "cpu" else self.dtype
        whole, row = torch.empty(n, k, dtype=dtype, device=self.device), 0
        for i, part in enumerate(parts):
            value = first if i == 0 else part.read()
            whole[row : row + len(value)].copy_(value)
            row += len(value)
        return whole


def find_prefix(checkpoint: Checkpoint) -> str:
    """What stands before `embed_tokens` and `layers` in the checkpoint's names."""
    linears = checkpoint.quantized.linears if checkpoint.quantized else {}
    names = [*checkpoint.kept, *(f"{module}.weight" for module in linears)]
    found = [name.removesuffix(_EMBEDDING) for name in names if name.endswith(_EMBEDDING)]
    if len(found) != 1:
        raise ModelError(
            f"{checkpoint.path}: {len(found)} token embeddings named '{_EMBEDDING}'",
            hint="this architecture runs through transformers",
        )
    return found[0]


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(found) != tuple(expected):
        raise ModelError(f"{name}: the checkpoint has {list(found)}, the model {list(expected)}", hint=_OTHER_MODEL)
