"""What each engine leaves in 16 bits: how it matches a config's list against the layers that it builds.

An entry of the list covers a layer

* in vLLM, if it is the name of each module that the layer fuses, or lies anywhere in the layer's own name, or matches
  that as a glob;
* in SGLang, if it is the name of each module that the layer fuses, or matches the layer's own name as a glob, or one
  dotted part of it;
* in TensorRT-LLM, if it matches the layer's own name as a glob, or that of one module that it fuses;
* in compressed-tensors, whatever the engine, if it is a module's name, or `re:` and a regular expression that matches
  its start, or its class.

Experts are one layer, `...mlp.experts`. Source: vLLM 0.33, SGLang 0.5.23, TensorRT-LLM, compressed-tensors 0.20.
"""

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from blockscale.checkpoint.groups import FUSED_LEAVES, expert_set, group_name
from blockscale.checkpoint.patterns import compiled, is_pattern

VLLM, SGLANG, TENSORRT_LLM = "vLLM", "SGLang", "TensorRT-LLM"

_QKV, _GATE_UP, _W1_W3, _MLA_A, _LINEAR_QKVZ, _LINEAR_BA = FUSED_LEAVES
# What an engine calls the layer that it makes of such leaves.
_FUSED_NAMES: dict[tuple[str, ...], dict[str, str]] = {
    _QKV: dict.fromkeys((VLLM, SGLANG, TENSORRT_LLM), "qkv_proj"),
    _GATE_UP: dict.fromkeys((VLLM, SGLANG, TENSORRT_LLM), "gate_up_proj"),
    _W1_W3: dict.fromkeys((VLLM, SGLANG, TENSORRT_LLM), "gate_up_proj"),
    _MLA_A: {
        VLLM: "fused_qkv_a_proj",
        SGLANG: "fused_qkv_a_proj_with_mqa",
        TENSORRT_LLM: "kv_a_proj_with_mqa",
    },
    _LINEAR_QKVZ: dict.fromkeys((VLLM, SGLANG, TENSORRT_LLM), "in_proj_qkvz"),
    _LINEAR_BA: dict.fromkeys((VLLM, SGLANG, TENSORRT_LLM), "in_proj_ba"),
}
_LEAVES_OF = {leaf: leaves for leaves in FUSED_LEAVES for leaf in leaves}
# Where the parts of a multimodal model lie: one file, its model class and an engine may each say it differently.
_ROOTS = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
# SGLang takes these for part of the fused layer wherever they stand at the end of an entry.
_SGLANG_PARTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
_WILD = re.compile(r"[*?\[]")

Match = Callable[[str], bool]


@dataclass(frozen=True)
class Layer:
    """What engines build as one: a module, those that they fuse, or all experts of a layer."""

    name: str
    members: tuple[str, ...]

    @property
    def is_experts(self) -> bool:
        return expert_set(self.members[0]) is not None

    def name_in(self, engine: str) -> str:
        if self.is_experts or len(self.members) == 1:
            return self.name
        parent, dot, leaf = self.members[0].rpartition(".")
        return parent + dot + _FUSED_NAMES[_LEAVES_OF[leaf]][engine] if leaf in _LEAVES_OF else self.name


@dataclass(frozen=True)
class Ruling:
    """entry  what leaves the layer in 16 bits; None if nothing does
    part   the members that the list names, if it does not name all that are fused: engines stop
    """

    entry: str | None = None
    part: tuple[str, ...] = ()


Rules = Callable[[Layer], Ruling]


def engine_layers(modules: Iterable[str]) -> list[Layer]:
    """The layers that engines make of checkpoint modules, in the order of their first members."""
    members: dict[str, list[str]] = {}
    for module in modules:
        members.setdefault(expert_set(module) or group_name(module), []).append(module)
    return [
        Layer(found[0] if len(found) == 1 and expert_set(found[0]) is None else name, tuple(found))
        for name, found in members.items()
    ]


def aliases(layer: Layer) -> Iterator[Layer]:
    """What else the layer of a multimodal model may be called."""
    root = next(root for root in _ROOTS if layer.name.startswith(root))
    for other in _ROOTS:
        if other != root:
            yield Layer(*_moved(layer, root, other))


def _moved(layer: Layer, root: str, other: str) -> tuple[str, tuple[str, ...]]:
    name, *members = (other + name.removeprefix(root) for name in (layer.name, *layer.members))
    return name, tuple(members)


# ---------------------------------------------------------------- engines


def vllm(entries: Sequence[str]) -> Rules:
    exact = frozenset(entries)
    globs = [(entry, _glob(entry)) for entry in entries if _WILD.search(entry)]
    expert_entries = [entry for entry in entries if "experts" in entry]

    def decide(layer: Layer) -> Ruling:
        name = layer.name_in(VLLM)
        if layer.is_experts:
            ruling = Ruling(next((entry for entry in expert_entries if name in entry), None))
        else:
            ruling = _by_members(layer, exact)
        if ruling.entry is not None:
            return ruling
        inside = (entry for entry in entries if entry in name)
        matching = (entry for entry, matches in globs if matches(name))
        return Ruling(next(inside, None) or next(matching, None))

    return decide


def sglang(entries: Sequence[str]) -> Rules:
    exact = frozenset(entries)
    wild = [(entry, _sglang_glob(entry)) for entry in entries if _WILD.search(entry)]
    of_parts = [(entry, matches) for entry, matches in wild if "." not in entry]
    tails = {entry: entry.rpartition(".")[2] for entry in entries}
    fused_parts = {entry: tail for entry, tail in tails.items() if tail in _SGLANG_PARTS}

    def decide(layer: Layer) -> Ruling:
        name = layer.name_in(SGLANG)
        if not layer.is_experts:
            ruling = _by_members(layer, exact)
            if ruling.entry is not None:
                return ruling
        parts = name.split(".")
        named = next((part for part in (name, *parts) if part in exact), None)
        if named is None:
            named = next((entry for entry, matches in wild if matches(name)), None)
        if named is None:
            named = next((entry for entry, matches in of_parts if any(map(matches, parts))), None)
        if named is None:
            named = next((entry for entry, tail in fused_parts.items() if tail in parts[-1]), None)
        return Ruling(named)

    return decide


def tensorrt_llm(entries: Sequence[str]) -> Rules:
    exact = frozenset(entries)
    globs = [(entry, _glob(entry)) for entry in entries if _WILD.search(entry)]

    def decide(layer: Layer) -> Ruling:
        name = layer.name_in(TENSORRT_LLM)
        names = (name,) if layer.is_experts else dict.fromkeys((name, *layer.members))
        found = next((n for n in names if n in exact), None)
        return Ruling(found or next((e for e, matches in globs if any(map(matches, names))), None))

    return decide


def compressed_tensors(entries: Sequence[str]) -> Rules:
    """Of every engine. Fused members must agree; each expert counts for itself."""
    exact = frozenset(entries)
    covers = entry_of_module(entries)

    def decide(layer: Layer) -> Ruling:
        if layer.name in exact:
            return Ruling(layer.name)
        found = {member: entry for member in layer.members if (entry := covers(member)) is not None}
        part = tuple(found) if len(found) < len(layer.members) else ()
        return Ruling(next(iter(found.values()), None), part)

    return decide


ENGINES: dict[str, Callable[[Sequence[str]], Rules]] = {
    VLLM: vllm,
    SGLANG: sglang,
    TENSORRT_LLM: tensorrt_llm,
}


def entry_of_module(entries: Sequence[str]) -> Callable[[str], str | None]:
    """Module -> the entry of a compressed-tensors list (`ignore`, or a group's `targets`) that covers it."""
    exact = frozenset(entries)
    patterns = [(entry, compiled(entry)) for entry in entries if is_pattern(entry)]
    whole_class = next((entry for entry in entries if entry == "Linear"), None)

    def covers(module: str) -> str | None:
        if module in exact:
            return module
        return next((entry for entry, pattern in patterns if pattern.match(module)), whole_class)

    return covers


def _by_members(layer: Layer, exact: frozenset[str]) -> Ruling:
    """By the names of the modules that the layer is made of."""
    named = tuple(member for member in layer.members if member in exact)
    return Ruling(named[0] if named else None, named if len(named) < len(layer.members) else ())


def _glob(pattern: str) -> Match:
    if not _WILD.search(pattern[:-1]) and pattern.endswith("*"):  # by far the most usual
        start = pattern[:-1]
        return lambda name: name.startswith(start)
    compiled = re.compile(fnmatch.translate(pattern))
    return lambda name: compiled.match(name) is not None


def _sglang_glob(pattern: str) -> Match:
    """SGLang makes a regular expression of it, where stars match anything and dots are plain. What else has a meaning
    there is left out: nobody writes that into such a list, and it could keep a matcher busy for ever."""
    if re.search(r"[?+(){}|\\^$]", pattern):
        return lambda name: False
    return _glob(pattern)
