"""compressed-tensors: what llm-compressor writes, and vLLM, SGLang, TensorRT-LLM and transformers read.

| role | stored as |
|---|---|
| packed | `X.weight_packed` (4 bits) or `X.weight` (FP8) |
| block_scale | `X.weight_scale` |
| global_scale | `X.weight_global_scale` [1], the divisor 1 / multiplier |
| input_global_scale | `X.input_global_scale` [1], the divisor; FP8: `X.input_scale` [1], the multiplier |
| key, value scales | `...self_attn.k_scale`, `...self_attn.v_scale` [1] |

Source: compressed-tensors 0.20.1, llm-compressor 0.14.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from blockscale.checkpoint.dialects.stored import (
    Claim,
    StoredLinear,
    StoredModel,
    loose_faults,
    pair_kv_scales,
    settle,
)
from blockscale.checkpoint.faults import Fault
from blockscale.checkpoint.folder import Folder
from blockscale.checkpoint.linear import (
    MXFP4_W4A4,
    MXFP4_W4A16,
    W4A4,
    W4A16,
    W8A8,
    W8A8_DYNAMIC,
    KVScales,
    QuantizedLinear,
    Scheme,
)
from blockscale.checkpoint.patterns import compiled, is_pattern, pattern_problem
from blockscale.errors import CheckpointError
from blockscale.formats.spec import FP8, FP8_CHANNEL, FP8_TOKEN, MXFP4, NVFP4, Format, Granularity

if TYPE_CHECKING:
    from torch import Tensor

VERSION = "0.20.1"

_WEIGHTS: dict[tuple[int, str], Format] = {
    (4, "tensor_group"): NVFP4,
    (4, "group"): MXFP4,
    (8, "tensor"): FP8,
    (8, "channel"): FP8_CHANNEL,
}
_ACTIVATIONS: dict[tuple[int, str], Format] = {
    (4, "tensor_group"): NVFP4,
    (4, "group"): MXFP4,
    (8, "tensor"): FP8,
    (8, "token"): FP8_TOKEN,
}
_STRATEGY = {NVFP4: "tensor_group", MXFP4: "group", FP8: "tensor", FP8_CHANNEL: "channel", FP8_TOKEN: "token"}
# What engines have loaders for.
_WEIGHT_ONLY_FP8 = (Scheme(FP8), Scheme(FP8_CHANNEL))
_WRITTEN = (W4A4, W4A16, MXFP4_W4A4, MXFP4_W4A16, W8A8, W8A8_DYNAMIC, *_WEIGHT_ONLY_FP8)
_CONTAINER = {
    NVFP4: "nvfp4-pack-quantized",
    MXFP4: "mxfp4-pack-quantized",
    FP8: "float-quantized",
    FP8_CHANNEL: "float-quantized",
}
_LOOSE = ("weight_packed", "weight_global_scale", "input_global_scale", "input_scale")


# ---------------------------------------------------------------- reading


def read_model(folder: Folder) -> StoredModel:
    """The quantized linears of a compressed-tensors folder, and what config and tensors disagree in."""
    config = folder.config["quantization_config"]
    groups, faults = _groups(folder, config)
    linears: dict[str, StoredLinear] = {}
    sound: set[Hashable] = set()
    for name in folder.tensors:
        if not name.endswith(".weight_scale"):
            continue
        module = name.removesuffix(".weight_scale")
        scheme = _match(module, groups)
        if scheme is None and groups:
            what = f"{module} has scales, but no config group targets it"
            faults.append(Fault("excluded-but-quantized", module, what, "engines would load it as 16 bits"))
        linear, own_faults = settle(_stored_linear(folder, module, scheme), scheme, sound)
        faults += own_faults
        if linear is not None:
            linears[module] = linear
    if not linears and not faults:
        what = f"{folder.path}: config names {len(groups)} groups, but no tensor has scales"
        faults.append(Fault("nothing-quantized", "config.json", what, "this is no quantized checkpoint"))
    faults += loose_faults(linears, folder.tensors, _LOOSE)
    kv_tensors, kv_faults = pair_kv_scales(folder.tensors, ".k_scale", ".v_scale")
    kv_format, more = _kv_format(config.get("kv_cache_scheme"))
    faults += [*kv_faults, *more]
    hint = "engines that know it may serve it; for all else take the 16-bit model that it was made from"
    faults += [Fault("unknown-algorithm", "config.json", what, hint) for what in unread_parts(config)]
    return StoredModel(
        "compressed-tensors", linears, kv_tensors, kv_format, (_claim(config, kv_format),), tuple(faults)
    )


def _claim(config: Mapping[str, Any], kv_format: str | None) -> Claim:
    ignored = config.get("ignore")
    names = tuple(p for p in ignored if isinstance(p, str)) if isinstance(ignored, list) else ()
    container = config.get("format")
    return Claim("config.json", container if isinstance(container, str) else None, names, kv_format)


def unread_parts(config: Mapping[str, Any]) -> Iterator[str]:
    """What a quantization_config says that codes and scales mean besides, a sentence each: the numbers would be wrong
    without it."""
    if _is_applied(config.get("transform_config")):
        yield "config.json has a transform_config that is applied as the model runs, which is not read"
    sparsity = config.get("sparsity_config")
    is_dense = isinstance(sparsity, Mapping) and sparsity.get("format", "dense") == "dense"
    if sparsity and not is_dense:
        yield "config.json has a sparsity_config: weights are stored without their zeros, which is not read"


def _is_applied(transforms: object) -> bool:
    """Whether anything is turned at run time. What is turned in the weights alone lies in the files as it shall be."""
    if not transforms:
        return False
    try:
        schemes = (transforms["config_groups"] or {}).values()  # type: ignore[index]
        places = [entry["location"] for scheme in schemes for entry in scheme["apply"]]
    except (AttributeError, KeyError, TypeError):
        return True  # nobody knows what it means
    return any(place not in ("weight_input", "weight_output") for place in places)


Groups = Sequence[tuple[Sequence[str], Scheme]]


def _groups(folder: Folder, config: Mapping[str, Any]) -> tuple[Groups, list[Fault]]:
    """Targets and scheme of each group that has weights (the others are about attention)."""
    content = config.get("config_groups")
    try:
        groups = [
            ([target for target in g.get("targets") or [] if isinstance(target, str)], _group_scheme(g))
            for g in (content or {}).values()
            if g.get("weights")
        ]
    except CheckpointError as e:
        return [], [Fault("unknown-algorithm", "config.json", str(e), e.hint)]
    except (AttributeError, KeyError, TypeError):
        what = f"{folder.path}: a malformed config group: {json.dumps(content)}"
        return [], [Fault("unknown-algorithm", "config.json", what)]
    for target in (target for targets, _ in groups for target in targets):
        problem = pattern_problem(target)
        if problem is not None:
            what = f"a config group's target {target!r} {problem}"
            return [], [Fault("unknown-algorithm", "config.json", what)]
    if not groups:
        what = f"{folder.path}: quantization_config has no config_groups with weights"
        return [], [Fault("unknown-algorithm", "config.json", what)]
    return groups, [
        fault for group in (content or {}).values() if group.get("weights") for fault in _size_faults(group)
    ]


def _size_faults(group: Mapping[str, Any]) -> Iterator[Fault]:
    """Blocks of another size than the format's."""
    fmt, size = _group_scheme(group).weight, group["weights"].get("group_size")
    if fmt.block_size and size != fmt.block_size:
        what = (
            f"a config group: {fmt.name} with group_size {size} is not read, its blocks hold {fmt.block_size} elements"
        )
        yield Fault("format-mismatch", "config.json", what, "correct the config")


def _kv_format(scheme: object) -> tuple[str | None, list[Fault]]:
    if not scheme:
        return None, []
    if isinstance(scheme, Mapping) and (scheme.get("num_bits"), scheme.get("type")) == (8, "float"):
        return "fp8", []
    what = f"a KV cache is not read: {json.dumps(scheme)}"
    return None, [Fault("unknown-algorithm", "config.json", what, "known: FP8")]


def _group_scheme(group: Mapping[str, Any]) -> Scheme:
    weights, activations = group["weights"], group.get("input_activations")
    weight = _WEIGHTS.get((weights["num_bits"], weights["strategy"]))
    activation = _ACTIVATIONS.get((activations["num_bits"], activations["strategy"])) if activations else None
    is_known = weights["type"] == "float" and weight is not None and (activation is not None or not activations)
    # an FP8 scale per tensor that is found at run time has no name here
    is_known = is_known and not (activations and activation is FP8 and activations.get("dynamic"))
    if not is_known or weight is None:
        what = {"weights": weights, "input_activations": activations}
        raise CheckpointError(f"a config group is not read: {json.dumps(what)}", hint="known: NVFP4, MXFP4, FP8")
    return Scheme(weight, activation)


def _match(module: str, groups: Groups) -> Scheme | None:
    """Exact names first, then `re:` patterns (anchored at the start) in lexicographic order, then class names."""

    def rank(target: str) -> int | None:
        if target == module:
            return 0
        if is_pattern(target):
            return 1 if compiled(target).match(module) else None
        return 2 if target.endswith("Linear") and "." not in target else None

    found = [(r, t, scheme) for targets, scheme in groups for t in targets if (r := rank(t)) is not None]
    return min(found, key=lambda match: match[:2])[2] if found else None


def _stored_linear(folder: Folder, module: str, scheme: Scheme | None) -> StoredLinear:
    has_codes = f"{module}.weight_packed" in folder.tensors
    has_divisor = f"{module}.input_global_scale" in folder.tensors
    if scheme is not None:
        has_codes, has_divisor = scheme.weight.element.bits == 4, scheme.activation is NVFP4
    names = {
        "packed": "weight_packed" if has_codes else "weight",
        "block_scale": "weight_scale",
        "global_scale": "weight_global_scale",
        "input_global_scale": "input_global_scale" if has_divisor else "input_scale",
    }
    tensors = {
        role: folder.tensors[f"{module}.{name}"] for role, name in names.items() if f"{module}.{name}" in folder.tensors
    }
    return StoredLinear(module, W4A16, tensors, has_divisors=True)


# ---------------------------------------------------------------- writing


def to_tensors(name: str, linear: QuantizedLinear) -> dict[str, Tensor]:
    """The stored tensors of one linear; works on meta tensors, which is how an output is planned."""
    weight, scheme = linear.weight, linear.scheme
    _check_written(name, scheme)
    too_much = {
        "a pre_quant_scale": linear.pre_quant_scale is not None,
        "a low-rank branch": linear.low_rank is not None,
        "residual channels": linear.residual is not None,
        f"a stack {list(weight.shape)}": len(weight.shape) != 2,
    }
    what = next((what for what, is_there in too_much.items() if is_there), None)
    if what is not None:
        raise CheckpointError(f"{name}: compressed-tensors cannot hold {what}", hint="use --dialect modelopt")
    is_tensor = weight.format.granularity is Granularity.TENSOR
    stored = {
        "weight_packed" if weight.format.element.bits == 4 else "weight": weight.packed,
        "weight_scale": weight.block_scale.reshape(1) if is_tensor else weight.block_scale,
    }
    if weight.global_scale is not None:
        stored["weight_global_scale"] = _divisor(name, weight.global_scale)
    if linear.input_global_scale is not None:
        if scheme.activation is NVFP4:
            stored["input_global_scale"] = _divisor(name, linear.input_global_scale)
        else:
            stored["input_scale"] = linear.input_global_scale.reshape(1)
    return {f"{name}.{key}": tensor for key, tensor in stored.items()}


def _check_written(name: str, scheme: Scheme) -> None:
    if scheme not in _WRITTEN:
        raise CheckpointError(f"{name}: compressed-tensors cannot hold {scheme.name}", hint="use --dialect modelopt")


def _divisor(name: str, scale: Tensor) -> Tensor:
    divisor = scale.reciprocal().reshape(1)
    if not divisor.is_meta and not divisor.isfinite().all():
        raise CheckpointError(
            f"{name}: the global scale {scale.item()} has no finite reciprocal, which compressed-tensors stores",
            hint="use --dialect modelopt, or keep the layer in 16 bits",
        )
    return divisor


def kv_to_tensors(attention: str, scales: KVScales) -> dict[str, Tensor]:
    return {f"{attention}.k_scale": scales.key.reshape(1), f"{attention}.v_scale": scales.value.reshape(1)}


def config_files(
    config: Mapping[str, Any],
    schemes: Mapping[str, Scheme],
    kept: Sequence[str],
    kv_format: str | None,
    has_pre_quant_scale: bool = False,
    low_rank: Container[str] = (),
) -> dict[str, str]:
    """config.json. `schemes`: by linear; `kept`: modules left in 16 bits, or wildcards. The dialect has no place for a
    pre_quant_scale or a low-rank branch: `to_tensors` refuses them."""
    if kv_format not in (None, "fp8"):
        raise CheckpointError(f"compressed-tensors has no {kv_format} KV cache", hint="use --dialect modelopt")
    by_scheme: dict[Scheme, list[str]] = {}
    for module, scheme in schemes.items():
        by_scheme.setdefault(scheme, []).append(module)
    for scheme, modules in by_scheme.items():
        _check_written(modules[0], scheme)
    is_mixed = len(by_scheme) > 1
    groups = {
        f"group_{i}": {
            "format": _CONTAINER[scheme.weight],
            "targets": modules if is_mixed else ["Linear"],
            "weights": _arguments(scheme.weight, dynamic=False),
            "input_activations": _activation_arguments(scheme),
            "output_activations": None,
        }
        for i, (scheme, modules) in enumerate(by_scheme.items())
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if is_mixed else groups["group_0"]["format"],
        "quantization_status": "compressed",
        "version": VERSION,
        "config_groups": groups,
        "ignore": [_ignore(pattern) for pattern in kept],
        "kv_cache_scheme": _arguments(FP8, dynamic=False) if kv_format else None,
        "sparsity_config": {},
        "transform_config": {},
        "global_compression_ratio": None,
    }
    return {"config.json": json.dumps({**config, "quantization_config": quantization}, indent=2) + "\n"}


def _ignore(pattern: str) -> str:
    """A wildcard as a regular expression. Engines, and transformers, have the parts of a model that sees images under
    other roots than its weights' names, so anything may stand before it."""
    if "*" not in pattern:
        return pattern
    return r"re:(?:.*\.)?" + ".*".join(map(re.escape, pattern.removeprefix("*").split("*")))


def _activation_arguments(scheme: Scheme) -> dict[str, Any] | None:
    if scheme.activation is None:
        return None
    # "local": block scales follow the values at run time, the global scale is fixed
    return _arguments(
        scheme.activation, dynamic="local" if scheme.activation is NVFP4 else scheme.activation is not FP8
    )


def _arguments(fmt: Format, dynamic: bool | str) -> dict[str, Any]:
    return {
        "num_bits": fmt.element.bits,
        "type": "float",
        "strategy": _STRATEGY[fmt],
        "group_size": fmt.block_size or None,
        "symmetric": True,
        "dynamic": dynamic,
        "scale_dtype": {NVFP4: "torch.float8_e4m3fn", MXFP4: "torch.uint8"}.get(fmt),
        "zp_dtype": None,
        "actorder": None,
        "block_structure": None,
        "observer": None if dynamic is True else "memoryless_minmax",
        "observer_kwargs": {},
    }
