"""Decoder layers against the config's count and against each other: a lost layer, a lost tensor of one."""

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from blockscale.checkpoint.faults import Fault
from blockscale.checkpoint.structure import DRAFT, HEAD, TOWER, kept_reason, text_config
from blockscale.inspection.matrices import Matrix, is_tied
from blockscale.inspection.reading import Reading

LAYER = re.compile(r"((?:.*?\.)?(?:layers|h|blocks))\.(\d{1,9})\.(.+)", re.DOTALL)
_DRAFT_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
# The last part of a weight's and of its scales' names; what else there is counts as a parameter of its own.
_OF_WEIGHTS = (
    *("weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale", "weight_scale_inv"),
    *("input_scale", "input_global_scale", "pre_quant_scale", "qweight", "qzeros", "scales", "g_idx"),
    *("svdquant_lora_a", "svdquant_lora_b", "residual_channels", "residual_weight", "residual_weight_scale"),
)
_NOT_COMPARED = ("k_scale", "v_scale", "q_scale", "inv_freq")
_OF_LAYERS = ("layer", "block", "pattern", "type_list")  # parts of the names of a config's lists
_NORMALISE_FIRST = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
    *("phi3", "deepseek_v2", "deepseek_v3", "gpt_oss", "granite", "olmo", "smollm3", "glm4", "glm4_moe"),
)
_FEW = 8  # a form that so few layers have, against this many times as many of another, is a fault and no kind

Parts = frozenset[str]
Layers = Mapping[int, Parts]


def layer_faults(reading: Reading, matrices: Sequence[Matrix]) -> Iterator[Fault]:
    """BS317, BS318 and BS319."""
    config = reading.folder.config
    text = text_config(config)
    roots = _layers(reading.folder.tensors)
    decoders = {root: layers for root, layers in roots.items() if _reason(root) not in (TOWER, DRAFT)}
    count = text.get("num_hidden_layers")
    count = count if type(count) is int and count > 0 and not config.get("is_encoder_decoder") else None
    yield from _missing_head(reading, matrices)
    if decoders and count is not None:
        yield from _missing_layers(decoders, count)
        yield from _missing_drafts(reading, text, matrices)
    if "block_configs" in text:  # every layer may be of a kind of its own
        return
    for root, layers in decoders.items():
        body = {n: parts for n, parts in layers.items() if count is None or n < count}
        yield from _missing_parts(root, body, text)


def _layers(names: Mapping[str, Any]) -> dict[str, dict[int, Parts]]:
    """Root, such as `model.layers` -> number -> what the layer has: modules with a weight, and other parameters."""
    parts: dict[str, str | None] = {}
    found: dict[str, dict[int, set[str]]] = {}
    for name in names:
        match = LAYER.match(name)
        if match is None:
            continue
        root, number, rest = match.groups()
        experts = rest.find("experts.")
        if experts == 0 or (experts > 0 and rest[experts - 1] == "."):
            part: str | None = rest[: experts + len("experts")]  # their number is another check's
        else:
            part = parts[rest] if rest in parts else parts.setdefault(rest, _part(rest))
        if part is not None:
            found.setdefault(root, {}).setdefault(int(number), set()).add(part)
    return {root: {n: frozenset(p) for n, p in sorted(layers.items())} for root, layers in found.items()}


def _part(rest: str) -> str | None:
    module, _, leaf = rest.rpartition(".")
    if leaf in _NOT_COMPARED or "_quantizer" in rest:
        return None
    return module if leaf in _OF_WEIGHTS else rest


def _reason(root: str) -> str | None:
    """Of whatever lies below: a tower's, a draft's or the decoder's own layers."""
    return kept_reason(f"{root}.0.self_attn.o_proj.weight", (2, 2), {})


# ---------------------------------------------------------------- whole layers


def _missing_layers(decoders: Mapping[str, Layers], count: int) -> Iterator[Fault]:
    held_by = {root: sum(n < count for n in layers) for root, layers in decoders.items()}
    root = max(held_by, key=held_by.__getitem__)
    held, layers = held_by[root], decoders[root]
    if held == count:
        return
    first = 0
    while first in layers:
        first += 1
    what = f"the config counts {count} decoder layers, the files hold {held} of them; the first missing is {first}"
    yield Fault("missing-layers", f"{root}.{first}", what, "find the lost tensors, or correct the config", False)


def _missing_drafts(reading: Reading, text: Mapping[str, Any], matrices: Sequence[Matrix]) -> Iterator[Fault]:
    counts = (text.get(key) for key in _DRAFT_COUNTS)
    count = next((n for n in counts if type(n) is int and n > 0), None)
    if count is not None and not any(matrix.draft for matrix in matrices) and reading.folder.tensors:
        what = f"the config counts {count} draft layer{'s' if count > 1 else ''} (MTP), the files hold none"
        hint = "the model runs without; leave speculative decoding off, or copy them from the source"
        yield Fault("missing-draft-layers", "config.json", what, hint, is_fatal=False)


def _missing_head(reading: Reading, matrices: Sequence[Matrix]) -> Iterator[Fault]:
    config = reading.folder.config
    architectures = config.get("architectures")
    is_causal = isinstance(architectures, list) and any(str(a).endswith("ForCausalLM") for a in architectures)
    has_head = any(
        kept_reason(f"{module}.weight", (2, 2), {}) == HEAD for module in _top_modules(reading.folder.tensors)
    )
    if is_causal and is_tied(config) is False and matrices and not has_head:
        what = "there is no output head, and tie_word_embeddings is false"
        yield Fault("missing-tensor", "lm_head", what, "find the lost tensor, or correct the config", is_fatal=False)


def _top_modules(names: Mapping[str, Any]) -> set[str]:
    """Modules that lie in no layer."""
    return {name.rpartition(".")[0] for name in names if LAYER.match(name) is None}


# ---------------------------------------------------------------- parts of layers


def _missing_parts(root: str, layers: Layers, text: Mapping[str, Any]) -> Iterator[Fault]:
    """A layer that lacks what all others of its kind have. Models have several kinds of layers: those whose configs
    say so are told apart by that, and what many layers lack is taken for a kind of its own."""
    kinds: dict[Hashable, dict[int, Parts]] = {}
    for number, parts in layers.items():
        kinds.setdefault(_kind(number, text), {})[number] = parts
    has_first_norm = _normalises_first(text)
    for members in kinds.values():
        counts = Counter(members.values())
        for number, parts in members.items():
            if counts[parts] > 1 and counts[parts] * _FEW > max(counts.values()):
                continue
            whole = _like(parts, counts)
            if whole is None:
                continue
            for part in sorted(whole - parts):
                module = part.removesuffix(".bias")
                if number == 0 and "norm" in module and not has_first_norm:
                    continue
                what = f"{root}.{number}.{part} is missing; the other layers have it"
                yield Fault("missing-tensor", f"{root}.{number}.{module}", what, "find the lost tensor", False)


def _normalises_first(text: Mapping[str, Any]) -> bool:
    """Whether the first layer is like the others. Of some models its input comes normalised, and of draft models that
    go by their target's type."""
    is_draft = "eagle" in str(text.get("architectures")).lower()
    return str(text.get("model_type")) in _NORMALISE_FIRST and not is_draft


def _like(parts: Parts, counts: Mapping[Parts, int]) -> Parts | None:
    """The most frequent form that has all of `parts` and some more, if they are most of it."""
    larger = [form for form in counts if parts < form and 2 * len(parts) >= len(form)]
    larger = [form for form in larger if counts[form] >= counts[parts]]
    return max(larger, key=lambda form: (counts[form], -len(form)), default=None)


def _kind(number: int, text: Mapping[str, Any]) -> Hashable:
    """What the config's lists with an entry a layer say of this one."""
    count = text.get("num_hidden_layers")
    return tuple(
        str(entries[number])
        for key, entries in text.items()
        if isinstance(entries, list | str) and len(entries) == count and number < len(entries)
        if any(word in key for word in _OF_LAYERS)
    )
