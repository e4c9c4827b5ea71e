"""What a module is, by its name, its shape and the config: a linear to quantize, or why it stays in 16 bits."""

import fnmatch
import re
from collections.abc import Container, Iterable, Mapping
from typing import Any

from blockscale.checkpoint.groups import expert_set

Shape = tuple[int, ...]

TOWER, DRAFT, ROUTER, HEAD = "vision or audio tower", "draft layer", "router", "output head"
UNKNOWN_STACK = "a stack of experts whose layout is not known"
NOT_RUN = (TOWER, DRAFT)  # what text does not go through
# Module names that stay in 16 bits whatever their shape, by why.
_ALWAYS_KEPT = {
    HEAD: ("*lm_head*", "*embed_out*", "score", "*classifier*", "output"),
    "embedding": ("*embed*", "*wte", "*wpe", "*word_embeddings*", "*shared"),
    "norm": ("*norm*", "*ln_?"),
    ROUTER: ("*router*", "*.gate", "*shared_expert_gate", "*.gate.wg"),
    TOWER: (
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
    DRAFT: ("*mtp*", "*nextn*", "*eagle*"),
}
# Where configs of multimodal models keep the language model's.
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Models whose stacks of experts are stored [E, K, N], input dimension in the middle.
_TRANSPOSED_EXPERTS = ("llama4", "llama4_text", "gpt_oss")
_STACK_NAMES = ("gate_up_proj", "down_proj")


def module_name(tensor_name: str) -> str:
    """`a.b.weight` -> `a.b`; a bare parameter (stacks of experts, biases) keeps its full name."""
    return tensor_name.removesuffix(".weight")


def matches(pattern: str, module: str) -> bool:
    """Whether a glob names the module, or (without a wildcard) a module above it."""
    pattern = pattern.removesuffix(".weight")
    return fnmatch.fnmatchcase(module, pattern) or module.startswith(pattern + ".")


def nearest(module: str, known: Container[str]) -> str | None:
    """The module itself, or the nearest one above it, that is `known`."""
    while module and module not in known:
        module = module.rpartition(".")[0]
    return module or None


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config."""
    inner = next((config[key] for key in _TEXT_CONFIGS if isinstance(config.get(key), Mapping)), None)
    return config if inner is None else text_config(inner)


def kept_reason(name: str, shape: Shape, config: Mapping[str, Any]) -> str | None:
    """Why a tensor is not a linear weight to quantize by default; None if it is one."""
    module = module_name(name)
    if not name.endswith(".weight") and not is_expert_stack(name, shape, config):
        is_stack = len(shape) == 3 and expert_set(module) is not None
        return UNKNOWN_STACK if is_stack else "not a linear weight"
    if len(shape) < 2:
        return "norm, bias or scalar"
    for reason, patterns in _ALWAYS_KEPT.items():
        if any(matches(pattern, module) for pattern in patterns):
            return reason
    text = text_config(config)
    num_layers = text.get("num_hidden_layers")
    layer = layer_number(module)
    if (
        layer is not None
        and isinstance(num_layers, int)
        and layer >= num_layers
        and not config.get("is_encoder_decoder")
    ):
        return DRAFT
    is_inside = expert_set(module) is not None or module.endswith("_proj")
    return ROUTER if num_experts(config) == shape[0] and len(shape) == 2 and not is_inside else None


def num_experts(config: Mapping[str, Any]) -> Any:
    """Of a layer that has any, as the config says it; None where it says nothing."""
    text = text_config(config)
    return next((text[key] for key in _NUM_EXPERTS if text.get(key)), None)


def layer_number(module: str) -> int | None:
    """Of the decoder layer that a module lies in."""
    found = re.search(r"(?:^|\.)layers\.(\d+)\.", module)
    return int(found[1]) if found else None


def is_expert_stack(name: str, shape: Shape, config: Mapping[str, Any]) -> bool:
    """Whether a tensor is the stack of one projection of all experts, in a layout that is known."""
    leaf = name.rpartition(".")[2]
    is_stack = len(shape) == 3 and ".experts." in name and leaf in _STACK_NAMES
    return is_stack and text_config(config).get("model_type") in _TRANSPOSED_EXPERTS


def unquantized_modules(
    quantized: Iterable[str], kept: Mapping[str, Shape], reasons: Mapping[str, str | None]
) -> list[str]:
    """What loaders must leave alone: modules with a weight matrix that is not quantized; towers, draft layers and the
    experts of a layer as wildcards. `kept`: shapes by tensor name; `reasons`: `kept_reason` by module."""
    names: list[str] = []
    wildcards: dict[str, list[str]] = {}  # of what is never run on text: to the modules that they stand for
    quantized = list(quantized)
    quantized_experts = {expert_set(module) for module in quantized}
    for tensor_name, shape in kept.items():
        module = module_name(tensor_name)
        experts = expert_set(module)
        if len(shape) < 2 or not (tensor_name.endswith(".weight") or experts):
            continue
        if reasons.get(module) in NOT_RUN:
            wildcards.setdefault(_wildcard(module), []).append(module)
        elif experts is not None and experts not in quantized_experts:
            names.append(f"{experts}*")
        elif tensor_name.endswith(".weight"):
            names.append(module)
    for wildcard, modules in wildcards.items():
        covers_more = any(fnmatch.fnmatchcase(module, wildcard) for module in quantized)
        names += modules if covers_more else [wildcard]
    # a tied head has no tensor, but loaders build the layer all the same
    head = [] if any(m.rpartition(".")[2] == "lm_head" for m in quantized) else ["lm_head"]
    return list(dict.fromkeys([*head, *names]))


def with_untied_head(config: Mapping[str, Any], quantized: Iterable[str]) -> Mapping[str, Any]:
    """The config of a model with these linears. A quantized head is no longer the embedding: loaders that tied the two
    would leave it out."""
    if not any(module.rpartition(".")[2] == "lm_head" for module in quantized):
        return config
    untied = {"tie_word_embeddings": False}
    text_config = config.get("text_config")
    inner = {"text_config": {**text_config, **untied}} if text_config else {}
    return {**config, **inner, **untied}


def _wildcard(module: str) -> str:
    """Of the whole tower or draft layer that a module belongs to: `vision_tower*`, `mtp*`, `model.layers.61*`. Engines
    have a tower at another place than its weights' names say, so one below the root is `*visual*`."""
    parts = module.split(".")
    for end, part in enumerate(parts, 1):
        if any(matches(pattern, part) for pattern in _ALWAYS_KEPT[TOWER]):
            return f"{part}*" if end == 1 else f"*{part}*"
        is_layer = parts[end - 2 : end - 1] == ["layers"] and part.isdigit()
        if is_layer or any(matches(pattern, part) for pattern in _ALWAYS_KEPT[DRAFT]):
            return ".".join(parts[:end]) + "*"
    return module
