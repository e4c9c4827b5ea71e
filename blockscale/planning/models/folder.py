"""A model folder as the planner sees it: its architecture from the config, its bytes from the headers, to the byte."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockscale.checkpoint.faults import raise_first
from blockscale.checkpoint.groups import expert_set
from blockscale.checkpoint.structure import DRAFT, HEAD, ROUTER, TOWER, kept_reason, layer_number, text_config
from blockscale.inspection.collection import no_collection
from blockscale.inspection.reading import read_folder
from blockscale.inspection.weights import stored_weights
from blockscale.planning.models.architecture import Architecture, Part, from_config
from blockscale.planning.models.weights import PartWeights, Weights

_BY_REASON = {"embedding": Part.EMBEDDING, HEAD: Part.HEAD, ROUTER: Part.ROUTER, TOWER: Part.TOWER, DRAFT: Part.DRAFT}
_ATTENTION = ("self_attn", "attention", "attn", "linear_attn", "mixer", "mamba")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_KNOWN = {"bf16": "bf16", "fp16": "bf16", "fp32": "bf16", "fp8": "fp8", "fp8-channel": "fp8", "mxfp4": "mxfp4"}


@no_collection()
def read_model(path: Path) -> tuple[Architecture, Weights]:
    """CheckpointError for a folder that is none; UsageError for a config without a field that the formulas need.

    A part that is stored in several formats counts under the one that most of its bytes have.
    """
    reading = read_folder(path)
    raise_first(reading.folder.faults)  # a shard that is missing would make the sum wrong
    config = reading.folder.config
    parts_of = _Parts(config)
    architecture = from_config(config, path.name)
    linears, kept = stored_weights(reading)
    sizes: dict[Part, dict[tuple[str, str | None], int]] = {}

    def count(part: Part, fmt: str, activation: str | None, num_bytes: int) -> None:
        formats = sizes.setdefault(part, {})
        formats[fmt, activation] = formats.get((fmt, activation), 0) + num_bytes

    for weight in linears:
        part = parts_of.find(weight.name, weight.shape)
        num_bytes = sum(info.num_bytes for info in weight.tensors)
        count(part, planned_format(weight.format), planned_activation(weight.activation), num_bytes)
    counted = {info.name for weight in linears for info in weight.tensors}
    for name, info in reading.folder.tensors.items():
        if name not in counted:
            part = parts_of.find(name.removesuffix(".weight"), info.shape) if name in kept else Part.NORM
            count(part, "bf16", None, info.num_bytes)
    parts = {}
    for part, formats in sizes.items():
        fmt, activation = max(formats, key=lambda key: formats[key])
        parts[part] = PartWeights(fmt, activation, sum(formats.values()))
    return architecture, Weights(parts, is_exact=True)


class _Parts:
    """`part_of`, asked once for all experts of a layer: a large model has tens of thousands."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._known: dict[tuple[str, tuple[int, ...]], Part] = {}

    def find(self, module: str, shape: tuple[int, ...]) -> Part:
        key = (_EXPERT.sub(".experts.0.", module), shape)
        if key not in self._known:
            self._known[key] = part_of(*key, self._config)
        return self._known[key]


def part_of(module: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> Part:
    """What a module with a weight of that shape belongs to."""
    reason = kept_reason(f"{module}.weight", shape if len(shape) > 1 else (2, 2), config)
    if reason in _BY_REASON:
        return _BY_REASON[reason]
    layers = text_config(config).get("num_hidden_layers")
    number = layer_number(f"{module}.")
    if number is not None and isinstance(layers, int) and number >= layers:
        return Part.DRAFT
    if len(shape) < 2 or reason in ("norm", "convolution"):
        return Part.NORM
    if expert_set(module) is not None or ".experts." in f"{module}.":
        return Part.EXPERTS
    names = module.split(".")
    if any("shared_expert" in name for name in names):
        return Part.SHARED_EXPERTS
    return Part.ATTENTION if any(name in _ATTENTION for name in names) else Part.FEED_FORWARD


def planned_format(stored: str) -> str:
    """The planner's name for a stored format: what its arithmetic goes by."""
    if stored in _KNOWN:
        return _KNOWN[stored]
    for prefix, name in (("nvfp4", "nvfp4"), ("mxfp8", "mxfp8"), ("fp8", "fp8-block128"), ("int", "int4")):
        if stored.startswith(prefix):
            return name
    return "bf16"


def planned_activation(stored: str | None) -> str | None:
    """The planner's name for what inputs are rounded to; None: not at all."""
    if stored is None:
        return None
    return next((name for name in ("nvfp4", "mxfp4", "mxfp8", "fp8") if stored.startswith(name)), None)
