"""From what a search picked to a recipe: the fewest rules that say the same."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from blockscale.checkpoint.groups import expert_set
from blockscale.checkpoint.source import Source
from blockscale.checkpoint.structure import kept_reason, matches, module_name
from blockscale.errors import RecipeError
from blockscale.quantization.plan import Plan, make_plan
from blockscale.quantization.recipe import KEEP, Recipe, Rule, rule_scheme
from blockscale.quantization.search.groups import KEPT, KV_GROUP, Group

_LAYER = re.compile(r"\.\d+\.")


def mixed_recipe(source: Source, recipe: Recipe, groups: Sequence[Group], picks: Sequence[int], name: str) -> Recipe:
    """`recipe` with rules for every group that is not stored by its default, and the cache's format.

    The recipe's own rules stay in front; groups that they name are not ours to decide about.
    """
    linears = [(group, pick) for group, pick in zip(groups, picks, strict=True) if group.name != KV_GROUP]
    rules: list[Rule] = []
    known = [module_name(tensor.name) for tensor in source.tensors.values()]
    free = [
        m
        for t in source.tensors.values()
        if not kept_reason(t.name, t.shape, source.config) and (m := module_name(t.name))
    ]
    kinds: dict[str, list[tuple[Group, int]]] = {}
    for group, pick in linears:
        if len(group.options) > 1:
            kinds.setdefault(group.kind, []).append((group, pick))
    for alike in kinds.values():
        chosen = {group.options[pick].name for group, pick in alike}
        members = {member for group, _ in alike for member in group.members}
        patterns = list(dict.fromkeys(p for group, _ in alike for p in _patterns(group, _LAYER.sub(".*.", group.name))))
        covered = {module for module in free if any(matches(pattern, module) for pattern in patterns)}
        if len(chosen) == 1 and covered == members:
            rules += _rules(alike[0], patterns, recipe)
            continue
        for group, pick in alike:
            rules += _rules((group, pick), _patterns(group, group.name), recipe)
    assert all(any(matches(rule.match, module) for module in known) for rule in rules)
    cache = next((g.options[p].name for g, p in zip(groups, picks, strict=True) if g.name == KV_GROUP), None)
    cache = recipe.kv_cache if cache is None else None if cache == KEPT else cache
    return replace(recipe, name=name, rules=(*recipe.rules, *rules), kv_cache=cache)


def _patterns(group: Group, name: str) -> list[str]:
    """Of the group's members, or where `name` is that of its like in any layer, of all of theirs."""
    if expert_set(group.members[0]) is not None:
        return [f"{name}.*" if "*" in name else name]
    if "*" not in name:
        return list(group.members)
    return list(dict.fromkeys(_LAYER.sub(".*.", member) for member in group.members))


def _rules(picked: tuple[Group, int], patterns: Sequence[str], recipe: Recipe) -> list[Rule]:
    group, pick = picked
    rule = group.options[pick].rule
    assert rule is not None
    return [] if rule == recipe.default_rule else [replace(rule, match=pattern) for pattern in patterns]


def check_recipe(source: Source, recipe: Recipe, groups: Sequence[Group], picks: Sequence[int]) -> Plan:
    """The recipe's plan. RecipeError unless it stores every member as it was picked."""
    plan = make_plan(source, recipe)
    wanted: Mapping[str, Rule] = {
        member: rule
        for group, pick in zip(groups, picks, strict=True)
        for member in group.members
        if (rule := group.options[pick].rule) is not None and rule.weight != KEEP
    }
    found = {module: linear.scheme for module, linear in plan.linears.items()}
    if found != {module: rule_scheme(rule) for module, rule in wanted.items()}:
        raise RecipeError(f"recipe {recipe.name} does not store what was picked", hint="please report this")
    return plan
