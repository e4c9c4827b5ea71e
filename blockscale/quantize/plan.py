"""Which tensor of a model is stored as what, decided from names, shapes and config alone."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blockscale.checkpoint.linear import Scheme
from blockscale.checkpoint.source import Source, SourceTensor
from blockscale.errors import RecipeError
from blockscale.formats.spec import Granularity
from blockscale.formats.tensor import FLOAT_DTYPES
from blockscale.quantize.groups import fused_groups
from blockscale.quantize.recipe import KEEP, Recipe, Rule, matches, rule_scheme
from blockscale.quantize.weight import ScaleMethod

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
        "*mm_projector*",
        "*multi_modal*",
        "*multimodal*",
    ),
    "convolution": ("*conv*",),
    "draft layer": ("mtp*", "*.mtp.*", "*nextn*", "*eagle*"),
}
# Models whose stacks of experts are stored [E, K, N], input dimension in the middle.
_TRANSPOSED_EXPERTS = ("llama4", "llama4_text", "gpt_oss")
_STACK_NAMES = ("gate_up_proj", "down_proj")


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

    @property
    def num_quantized_parameters(self) -> int:
        return sum(math.prod(linear.shape) for linear in self.linears.values())


def make_plan(source: Source, recipe: Recipe, *, strict: bool = False) -> Plan:
    """RecipeError if the recipe (or one pattern of it) matches nothing; under `strict` also if a shape forces a
    weight that the recipe names to stay in 16 bits."""
    kept: dict[str, str] = {}
    notices: list[str] = []
    linears: dict[str, PlannedLinear] = {}
    for tensor in source.tensors.values():
        module = module_name(tensor.name)
        reason = _structural_reason(module, tensor, source.config)
        rule = _rule_for(module, recipe, is_default_kept=reason is not None)
        if rule is None or tensor.dtype not in FLOAT_DTYPES or len(tensor.shape) not in (2, 3):
            kept[module] = reason or "the recipe keeps it"
            continue
        planned = _planned(module, tensor, rule, source.config)
        problem = _shape_problem(planned)
        if problem:
            if strict:
                raise RecipeError(f"{module}: {problem}", hint="drop --strict, or keep it with --keep")
            notices.append(f"{module} stays in 16 bits: {problem}")
            kept[module] = problem
            continue
        linears[module] = planned
    linears = _without_broken_groups(linears, kept, notices, list(map(module_name, source.tensors)))
    _check_patterns(recipe, source)
    if not linears:
        raise RecipeError(
            f"recipe {recipe.name} matches no weight of {source.path}",
            hint="no tensor looks like a linear layer; name them by rules in a recipe file",
        )
    copied = tuple(t for t in source.tensors.values() if module_name(t.name) not in linears)
    return Plan(linears, fused_groups(linears), kept, copied, tuple(notices))


def module_name(tensor_name: str) -> str:
    """`a.b.weight` -> `a.b`; a bare parameter (stacks of experts, biases) keeps its full name."""
    return tensor_name.removesuffix(".weight")


def _structural_reason(module: str, tensor: SourceTensor, config: Mapping[str, Any]) -> str | None:
    """Why a tensor is not a linear weight to quantize by default; None if it is one."""
    if not tensor.name.endswith(".weight") and not _is_expert_stack(tensor, config):
        return "not a linear weight"
    if len(tensor.shape) < 2:
        return "norm, bias or scalar"
    for reason, patterns in _ALWAYS_KEPT.items():
        if any(matches(pattern, module) for pattern in patterns):
            return reason
    text_config = config.get("text_config") or config
    num_layers = text_config.get("num_hidden_layers")
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", module)
    if layer and num_layers and int(layer[1]) >= num_layers and not config.get("is_encoder_decoder"):
        return "draft layer"
    num_experts = next(
        (text_config[k] for k in ("num_experts", "num_local_experts", "n_routed_experts") if text_config.get(k)), None
    )
    if num_experts and len(tensor.shape) == 2 and tensor.shape[0] == num_experts and ".experts." not in module:
        return "router"
    return None


def _is_expert_stack(tensor: SourceTensor, config: Mapping[str, Any]) -> bool:
    model_type = (config.get("text_config") or config).get("model_type")
    leaf = tensor.name.rpartition(".")[2]
    is_stack = len(tensor.shape) == 3 and ".experts." in tensor.name and leaf in _STACK_NAMES
    return is_stack and model_type in _TRANSPOSED_EXPERTS


def _rule_for(module: str, recipe: Recipe, *, is_default_kept: bool) -> Rule | None:
    """The rule that stores the module, or None if it is kept. `keep` beats rules, rules beat the usual exceptions."""
    if any(matches(pattern, module) for pattern in recipe.keep):
        return None
    for rule in recipe.rules:
        if matches(rule.match, module):
            # a broad pattern does not mean the embeddings it happens to cover
            if is_default_kept and any(c in rule.match for c in "*?["):
                break
            return None if rule.weight == KEEP else rule
    return None if is_default_kept else recipe.default_rule


def _planned(module: str, tensor: SourceTensor, rule: Rule, config: Mapping[str, Any]) -> PlannedLinear:
    is_transposed = _is_expert_stack(tensor, config)
    shape = (*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2]) if is_transposed else tensor.shape
    return PlannedLinear(module, tensor, rule_scheme(rule), ScaleMethod(rule.scale), shape, is_transposed)


def _shape_problem(linear: PlannedLinear) -> str | None:
    fmt = linear.scheme.weight
    if len(linear.shape) == 3 and not linear.is_transposed:
        return "a 3-D weight whose layout is not known"
    if len(linear.shape) == 3 and fmt.granularity is not Granularity.BLOCK:
        return f"{fmt.name} is not stored for stacks of experts"
    if fmt.granularity is Granularity.BLOCK and linear.shape[-1] % fmt.block_size:
        return f"K = {linear.shape[-1]} is not a multiple of {fmt.block_size}"
    return None


def _without_broken_groups(
    linears: dict[str, PlannedLinear], kept: dict[str, str], notices: list[str], modules: list[str]
) -> dict[str, PlannedLinear]:
    """Engines refuse a fused layer that is quantized in part or in two ways: keep it whole, or fail."""
    result = dict(linears)
    for name, members in fused_groups(modules).items():
        planned = [linears[m] for m in members if m in linears]
        if not planned or len(members) == 1:
            continue
        if len(planned) < len(members):
            missing = [m for m in members if m not in linears]
            notices.append(f"{name} stays in 16 bits as a whole: engines fuse it, and {missing[0]} is kept")
            for linear in planned:
                kept[linear.module] = f"fused with {missing[0]}"
                del result[linear.module]
        elif len({(linear.scheme, linear.method) for linear in planned}) > 1:
            raise RecipeError(
                f"the recipe stores the members of {name} in different ways",
                hint="engines fuse them: give them one rule",
            )
    return result


def _check_patterns(recipe: Recipe, source: Source) -> None:
    modules = [module_name(name) for name in source.tensors]
    for pattern in (*recipe.keep, *(rule.match for rule in recipe.rules)):
        if not any(matches(pattern, module) for module in modules):
            raise RecipeError(
                f"pattern '{pattern}' matches no module of {source.path}",
                hint=f"modules are named like '{modules[-1]}'",
            )


def kept_modules(plan: Plan) -> list[str]:
    """What loaders must leave alone: modules with a weight matrix that is not quantized, towers as wildcards."""
    names, towers = [], []
    for tensor in plan.copied:
        module = module_name(tensor.name)
        if len(tensor.shape) < 2 or not tensor.name.endswith(".weight"):
            continue
        if plan.kept.get(module) == "vision or audio tower":
            towers.append(_tower_prefix(module) + "*")
        else:
            names.append(module)
    # a tied head has no tensor, but loaders build the layer all the same
    return list(dict.fromkeys(["lm_head", *names, *towers]))


def _tower_prefix(module: str) -> str:
    """Up to and including the first component that is the tower's name."""
    parts = module.split(".")
    patterns = _ALWAYS_KEPT["vision or audio tower"]
    for end in range(1, len(parts) + 1):
        if any(matches(pattern, parts[end - 1]) for pattern in patterns):
            return ".".join(parts[:end])
    return module
