"""Which planned linears of a decoder layer share an input.

A site is one input tensor and the linears that it feeds: q/k/v, o, gate/up, down, each expert's own, MLA's q_a and
kv_a, all of attention and MLP where the two run side by side. What is done to an input (smoothing, a Hessian, a
rotation) is done once a site. Sites are seen by running the layer, so any architecture has them; names are only asked
for experts that the probe's tokens did not reach, and to check the result against what engines fuse.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from blockscale.checkpoint.groups import expert_set, fused_groups, group_name
from blockscale.errors import ModelError
from blockscale.host.linear import KeptLinear, PackedLinear
from blockscale.quantization.layer_probe import CallLayer, check_output, is_same, random_hidden, run_probe
from blockscale.quantization.plan import PlannedLinear

_Key = tuple[int, str]  # class of equal inputs, expert


@dataclass(frozen=True)
class Site:
    """An input of `in_features` channels and the planned linears that it feeds.

    name       of the groups that engines fuse, below what they have in common: `model.layers.0.mlp.gate_proj+up_proj`
    members    stored module names, in the layer's order
    hosted     the same modules' names inside the layer
    is_expert  routed experts: an expert's own linears, or the stack of one projection of all of them
    """

    name: str
    members: tuple[str, ...]
    hosted: tuple[str, ...]
    in_features: int
    is_expert: bool


def find_sites(
    layer: nn.Module, path: str, linears: Mapping[str, PlannedLinear], call_layer: CallLayer, hidden: Tensor
) -> tuple[Site, ...]:
    """The layer's sites, in the order in which they are reached; experts in the order of their numbers.

    layer       a decoder layer with weights, its linears as `host` holds them
    path        its module path in the model, for linears that do not know their stored names
    call_layer  runs it with the other arguments that it needs
    hidden      hidden states of the shape, dtype and device that `call_layer` takes; a few tokens do

    A planned linear that the layer does not call is in no site, unless engines fuse it with one that is.
    ModelError where members of one fused group are given different inputs, or the layer gives NaN.
    """
    planned = _planned(layer, path, linears)  # hosted -> stored name
    output, seen = run_probe(layer, call_layer, random_hidden(hidden), watch=planned)
    check_output(output)
    keys = _input_classes(planned, seen)
    keys |= _of_silent_experts(planned, keys)
    keys |= _of_silent_partners(planned, keys)
    sites: dict[_Key, list[str]] = {}
    for name in planned:
        if name in keys:
            sites.setdefault(keys[name], []).append(name)
    result = tuple(_site(layer, planned, sites[key]) for key in _in_order(sites, planned))
    _check_fused(result, planned)
    return result


def numberless(hosted: str) -> str:
    """What an expert's linear has in common with its siblings': a star for each number in the name."""
    return ".".join("*" if part.isdigit() else part for part in hosted.split("."))


def parent_name(hosted: str) -> str:
    """The module that a linear lies in; one that only wraps it (to clip its input) is none."""
    return hosted.removesuffix(".linear").rpartition(".")[0]


def _planned(layer: nn.Module, path: str, linears: Mapping[str, PlannedLinear]) -> dict[str, str]:
    found = {}
    for name, module in layer.named_modules():
        if isinstance(module, KeptLinear | PackedLinear):
            stored = getattr(module, "name", "") or f"{path}.{name}"
            if stored in linears:
                found[name] = stored
    return found


def _expert(stored: str) -> str:
    """What follows `.experts.`: a number, or the name of a stack. Empty for a linear that is no expert's."""
    return stored.partition(".experts.")[2].partition(".")[0]


def _input_classes(planned: Mapping[str, str], seen: Mapping[str, Sequence[Tensor]]) -> dict[str, _Key]:
    """Linears that were given equal tensors have equal keys. Two experts may be given the same tokens, and stay two."""
    inputs: list[tuple[_Key, str | None, Sequence[Tensor]]] = []
    keys: dict[str, _Key] = {}
    for name, given in seen.items():
        owner, expert = expert_set(planned[name]), _expert(planned[name])
        for key, its_owner, others in inputs:
            if (key[1], its_owner) == (expert, owner) and _are_same(given, others):
                keys[name] = key
                break
        else:
            keys[name] = (len(inputs), expert)
            inputs.append((keys[name], owner, given))
    return keys


def _are_same(given: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(given) == len(others) and all(
        a.shape[-1] == b.shape[-1] and is_same(a, b) for a, b in zip(given, others, strict=True)
    )


def _of_silent_experts(planned: Mapping[str, str], keys: Mapping[str, _Key]) -> dict[str, _Key]:
    """Experts of a layer run the same code: one that no token reached has the sites of its siblings."""
    siblings = {_without_number(planned[name]): key[0] for name, key in keys.items() if key[1].isdigit()}
    result = {}
    for name, stored in planned.items():
        number = siblings.get(_without_number(stored))
        if name not in keys and number is not None:
            result[name] = (number, _expert(stored))
    return result


def _without_number(stored: str) -> tuple[str | None, str]:
    """The set of experts, and which of an expert's linears."""
    return expert_set(stored), stored.partition(".experts.")[2].partition(".")[2]


def _of_silent_partners(planned: Mapping[str, str], keys: Mapping[str, _Key]) -> dict[str, _Key]:
    """Engines multiply all of a fused group by the group's input, also what this model does not call."""
    hosted = {stored: name for name, stored in planned.items()}
    result: dict[str, _Key] = {}
    for members in fused_groups(hosted).values():
        found = {keys[hosted[m]] for m in members if hosted[m] in keys}
        if len(found) == 1:  # more than one: refused by the check that follows
            result |= {hosted[m]: key for key in found for m in members if hosted[m] not in keys}
    return result


def _in_order(sites: Mapping[_Key, Sequence[str]], planned: Mapping[str, str]) -> list[_Key]:
    """As they are reached; the experts of one set by their numbers, in the place of the first."""
    experts = {key: expert_set(planned[hosted[0]]) for key, hosted in sites.items()}
    first: dict[str | None, int] = {}
    for key in sorted(sites):
        first.setdefault(experts[key], key[0])

    def place(key: _Key) -> tuple[int, int, int]:
        number = int(key[1]) if key[1].isdigit() else -1
        return (key[0] if experts[key] is None else first[experts[key]], number, key[0])

    return sorted(sites, key=place)


def _site(layer: nn.Module, planned: Mapping[str, str], hosted: Sequence[str]) -> Site:
    members = tuple(planned[name] for name in hosted)
    first = layer.get_submodule(hosted[0])
    assert isinstance(first, KeptLinear | PackedLinear)
    return Site(
        _site_name(members), members, tuple(hosted), first.in_features, is_expert=expert_set(members[0]) is not None
    )


def _site_name(members: Sequence[str]) -> str:
    groups = list(dict.fromkeys(group_name(m) for m in members))
    if len(groups) == 1:
        return groups[0]
    parts = [group.split(".") for group in groups]
    common = 0
    while len({tuple(p[: common + 1]) for p in parts}) == 1:
        common += 1
    return ".".join([*parts[0][:common], "+".join(".".join(p[common:]) for p in parts)])


def _check_fused(sites: Sequence[Site], planned: Mapping[str, str]) -> None:
    site_of = {member: place for place, site in enumerate(sites) for member in site.members}
    for name, members in fused_groups(planned.values()).items():
        if len({site_of[m] for m in members if m in site_of}) > 1:
            raise ModelError(
                f"{name}: the model gives its members different inputs, and engines fuse them into one layer",
                hint="keep them in 16 bits (--keep)",
            )
