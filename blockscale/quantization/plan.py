"""Which tensor of a model is stored as what, decided from names, shapes and config alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockscale.checkpoint.groups import expert_set, fused_groups
from blockscale.checkpoint.linear import Scheme
from blockscale.checkpoint.source import Source, SourceTensor
from blockscale.checkpoint.structure import (
    UNKNOWN_STACK,
    is_expert_stack,
    kept_reason,
    matches,
    module_name,
    text_config,
    unquantized_modules,
)
from blockscale.errors import RecipeError
from blockscale.formats.spec import Granularity
from blockscale.formats.tensor import FLOAT_DTYPES
from blockscale.quantization.recipe import KEEP, Recipe, Rule, names_exactly, rule_scheme
from blockscale.quantization.weight import ScaleMethod

# What no rule can turn into a quantized linear.
_NOT_LINEAR = ("embedding", "norm", "convolution", "not a linear weight", "norm, bias or scalar", UNKNOWN_STACK)
# Models whose weights are stored [K, N]: their blocks would run along the wrong dimension.
_INPUT_FIRST = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")


@dataclass(frozen=True)
class PlannedLinear:
    """A tensor to quantize. `shape` is [N, K] or [E, N, K] as it will be quantized."""

    module: str
    tensor: SourceTensor
    scheme: Scheme
    method: ScaleMethod
    shape: tuple[int, ...]
    is_transposed: bool = False


@dataclass(frozen=True)
class Plan:
    """`groups`: fused groups of linears. `kept`: module -> why it stays. `copied`: their tensors. `notices`: what a
    user should know."""

    linears: Mapping[str, PlannedLinear]
    groups: Mapping[str, tuple[str, ...]]
    kept: Mapping[str, str]
    copied: tuple[SourceTensor, ...]
    notices: tuple[str, ...]


def make_plan(source: Source, recipe: Recipe, *, strict: bool = False) -> Plan:
    """RecipeError if the recipe (or one pattern of it) matches nothing; under `strict` also if a shape forces a
    weight that the recipe names to stay in 16 bits."""
    kept: dict[str, str] = {}
    notices: list[str] = []
    linears: dict[str, PlannedLinear] = {}
    used: set[Rule] = set()
    for tensor in source.tensors.values():
        module = module_name(tensor.name)
        reason = kept_reason(tensor.name, tensor.shape, source.config)
        rule = _rule_for(module, recipe, reason)
        if rule is None:
            kept[module] = reason or "the recipe keeps it"
            if reason == UNKNOWN_STACK and not any(matches(pattern, module) for pattern in recipe.keep):
                notices.append(f"{module} stays in 16 bits: {reason}")
            continue
        used.add(rule)
        planned = _planned(module, tensor, rule, source.config)
        problem = _shape_problem(planned, source.config)
        if problem:
            if strict:
                raise RecipeError(f"{module}: {problem}", hint="drop --strict, or keep it with --keep")
            notices.append(f"{module} stays in 16 bits: {problem}")
            kept[module] = problem
            continue
        linears[module] = planned
    linears = _without_broken_groups(linears, kept, notices, source)
    _check_patterns(recipe, source)
    notices += [
        f"rule '{rule.match}' stores nothing: what it covers is kept, or another rule's"
        for rule in recipe.rules
        if rule.weight != KEEP and rule not in used
    ]
    if not linears:
        raise RecipeError(
            f"recipe {recipe.name} matches no weight of {source.path}",
            hint=notices[0] if notices else "no tensor looks like a linear layer; name them by rules in a recipe file",
        )
    copied = tuple(t for t in source.tensors.values() if module_name(t.name) not in linears)
    return Plan(linears, fused_groups(linears), kept, copied, tuple(notices))


def _rule_for(module: str, recipe: Recipe, reason: str | None) -> Rule | None:
    """The rule that stores the module, or None if it is kept. `keep` beats rules, rules beat the usual exceptions
    (`reason`), but only by name: a broad pattern does not mean the router or the embedding that it happens to cover."""
    if any(matches(pattern, module) for pattern in recipe.keep):
        return None
    rule = next((rule for rule in recipe.rules if matches(rule.match, module)), recipe.default_rule)
    if rule.weight == KEEP or (reason is not None and not names_exactly(rule.match, module)):
        return None
    if reason in _NOT_LINEAR:
        raise RecipeError(f"rule '{rule.match}' asks for {rule.weight}, but this is no linear layer: {reason}")
    return rule


def _planned(module: str, tensor: SourceTensor, rule: Rule, config: Mapping[str, Any]) -> PlannedLinear:
    is_transposed = is_expert_stack(tensor.name, tensor.shape, config)
    shape = (*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2]) if is_transposed else tensor.shape
    return PlannedLinear(module, tensor, rule_scheme(rule), ScaleMethod(rule.scale), shape, is_transposed)


def _shape_problem(linear: PlannedLinear, config: Mapping[str, Any]) -> str | None:
    fmt = linear.scheme.weight
    if text_config(config).get("model_type") in _INPUT_FIRST:
        return "a weight stored with its input dimension first"
    if linear.tensor.dtype not in FLOAT_DTYPES:
        return f"a weight of {linear.tensor.dtype}"
    if len(linear.shape) != 2 and not linear.is_transposed:
        return f"a weight of {len(linear.shape)} dimensions whose layout is not known"
    if len(linear.shape) == 3 and fmt.granularity is not Granularity.BLOCK:
        return f"{fmt.name} is not stored for stacks of experts"
    if fmt.granularity is Granularity.BLOCK and linear.shape[-1] % fmt.block_size:
        return f"K = {linear.shape[-1]} is not a multiple of {fmt.block_size}"
    return None


def _without_broken_groups(
    linears: dict[str, PlannedLinear], kept: dict[str, str], notices: list[str], source: Source
) -> dict[str, PlannedLinear]:
    """Engines refuse a fused layer, or experts of one layer, that are quantized in part or in two ways: such a set is
    kept whole, or it is an error."""
    result = dict(linears)
    matrices = [module_name(t.name) for t in source.tensors.values() if _is_matrix(t, source.config)]
    for name, members in fused_groups(matrices).items():
        planned = _whole_or_nothing(name, members, result, kept, notices)
        if len({(linear.scheme, linear.method) for linear in planned}) > 1:
            raise _in_two_ways(name)
    expert_sets: dict[str, list[str]] = {}
    for module in matrices:
        if (experts := expert_set(module)) is not None:
            expert_sets.setdefault(experts, []).append(module)
    for name, inside in expert_sets.items():
        if len({linear.scheme for linear in _whole_or_nothing(name, inside, result, kept, notices)}) > 1:
            raise _in_two_ways(name)
    return result


def _is_matrix(tensor: SourceTensor, config: Mapping[str, Any]) -> bool:
    return len(tensor.shape) >= 2 and (
        tensor.name.endswith(".weight") or is_expert_stack(tensor.name, tensor.shape, config)
    )


def _whole_or_nothing(
    name: str,
    members: Sequence[str],
    linears: dict[str, PlannedLinear],
    kept: dict[str, str],
    notices: list[str],
) -> list[PlannedLinear]:
    """The set's linears if all its members have one; else none, and those that there were become kept."""
    missing = [m for m in members if m not in linears]
    planned = [linears[m] for m in members if m in linears]
    if not missing or not planned:
        return planned
    notices.append(f"{name} stays in 16 bits as a whole: engines fuse it, and {missing[0]} is kept")
    for linear in planned:
        kept[linear.module] = f"fused with {missing[0]}"
        del linears[linear.module]
    return []


def _in_two_ways(name: str) -> RecipeError:
    return RecipeError(
        f"the recipe stores the members of {name} in different ways", hint="engines fuse them: give them one rule"
    )


def _check_patterns(recipe: Recipe, source: Source) -> None:
    modules = [module_name(name) for name in source.tensors]
    for pattern in (*recipe.keep, *(rule.match for rule in recipe.rules)):
        if not any(matches(pattern, module) for module in modules):
            raise RecipeError(
                f"pattern '{pattern}' matches no module of {source.path}",
                hint=f"modules are named like '{modules[-1]}'" if modules else "the model has no tensors",
            )


def kept_modules(plan: Plan) -> list[str]:
    """What loaders must leave alone, for a config's list of them."""
    return unquantized_modules(plan.linears, {t.name: t.shape for t in plan.copied}, plan.kept)


def kv_modules(source: Source) -> tuple[str, ...]:
    """Attention modules whose cache can have scales: those with a k_proj and a v_proj. RecipeError without any."""
    suffix = ".k_proj.weight"
    found = tuple(n.removesuffix(suffix) for n in source.tensors if n.endswith(suffix))
    if not found:
        raise RecipeError("the model has no k_proj and v_proj to attach KV-cache scales to", hint="drop --kv-cache")
    return found
