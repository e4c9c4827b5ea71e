"""The checkpoint's tensors beside the source's, by name: what could not be compared, and what is lost."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from blockscale.checkpoint.faults import Fault
from blockscale.checkpoint.groups import expert_set
from blockscale.checkpoint.structure import DRAFT, HEAD, kept_reason, module_name
from blockscale.inspection.checks.layers import LAYER
from blockscale.inspection.matrices import is_tied
from blockscale.inspection.reading import Reading

if TYPE_CHECKING:  # needs torch
    from blockscale.checkpoint.source import Source

# Computed when a model is built, and stored by old versions of transformers.
_BUFFERS = (".inv_freq", ".masked_bias", ".attn.bias", ".position_ids")
_SAME_MODEL = 0.5  # of the names; below that the source has other names, or is another model


def name_faults(reading: Reading, source: "Source") -> Iterator[Fault]:
    """BS406, and BS318 by what the source has. Nothing of a folder that lacks whole files."""
    if reading.model is None or any(fault.is_fatal for fault in reading.folder.faults):
        return
    linears = list(reading.model.linears)
    sets = {expert_set(name) for name in source.tensors} - {None}  # experts may be one stack there
    unknown = [
        name
        for name in linears
        if f"{name}.weight" not in source.tensors and name not in source.tensors and expert_set(name) not in sets
    ]
    if linears and len(unknown) > _SAME_MODEL * len(linears):
        what = f"{len(unknown)} of {len(linears)} linears are not in the source under their names, first {unknown[0]}"
        hint = "give the model that it was made from; tensors that were renamed cannot be compared"
        yield Fault("source-not-compared", str(source.path), what, hint, is_fatal=False)
        return
    yield from _lost(reading, source)


def _lost(reading: Reading, source: "Source") -> Iterator[Fault]:
    """Tensors of the source that are not here. A part of the model that was left out as a whole, or that has other
    names here, is another matter: only what lies among others that are there counts."""
    assert reading.model is not None
    tensors, config = reading.folder.tensors, reading.folder.config
    places = {place for name in tensors for place in _places(name)}
    renamed = {_places(name)[-1] for name in reading.kept if name not in source.tensors}
    for name, tensor in source.tensors.items():
        module = module_name(name)
        if name in tensors or module in reading.model.linears or f"{module}.weight_scale" in tensors:
            continue
        if name.endswith(_BUFFERS) or expert_set(name) is not None:
            continue
        if not all(place in places for place in _places(name)) or _places(name)[-1] in renamed:
            continue
        reason = kept_reason(name, tensor.shape, config)
        if reason in (DRAFT, HEAD) or (reason == "embedding" and is_tied(config)):
            continue
        what = f"{name} is missing; the source has it"
        yield Fault("missing-tensor", module.removesuffix(".bias"), what, "copy it from the source", is_fatal=False)


def _places(name: str) -> tuple[str, ...]:
    """What a tensor lies in: `model`, `model.layers`, `model.layers.3`."""
    top = name.partition(".")[0]
    match = LAYER.match(name)
    return (top,) if match is None else (top, match[1], f"{match[1]}.{match[2]}")
