"""The lists of what stays in 16 bits, against what the files hold: each engine reads them by its own rules."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from blockscale.checkpoint.dialects.stored import Claim, StoredModel
from blockscale.checkpoint.faults import Fault
from blockscale.checkpoint.folder import HF_QUANT_CONFIG
from blockscale.checkpoint.patterns import pattern_problem
from blockscale.checkpoint.structure import HEAD, text_config
from blockscale.inspection.checks.exclusion import (
    ENGINES,
    TENSORRT_LLM,
    VLLM,
    Layer,
    Rules,
    aliases,
    compressed_tensors,
    engine_layers,
    entry_of_module,
)
from blockscale.inspection.checks.module_names import NamedModules
from blockscale.inspection.matrices import Matrix, is_tied
from blockscale.inspection.reading import Reading

# Engines build no linear layer for these, or one that is never quantized.
_NEVER_BUILT = ("embedding", "norm", "convolution")
# vLLM leaves towers of these names in 16 bits, whatever a modelopt list says.
_VLLM_TOWERS = ("vision_tower", "vision_model", "visual")
_ALL_ENGINES = "every engine"

Engines = Mapping[str, Rules]


def list_faults(reading: Reading, matrices: Sequence[Matrix]) -> Iterator[Fault]:
    """BS304 to BS307 and BS314, and BS303 for an entry that is no regular expression."""
    model = reading.model
    if model is None or not model.claims:
        return
    for entry in dict.fromkeys(entry for claim in model.claims for entry in claim.excluded):
        problem = _pattern_problem(model, entry)
        if problem is not None:
            what = f"the list's entry {entry!r} {problem}"
            yield Fault("unknown-algorithm", "config.json", what, "engines stop at it: correct the config")
    layers = _layers(reading, matrices)
    is_built = _quantized_unless_excluded(reading)
    engines = _engines(model, layers)
    is_nested = text_config(reading.folder.config) is not reading.folder.config
    drafts: dict[str, Fault] = {}
    for layer, members in layers:
        if len({m.scheme is None for m in members}) > 1:
            continue  # a fault of its own: fused formats differ, experts are incomplete
        if members[0].scheme is None and not is_built(layer):
            continue
        for fault in _layer_faults(layer, members, engines, is_nested):
            root = members[0].draft
            if root is None or fault.rule == "exclude-read-differently":
                yield fault
            else:
                drafts.setdefault(root, _draft_fault(root, fault))
    yield from drafts.values()
    yield from _loose_entries(reading, model)


def effective_claims(model: StoredModel) -> Sequence[Claim]:
    """Without a file that names no algorithm and leaves it to another."""
    return [claim for claim in model.claims if claim.algorithm is not None] or model.claims


def lists_differ(claims: Sequence[Claim], matrices: Sequence[Matrix], reading: Reading) -> str | None:
    """A layer that one config file's list covers and the other's does not; None where they come to the same."""
    first, second = claims[0].excluded, claims[1].excluded
    if set(first) == set(second) or any(claim.layers is not None for claim in claims):
        return None
    rules = [ENGINES[TENSORRT_LLM](entries) for entries in (first, second)]
    for layer, _ in _layers(reading, matrices):
        one, other = (decide(layer) for decide in rules)
        if (one.entry is None) != (other.entry is None):
            return layer.name
    return None


def _engines(model: StoredModel, layers: Sequence[tuple[Layer, Any]]) -> Engines:
    """The rules of each engine over the list that it reads: hf_quant_config.json's is TensorRT-LLM's."""
    claims = effective_claims(model)
    first = claims[0]
    if model.dialect == "compressed-tensors":
        return {_ALL_ENGINES: compressed_tensors(first.excluded)}
    second = next((claim for claim in claims if claim.file == HF_QUANT_CONFIG), first)
    rules = {name: make(first.excluded) for name, make in ENGINES.items()}
    own = ENGINES[TENSORRT_LLM](second.excluded)
    shared = rules[TENSORRT_LLM]
    if all((own(layer).entry is None) == (shared(layer).entry is None) for layer, _ in layers):
        rules[TENSORRT_LLM] = own  # else the configs disagree, which is said once
    return rules


def _layers(reading: Reading, matrices: Sequence[Matrix]) -> list[tuple[Layer, list[Matrix]]]:
    by_module = {m.module: m for m in matrices if m.scheme is not None or _is_linear(m)}
    head = _tied_head(reading, matrices)
    if head is not None:
        by_module[head.module] = head
    return [(layer, [by_module[m] for m in layer.members]) for layer in engine_layers(by_module)]


def _is_linear(matrix: Matrix) -> bool:
    """Whether engines build a linear layer for what is in 16 bits."""
    return matrix.reason not in _NEVER_BUILT and (len(matrix.shape) == 2 or ".experts." in matrix.module)


def _tied_head(reading: Reading, matrices: Iterable[Matrix]) -> Matrix | None:
    """A head that has no tensor: loaders build the layer all the same."""
    kinds = {m.reason for m in matrices if m.draft is None}
    if is_tied(reading.folder.config) and HEAD not in kinds and "embedding" in kinds:
        return Matrix("lm_head", (), None, HEAD, None)
    return None


def _quantized_unless_excluded(reading: Reading) -> Any:
    """Layer -> whether a config quantizes it if no list leaves it out. A mixed modelopt config names what it
    quantizes; compressed-tensors has targets."""
    model = reading.model
    assert model is not None
    if any(claim.layers is not None for claim in model.claims):
        return lambda layer: False
    if model.dialect != "compressed-tensors":
        return lambda layer: True
    groups = reading.folder.config.get("quantization_config", {}).get("config_groups")
    lists = [g.get("targets") for g in groups.values() if isinstance(g, Mapping)] if isinstance(groups, Mapping) else []
    targets = [t for found in lists if isinstance(found, list) for t in found if isinstance(t, str)]
    covers = entry_of_module(targets)
    return lambda layer: any(covers(member) is not None for member in layer.members)


# ---------------------------------------------------------------- one layer


def _layer_faults(layer: Layer, members: Sequence[Matrix], engines: Engines, is_nested: bool) -> Iterator[Fault]:
    rulings = {name: decide(layer) for name, decide in engines.items() if not _is_hard_wired(name, layer)}
    is_kept = members[0].scheme is None
    wrong = [name for name, ruling in rulings.items() if ruling.part or (ruling.entry is not None) != is_kept]
    if is_kept and is_nested:
        wrong = [name for name in wrong if not any(engines[name](other).entry for other in aliases(layer))]
    if not wrong:
        return
    entries = ", ".join(dict.fromkeys(repr(r.entry) for r in rulings.values() if r.entry is not None))
    parts = {member for ruling in rulings.values() for member in ruling.part}
    if len(wrong) < len(rulings):
        right = [name for name in rulings if name not in wrong]
        stored = "in 16 bits" if is_kept else "quantized"
        what = (
            f"{layer.name} is {stored}: so read it {_named(right)}, but not {_named(wrong)}; the list has "
            f"{entries or 'no entry'}"
        )
        yield Fault("exclude-read-differently", layer.name, what, _SPELL_OUT, is_fatal=False)
    elif is_kept:
        for name in [layer.name] if layer.is_experts else [m.module for m in members if m.module not in parts]:
            tied = "" if members[0].shape else " (tied to the embedding, but loaders build it)"
            what = f"{name} is in 16 bits{tied}, and no entry of the list covers it"
            yield Fault("kept-but-not-excluded", name, what, "add it to the list", is_fatal=False)
    else:
        for name in [m.module for m in members if m.module in parts or not parts]:
            what = f"{name} is quantized, and the list leaves it in 16 bits: {entries}"
            yield Fault("excluded-but-quantized", name, what, "take the entry off the list", is_fatal=False)


_SPELL_OUT = "list modules by their full names, and whole branches as `name*`"


def _is_hard_wired(engine: str, layer: Layer) -> bool:
    return engine == VLLM and any(name in layer.name for name in _VLLM_TOWERS)


def _draft_fault(root: str, fault: Fault) -> Fault:
    what = f"the config does not say how {root} is stored: {fault.message}"
    return Fault("draft-layer-format", root, what, fault.hint, is_fatal=False)


def _named(engines: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(engines[:-1]), engines[-1]]))


# ---------------------------------------------------------------- entries that mean nothing


def _loose_entries(reading: Reading, model: StoredModel) -> Iterator[Fault]:
    entries = dict.fromkeys(entry for claim in model.claims for entry in claim.excluded)
    if not entries:
        return
    names = NamedModules(reading.folder.tensors)
    is_nested = text_config(reading.folder.config) is not reading.folder.config
    for entry in entries:
        if _pattern_problem(model, entry) is not None or _is_harmless(entry):
            continue
        others = [other.name for other in aliases(Layer(entry, (entry,)))] if is_nested else []
        if not any(map(names.has, (entry, *others))):
            what = f"the list's entry {entry!r} names no module of the files"
            yield Fault("exclude-matches-nothing", entry, what, "correct the name, or drop it", is_fatal=False)


def _is_harmless(entry: str) -> bool:
    """A head or an embedding: producers list it whether or not there is a tensor of its own."""
    leaf = entry.rstrip("*").rstrip(".").rpartition(".")[2]
    return leaf.startswith("lm_head") or "embed" in leaf


def _pattern_problem(model: StoredModel, entry: str) -> str | None:
    return pattern_problem(entry) if model.dialect == "compressed-tensors" else None
