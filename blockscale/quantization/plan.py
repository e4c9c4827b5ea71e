"""Which tensor of a model is stored as what, decided from names, shapes and config alone."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockscale.checkpoint.linear import Scheme
from blockscale.checkpoint.source import Source, SourceTensor
from blockscale.errors import RecipeError
from blockscale.formats.spec import Granularity
from blockscale.formats.tensor import FLOAT_DTYPES
from blockscale.quantization.groups import expert_set, fused_groups
from blockscale.quantization.recipe import KEEP, Recipe, Rule, matches, names_exactly, rule_scheme
from blockscale.quantization.weight import ScaleMethod

# Module names that stay in 16 bits whatever their shape, by why.
_ALWAYS_KEPT = {
    "embedding": ("*embed*", "*wte", "*wpe", "*word_embeddings*", "*shared"),
    "output head": ("*lm_head*", "*embed_out*", "score", "*classifier*", "output"),
    "norm": ("*norm*", "*ln_?"),
    "router": ("*router*", "*.gate", "*shared_expert_gate", "*.gate.wg"),
    "vision or audio tower": (
        "*vision*",
        "*visual*",
        "*image*",
        "*audio*",
        "*speech*",
        "*projector*",
        "*resampler*",
        "*multi_modal*",
        "*multimodal*",
        "vpm",  # MiniCPM-V
        "mlp1",  # InternVL's projector
    ),
    "convolution": ("*conv*",),
    "absorbed into attention": ("*.kv_b_proj",),  # MLA: engines take it apart, and not all can from 4 bits
    "state-space parameter": ("*.dt_proj", "*.x_proj"),
    "draft layer": ("*mtp*", "*nextn*", "*eagle*"),
}
NOT_RUN = ("vision or audio tower", "draft layer")  # what text does not go through
_UNKNOWN_STACK = "a stack of experts whose layout is not known"
# What no rule can turn into a quantized linear.
_NOT_LINEAR = ("embedding", "norm", "convolution", "not a linear weight", "norm, bias or scalar", _UNKNOWN_STACK)
# Where configs of multimodal models keep the language model's.
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Models whose stacks of experts are stored [E, K, N], input dimension in the middle.
_TRANSPOSED_EXPERTS = ("llama4", "llama4_text", "gpt_oss")
_STACK_NAMES = ("gate_up_proj", "down_proj")
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
        reason = _structural_reason(module, tensor, source.config)
        rule = _rule_for(module, recipe, reason)
        if rule is None:
            kept[module] = reason or "the recipe keeps it"
            if reason == _UNKNOWN_STACK and not any(matches(pattern, module) for pattern in recipe.keep):
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


def module_name(tensor_name: str) -> str:
    """`a.b.weight` -> `a.b`; a bare parameter (stacks of experts, biases) keeps its full name."""
    return tensor_name.removesuffix(".weight")


def _structural_reason(module: str, tensor: SourceTensor, config: Mapping[str, Any]) -> str | None:
    """Why a tensor is not a linear weight to quantize by default; None if it is one."""
    if not tensor.name.endswith(".weight") and not _is_expert_stack(tensor, config):
        is_stack = len(tensor.shape) == 3 and expert_set(module) is not None
        return _UNKNOWN_STACK if is_stack else "not a linear weight"
    if len(tensor.shape) < 2:
        return "norm, bias or scalar"
    for reason, patterns in _ALWAYS_KEPT.items():
        if any(matches(pattern, module) for pattern in patterns):
            return reason
    text_config = _text_config(config)
    num_layers = text_config.get("num_hidden_layers")
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", module)
    if layer and isinstance(num_layers, int) and int(layer[1]) >= num_layers and not config.get("is_encoder_decoder"):
        return "draft layer"
    num_experts = next((text_config[key] for key in _NUM_EXPERTS if text_config.get(key)), None)
    is_inside = expert_set(module) is not None or module.endswith("_proj")
    return "router" if num_experts == tensor.shape[0] and len(tensor.shape) == 2 and not is_inside else None


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config."""
    inner = next((config[key] for key in _TEXT_CONFIGS if isinstance(config.get(key), Mapping)), None)
    return config if inner is None else _text_config(inner)


def _is_expert_stack(tensor: SourceTensor, config: Mapping[str, Any]) -> bool:
    model_type = _text_config(config).get("model_type")
    leaf = tensor.name.rpartition(".")[2]
    is_stack = len(tensor.shape) == 3 and ".experts." in tensor.name and leaf in _STACK_NAMES
    return is_stack and model_type in _TRANSPOSED_EXPERTS


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
    is_transposed = _is_expert_stack(tensor, config)
    shape = (*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2]) if is_transposed else tensor.shape
    return PlannedLinear(module, tensor, rule_scheme(rule), ScaleMethod(rule.scale), shape, is_transposed)


def _shape_problem(linear: PlannedLinear, config: Mapping[str, Any]) -> str | None:
    fmt = linear.scheme.weight
    if _text_config(config).get("model_type") in _INPUT_FIRST:
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
    return len(tensor.shape) >= 2 and (tensor.name.endswith(".weight") or _is_expert_stack(tensor, config))


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
    """What loaders must leave alone: modules with a weight matrix that is not quantized; towers, and the experts of a
    layer, as wildcards."""
    names, wildcards = [], []
    quantized_experts = {expert_set(module) for module in plan.linears}
    for tensor in plan.copied:
        module = module_name(tensor.name)
        experts = expert_set(module)
        if len(tensor.shape) < 2 or not (tensor.name.endswith(".weight") or experts):
            continue
        if plan.kept.get(module) == "vision or audio tower":
            wildcards.append(_tower_prefix(module) + "*")
        elif experts is not None and experts not in quantized_experts:
            wildcards.append(experts + "*")
        elif tensor.name.endswith(".weight"):
            names.append(module)
    # a tied head has no tensor, but loaders build the layer all the same
    head = [] if any(m.rpartition(".")[2] == "lm_head" for m in plan.linears) else ["lm_head"]
    return list(dict.fromkeys([*head, *names, *wildcards]))


def _tower_prefix(module: str) -> str:
    """Up to and including the first component that is the tower's name."""
    parts = module.split(".")
    patterns = _ALWAYS_KEPT["vision or audio tower"]
    for end in range(1, len(parts) + 1):
        if any(matches(pattern, parts[end - 1]) for pattern in patterns):
            return ".".join(parts[:end])
    return module
