"""What a search decides about: groups of linears that must share a format, and what each can be stored as.

A group is a set that engines fuse, or all experts of a layer. Its options are the recipe's own format, FP8 where the
dialect's loaders mix it in, and the 16 bits that it has. Groups that a rule of the recipe names have that one option.
"""

import json
import math
import re
from dataclasses import dataclass

import torch

from blockscale.checkpoint.groups import expert_set
from blockscale.checkpoint.linear import W4A4, W4A16, QuantizedLinear, Scheme
from blockscale.checkpoint.output import MAX_SHARD_BYTES
from blockscale.checkpoint.reader import DIALECTS
from blockscale.checkpoint.source import Source
from blockscale.checkpoint.structure import matches
from blockscale.checkpoint.tensors import DTYPE_NAMES
from blockscale.errors import RecipeError
from blockscale.formats.tensor import empty_like_quantized
from blockscale.planning.models.architecture import from_config
from blockscale.planning.speed.roofline import CACHE_BYTES
from blockscale.quantization.plan import Plan, PlannedLinear, kv_modules
from blockscale.quantization.recipe import KEEP, Recipe, Rule, rule_scheme

KEPT = "16-bit"
KV_GROUP = "KV cache"
# What vLLM, SGLang and TensorRT-LLM load beside NVFP4 in a mixed checkpoint of each dialect.
_EIGHT_BITS = {
    "modelopt": Rule("*", "fp8", "fp8"),
    "compressed-tensors": Rule("*", "fp8-channel", "fp8-token"),
}
_KV_OPTIONS = {"modelopt": ("fp8", "nvfp4"), "compressed-tensors": ("fp8",)}


@dataclass(frozen=True)
class Option:
    """num_bytes     of its tensors; of the KV cache at the context that is asked about
    header_bytes  about what those tensors take in a file's header
    bits          of all elements together
    rule          None for a KV cache
    """

    name: str
    num_bytes: int
    header_bytes: int = 0
    bits: float = 0.0
    rule: Rule | None = None


@dataclass(frozen=True)
class Group:
    """`members`: linears; none for the KV cache."""

    name: str
    members: tuple[str, ...]
    num_parameters: int
    options: tuple[Option, ...]

    @property
    def kind(self) -> str:
        """What groups of other layers share with this one: its name without the layers' numbers."""
        return re.sub(r"\.\d+\.", ".*.", self.name)


def find_groups(source: Source, recipe: Recipe, plan: Plan) -> tuple[Group, ...]:
    """The groups of the linears that `plan`, made by `recipe`, stores."""
    if recipe.weight == KEEP:
        raise RecipeError(
            f"recipe {recipe.name} keeps what no rule names: there is nothing to mix", hint="give nvfp4, or another"
        )
    members: dict[str, list[str]] = {}
    for name, linears in plan.groups.items():
        members.setdefault(expert_set(linears[0]) or name, []).extend(linears)
    offset = min(source.num_bytes, MAX_SHARD_BYTES) // 2  # it is its number of digits that counts
    return tuple(_group(name, [plan.linears[m] for m in ms], recipe, offset) for name, ms in members.items())


def _group(name: str, linears: list[PlannedLinear], recipe: Recipe, offset: int) -> Group:
    own = next((rule for rule in recipe.rules if matches(rule.match, linears[0].module)), None)
    rules = [own] if own is not None else _rules(recipe, linears)
    modules = tuple(linear.module for linear in linears)
    num_parameters = sum(math.prod(linear.shape) for linear in linears)
    return Group(name, modules, num_parameters, tuple(_option(rule, linears, recipe.dialect, offset) for rule in rules))


def _rules(recipe: Recipe, linears: list[PlannedLinear]) -> list[Rule]:
    default = recipe.default_rule
    scheme = rule_scheme(default)
    rules = [default]
    is_mixed = recipe.dialect != "modelopt" or scheme in (W4A4, W4A16)
    # one scale a matrix: a stack of experts has no place for it
    if scheme.weight.element.bits < 8 and is_mixed and all(len(linear.shape) == 2 for linear in linears):
        rules.append(_EIGHT_BITS[recipe.dialect])
    return [*rules, Rule("*", KEEP)]


def _option(rule: Rule, linears: list[PlannedLinear], dialect: str, offset: int) -> Option:
    tensors: dict[str, Shaped] = {}
    bits = 0.0
    for linear in linears:
        count = math.prod(linear.shape)
        if rule.weight == KEEP:
            tensors[linear.tensor.name] = (linear.tensor.dtype, tuple(linear.tensor.shape))
            bits += 8 * linear.tensor.dtype.itemsize * count
        else:
            scheme = rule_scheme(rule)
            tensors |= _stored(linear, scheme, dialect)
            bits += scheme.weight.bits_per_element * count
    num_bytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in tensors.values())
    header = sum(_entry_bytes(name, dtype, shape, offset) for name, (dtype, shape) in tensors.items())
    return Option(KEPT if rule.weight == KEEP else rule.weight, num_bytes, header, bits, rule)


def _entry_bytes(name: str, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> int:
    """What a tensor at `offset` takes in a safetensors header, with its comma."""
    entry = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset]}
    return len(json.dumps({name: entry}, separators=(",", ":"))) - 1


Shaped = tuple[torch.dtype, tuple[int, ...]]


def _stored(linear: PlannedLinear, scheme: Scheme, dialect: str) -> dict[str, Shaped]:
    weight = empty_like_quantized(linear.shape, scheme.weight, linear.tensor.dtype)
    scalar = torch.empty((), device="meta") if scheme.needs_input_scale else None
    stored = DIALECTS[dialect].to_tensors(linear.module, QuantizedLinear(scheme, weight, scalar))
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()}


def cache_group(source: Source, recipe: Recipe, context: int | None) -> Group | None:
    """The KV cache's formats with the bytes of one sequence; None where it stays in 16 bits unasked.

    A recipe that names one leaves no choice. UsageError for a config without what the cache's size follows from.
    """
    if context is None and recipe.kv_cache is None:
        return None
    kv_modules(source)
    names = (recipe.kv_cache,) if recipe.kv_cache else (*_KV_OPTIONS[recipe.dialect], KEPT)
    elements = 0 if context is None else from_config(source.config).cache_elements(context)
    sizes = {name: round(elements * CACHE_BYTES["bf16" if name == KEPT else name]) for name in names}
    return Group(KV_GROUP, (), 0, tuple(Option(name, num_bytes) for name, num_bytes in sizes.items()))
