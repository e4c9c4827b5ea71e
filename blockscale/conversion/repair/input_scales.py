"""Scales of activations: what calibration did not find, found at siblings that see the same input.

Members of a fused group have one input between them. The experts of a layer are given the same hidden states, and
exporters store one scale per projection for all of them.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from blockscale.checkpoint.dialects.stored import StoredLinear
from blockscale.checkpoint.groups import expert_set, fused_groups, group_name
from blockscale.checkpoint.tensors import read_tensor
from blockscale.conversion.repair import fixes
from blockscale.formats.spec import Format

ROLE = "input_global_scale"
_NUMBER = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


@dataclass(frozen=True)
class InputScale:
    """`tensor`: as it is to be stored. `name`: of the tensor, by which the linear has it or should."""

    tensor: Tensor
    name: str


def mend_input_scales(
    linears: Mapping[str, StoredLinear],
    *,
    reversed_: Collection[str],
    missing: Collection[str],
    shared: Collection[str],
) -> tuple[dict[str, InputScale], tuple[str, ...]]:
    """New scales by linear, and the linears that no sibling can help.

    reversed_  linears whose stored scale is its own reciprocal
    missing    linears that have none, or one that nobody can use
    shared     fused groups that shall have one scale; groups of the linears above get one in any case
    """
    found = {}
    for module in reversed_:
        info = linears[module].tensors[ROLE]
        found[module] = InputScale(fixes.reverse(read_tensor(info)), info.name)

    def current(module: str) -> InputScale | None:
        info = linears[module].tensors.get(ROLE)
        if module in found or info is None or module in missing:
            return found.get(module)
        return InputScale(read_tensor(info), info.name)

    groups = fused_groups(linears)
    rows = _rows(linears) if missing else {}
    helpless = []
    for module in missing:
        wanted = _format(linears[module])
        for siblings in (groups[group_name(module)], rows.get(_row(module), ())):
            candidates = [m for m in siblings if m not in missing and _format(linears[m]) == wanted]
            scales = [(m, scale) for m in candidates if (scale := current(m)) and fixes.is_usable(scale.tensor)]
            if scales:
                donor, like = scales[0]
                tensor = fixes.widest([s.tensor for _, s in scales], is_divisor=is_divisor(linears[module]))
                found[module] = InputScale(tensor, module + like.name.removeprefix(donor))
                break
        else:
            helpless.append(module)
    touched = {*shared, *(group_name(module) for module in found)}
    for name in groups:
        if name in touched:
            for members in _by_format(groups[name], linears):
                found |= _shared({m: scale for m in members if (scale := current(m))}, linears)
    return found, tuple(helpless)


def _shared(scales: Mapping[str, InputScale], linears: Mapping[str, StoredLinear]) -> dict[str, InputScale]:
    """One scale for members of a group; empty if they agree."""
    usable = {m: scale for m, scale in scales.items() if fixes.is_usable(scale.tensor)}
    if len({scale.tensor.float().item() for scale in usable.values()}) < 2:
        return {}
    is_divided = is_divisor(linears[next(iter(usable))])
    widest = fixes.widest([scale.tensor for scale in usable.values()], is_divisor=is_divided)
    return {m: InputScale(widest, scale.name) for m, scale in usable.items()}


def _by_format(members: Sequence[str], linears: Mapping[str, StoredLinear]) -> Iterator[list[str]]:
    by_format: dict[Format | None, list[str]] = {}
    for member in members:
        by_format.setdefault(_format(linears[member]), []).append(member)
    yield from by_format.values()


def _format(linear: StoredLinear) -> Format | None:
    """What a scale stands for depends on it: amax / 2688, or amax / 448."""
    return linear.scheme.activation


def is_divisor(linear: StoredLinear) -> bool:
    """Whether the input scale is stored as 1 / multiplier."""
    activation = linear.scheme.activation
    return linear.has_divisors and activation is not None and activation.has_global_scale


def _rows(linears: Mapping[str, StoredLinear]) -> dict[str, list[str]]:
    """Projection of a layer's experts -> its linears."""
    rows: dict[str, list[str]] = {}
    for module in linears:
        if expert_set(module) is not None:
            rows.setdefault(_row(module), []).append(module)
    return rows


def _row(module: str) -> str:
    """`a.experts.3.up_proj` -> `a.experts.*.gate_proj+up_proj`."""
    return _NUMBER.sub("*", group_name(module))
