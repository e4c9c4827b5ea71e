"""The weight matrices of a checkpoint as a loader meets them: quantized or in 16 bits, and what each is for."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from blockscale.checkpoint.groups import expert_set
from blockscale.checkpoint.linear import Scheme
from blockscale.checkpoint.structure import DRAFT, TOWER, kept_reason, layer_number, module_name, text_config
from blockscale.inspection.reading import Reading

FLOATS = ("BF16", "F16", "F32")
Shape = tuple[int, ...]
_NUMBER = re.compile(r"\.\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix, or a stack of them.

    module  as in the files; of a stack of experts, the parameter's name
    shape   [N, K] or [E, N, K]; of a stack in 16 bits, as it is stored
    scheme  None: stored in 16 bits
    reason  why it is not quantized by default; None for a usual linear layer
    draft   the part of the model it lies in, if that is a draft layer: `mtp`, `model.layers.61`
    """

    module: str
    shape: Shape
    scheme: Scheme | None
    reason: str | None
    draft: str | None


def matrices_of(reading: Reading) -> list[Matrix]:
    """Quantized ones first, then those in 16 bits. Norms, biases and what has no known format are left out."""
    kinds = Kinds(reading.folder.config)
    found = []
    if reading.model is not None:
        for linear in reading.model.linears.values():
            name = linear.name if len(linear.shape) == 3 else f"{linear.name}.weight"
            found.append(kinds.matrix(name, linear.shape, linear.scheme))
    for info in reading.kept.values():
        is_weight = info.name.endswith(".weight") and len(info.shape) > 1
        if info.dtype in FLOATS and (is_weight or (len(info.shape) == 3 and expert_set(info.name) is not None)):
            found.append(kinds.matrix(info.name, info.shape, None))
    return found


class Kinds:
    """`kept_reason`, asked once for names that differ in numbers only."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        layers = text_config(config).get("num_hidden_layers")
        self._num_layers = layers if isinstance(layers, int) and not config.get("is_encoder_decoder") else None
        self._known: dict[tuple[str, Shape, bool], tuple[str | None, bool]] = {}

    def matrix(self, tensor_name: str, shape: Shape, scheme: Scheme | None) -> Matrix:
        module = module_name(tensor_name)
        is_beyond = self._is_beyond(module)
        key = (_NUMBER.sub(".0", tensor_name), shape, is_beyond)
        if key not in self._known:
            reason = kept_reason(tensor_name, shape, self._config)
            is_draft = reason != TOWER and (is_beyond or draft_root(module.split(".")) is not None)
            self._known[key] = reason, is_draft
        reason, is_draft = self._known[key]
        return Matrix(module, shape, scheme, reason, self._root(module) if is_draft else None)

    def _is_beyond(self, module: str) -> bool:
        """Whether it lies behind the decoder's layers, which is where DeepSeek's draft layer is."""
        number = None if self._num_layers is None else layer_number(f"{module}.")
        return number is not None and self._num_layers is not None and number >= self._num_layers

    def _root(self, module: str) -> str:
        parts = module.split(".")
        named = draft_root(parts)
        if named is not None:
            return named
        return ".".join(parts[: parts.index("layers") + 2])


def draft_root(parts: Iterable[str]) -> str | None:
    """Up to and including the first part of a name that says it is a draft layer."""
    path: list[str] = []
    for part in parts:
        path.append(part)
        if kept_reason(f"{part}.weight", (2, 2), {}) == DRAFT:
            return ".".join(path)
    return None


def is_tied(config: Mapping[str, Any]) -> bool | None:
    """Whether the output head is the embedding; None where the config leaves that to the model's class."""
    sections = (config, text_config(config))
    said = (section.get("tie_word_embeddings") for section in sections)
    return next((value for value in said if isinstance(value, bool)), None)
