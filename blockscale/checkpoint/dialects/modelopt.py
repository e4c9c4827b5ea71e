"""Model Optimizer's Hugging Face export ("modelopt"): what vLLM, SGLang and TensorRT-LLM call ModelOpt checkpoints.

| role | stored as |
|---|---|
| packed | `X.weight` |
| block_scale | `X.weight_scale` (per-channel FP8: [N]; MXFP4: uint8) |
| global_scale | `X.weight_scale_2`, the multiplier |
| input_global_scale | `X.input_scale`, the multiplier |
| pre_quant_scale | `X.pre_quant_scale` |
| low_rank_down, low_rank_up | `X.svdquant_lora_a` [r, K], `X.svdquant_lora_b` [N, r]; also read as a quantizer's own |
| residual_channels | `X.residual_channels`; this name and the next two are blockscale's own |
| residual_packed, residual_block_scale | `X.residual_weight`, `X.residual_weight_scale` |
| key, value scales | `...k_proj.k_scale`, `...v_proj.v_scale` |

A 3-D stack of experts keeps the model's own orientation [E, K, N], and its scales are `X_weight_scale` and so on.
Source: nvidia-modelopt 0.47.0, torch/export.
"""

from __future__ import annotations

import json
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from blockscale.checkpoint.dialects import branches
from blockscale.checkpoint.dialects.stored import (
    Claim,
    StoredLinear,
    StoredModel,
    loose_faults,
    pair_kv_scales,
    settle,
)
from blockscale.checkpoint.faults import Fault
from blockscale.checkpoint.folder import HF_QUANT_CONFIG, Folder
from blockscale.checkpoint.linear import (
    MXFP4_W4A4,
    MXFP4_W4A16,
    W4A4,
    W4A8,
    W4A16,
    W8A8,
    W8A8_DYNAMIC,
    KVScales,
    QuantizedLinear,
    Scheme,
)
from blockscale.checkpoint.structure import nearest
from blockscale.errors import CheckpointError
from blockscale.formats.spec import Granularity

if TYPE_CHECKING:
    from torch import Tensor

# Loaders recognise the dialect by this name; who really wrote a file stands in its blockscale.json.
PRODUCER = {"name": "modelopt", "version": "0.47.0"}

ALGORITHMS: dict[str, Scheme] = {
    "NVFP4": W4A4,
    "NVFP4_AWQ": W4A4,
    "NVFP4_SVD": W4A4,
    "W4A16_NVFP4": W4A16,
    "W4A8_NVFP4_FP8": W4A8,
    "FP8": W8A8,
    "FP8_PER_CHANNEL_PER_TOKEN": W8A8_DYNAMIC,
    "mxfp4": MXFP4_W4A4,
    "W4A16_MXFP4": MXFP4_W4A16,
}
_SUFFIXES = {
    "packed": "weight",
    "block_scale": "weight_scale",
    "global_scale": "weight_scale_2",
    "input_global_scale": "input_scale",
    "pre_quant_scale": "pre_quant_scale",
}
# What may lie beside a weight's scales. Model Optimizer's export of language models leaves a quantizer's own names.
_BRANCH_SUFFIXES = {
    branches.DOWN: ("svdquant_lora_a", "weight_quantizer._svdquant_lora_a"),
    branches.UP: ("svdquant_lora_b", "weight_quantizer._svdquant_lora_b"),
    branches.CHANNELS: ("residual_channels",),
    branches.PACKED: ("residual_weight",),
    branches.BLOCK_SCALE: ("residual_weight_scale",),
}
_OF_BRANCHES = tuple(suffix for suffixes in _BRANCH_SUFFIXES.values() for suffix in suffixes)
_SVD = "NVFP4_SVD"
_KV_ALGORITHMS = ("FP8", "NVFP4")
_LOOSE = ("weight_scale_2", "input_scale", "pre_quant_scale", *_OF_BRANCHES)
# Model Optimizer writes config_groups for these only
_WITH_GROUPS = ("FP8", "NVFP4", "W4A16_NVFP4", _SVD)
_NO_BRANCH = "the weights are incomplete: find the lost tensors, or quantize the model again"
_WITH_FACTORS = ("NVFP4_AWQ", _SVD)


# ---------------------------------------------------------------- reading


def read_model(folder: Folder) -> StoredModel:
    """The quantized linears of a Model Optimizer folder, and what config and tensors disagree in."""
    quantization = _quantization(folder)
    algorithm = quantization.get("quant_algo")
    faults: list[Fault] = []
    linears: dict[str, StoredLinear] = {}
    sound: set[Hashable] = set()
    is_mixed = algorithm == "MIXED_PRECISION"
    # of a model in one format, what the config says of any layer: a large model has tens of thousands
    same = None if is_mixed else _claimed_scheme("", quantization)
    has_branches = any(name.endswith(_OF_BRANCHES) for name in folder.tensors)
    for name in folder.tensors:
        if name.endswith(".weight_scale"):
            module, separator = name.removesuffix(".weight_scale"), "."
        elif name.endswith("_weight_scale") and not name.endswith(".residual_weight_scale"):
            module, separator = name.removesuffix("_weight_scale"), "_"
        else:
            continue
        scheme, claim_faults = _claimed_scheme(module, quantization) if same is None or same[1] else same
        linear, own_faults = settle(_stored_linear(folder, module, separator, has_branches), scheme, sound)
        faults += own_faults or claim_faults
        if linear is not None:
            linears[module] = linear
    if not linears and not faults:
        what = f"{folder.path}: quant_algo {algorithm}, but no tensor has scales"
        faults.append(Fault("nothing-quantized", "config.json", what, "this is no quantized checkpoint"))
    faults += _missing_branches(linears, quantization)
    faults += loose_faults(linears, folder.tensors, _LOOSE)
    kv_tensors, kv_faults = pair_kv_scales(folder.tensors, ".k_proj.k_scale", ".v_proj.v_scale")
    kv_format = _kv_format(quantization)
    if kv_format is not None and kv_format.upper() not in _KV_ALGORITHMS:
        what = f"KV cache {kv_format.upper()} is not read"
        kv_faults.append(Fault("unknown-algorithm", "config.json", what, "known: " + ", ".join(_KV_ALGORITHMS)))
    claims = tuple(_claims(folder))
    return StoredModel("modelopt", linears, kv_tensors, kv_format, claims, (*faults, *kv_faults))


def _missing_branches(linears: Mapping[str, StoredLinear], quantization: Mapping[str, Any]) -> Iterator[Fault]:
    """Weights that are only part of themselves. Where one algorithm holds for all, some may do without a branch."""
    entries = _table(quantization.get("quantized_layers")).values()
    is_mixed = quantization.get("quant_algo") == "MIXED_PRECISION"
    if quantization.get("quant_algo") != _SVD and not (is_mixed and any(_names_svd(entry) for entry in entries)):
        return
    without = [module for module, linear in linears.items() if not branches.has_low_rank(linear.tensors)]
    if is_mixed:
        for module in without:
            if _layer_algorithm(module, quantization)[0] == _SVD:
                what = f"{module}: the config says {_SVD}, and there is no low-rank branch"
                yield Fault(branches.RULE, module, what, _NO_BRANCH)
    elif len(without) == len(linears) > 0:
        what = f"the config says {_SVD}, and no weight has a low-rank branch"
        yield Fault(branches.RULE, "config.json", what, _NO_BRANCH)


def _names_svd(entry: object) -> bool:
    return _table(entry).get("quant_algo") == _SVD


def _quantization(folder: Folder) -> dict[str, Any]:
    """Both shapes: flat in config.json, nested under `quantization` in hf_quant_config.json. The first wins, but may
    leave the layers of a mixed model to the second."""
    config = _section(folder.config.get("quantization_config"))
    lacks_layers = config.get("quant_algo") == "MIXED_PRECISION" and not config.get("quantized_layers")
    if folder.quant_config is not None and ("quant_algo" not in config or lacks_layers):
        config |= _section(folder.quant_config)
    return config


def _section(value: object) -> dict[str, Any]:
    """The part of a config file that is about quantization, whichever of the two shapes it has."""
    outer = _table(value)
    return dict(_table(outer.get("quantization")) or outer)


def _table(value: object) -> Mapping[str, Any]:
    """Of a config that anybody may have written."""
    return value if isinstance(value, Mapping) else {}


def _claims(folder: Folder) -> list[Claim]:
    sources = {"config.json": folder.config.get("quantization_config"), HF_QUANT_CONFIG: folder.quant_config}
    claims = []
    for file, content in sources.items():
        section = _section(content)
        if not section:
            continue
        excluded = section.get("exclude_modules", section.get("ignore"))
        layers, algorithm = section.get("quantized_layers"), section.get("quant_algo")
        claims.append(
            Claim(
                file,
                algorithm if isinstance(algorithm, str) else None,
                tuple(p for p in excluded if isinstance(p, str)) if isinstance(excluded, list) else (),
                _kv_format(section),
                {name: str(_table(entry).get("quant_algo")) for name, entry in layers.items()}
                if isinstance(layers, Mapping)
                else None,
            )
        )
    return claims


def _is_weight_only(quantization: Mapping[str, Any]) -> bool:
    groups = _groups(quantization)
    return bool(groups) and not any(group.get("input_activations") for group in groups)


def _groups(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [_table(group) for group in _table(quantization.get("config_groups")).values()]


def _claimed_scheme(module: str, quantization: Mapping[str, Any]) -> tuple[Scheme | None, list[Fault]]:
    """What the config says of a module that has scales."""
    own, group_size = _layer_algorithm(module, quantization)
    if own is None and quantization.get("quant_algo") == "MIXED_PRECISION":
        what = f"{module} has scales, but quantized_layers does not name it"
        return None, [Fault("mixed-layers-mismatch", module, what, "engines would load it as 16 bits")]
    scheme = ALGORITHMS.get(own) if isinstance(own, str) else None
    if scheme is None:
        known = ", ".join([*ALGORITHMS, "MIXED_PRECISION"])
        return None, [
            Fault("unknown-algorithm", module, f"{module}: quant_algo {own!r} is not read", f"known: {known}")
        ]
    if group_size and scheme.weight.block_size and scheme.weight.block_size != group_size:
        what = f"{module}: {scheme.weight.name} with group_size {group_size} is not read"
        hint = f"its blocks hold {scheme.weight.block_size} elements; correct the config"
        return scheme, [Fault("format-mismatch", module, what, hint)]
    return (W4A16 if own in ("NVFP4", _SVD) and _is_weight_only(quantization) else scheme), []


def _layer_algorithm(module: str, quantization: Mapping[str, Any]) -> tuple[Any, Any]:
    """quant_algo and group_size. Mixed: exact name first, then the longest entry that the module lies under (experts
    are one entry)."""
    if quantization.get("quant_algo") != "MIXED_PRECISION":
        groups = _groups(quantization)
        in_group = _table(groups[0].get("weights")).get("group_size") if len(groups) == 1 else None
        return quantization.get("quant_algo"), quantization.get("group_size") or in_group
    layers = _table(quantization.get("quantized_layers"))
    entry = _table(layers.get(nearest(module, layers) or ""))
    return entry.get("quant_algo"), entry.get("group_size")


def _stored_linear(folder: Folder, module: str, separator: str, has_branches: bool) -> StoredLinear:
    is_stack = separator == "_"
    names = {role: f"{module}{separator}{suffix}" for role, suffix in _SUFFIXES.items()}
    if is_stack:
        names["packed"] = module
    tensors = {role: folder.tensors[name] for role, name in names.items() if name in folder.tensors}
    if has_branches and not is_stack:
        pairs = ((role, f"{module}.{suffix}") for role, suffixes in _BRANCH_SUFFIXES.items() for suffix in suffixes)
        tensors |= {role: folder.tensors[name] for role, name in pairs if name in folder.tensors}
    return StoredLinear(module, W4A16, tensors, is_transposed=is_stack)


def _kv_format(quantization: Mapping[str, Any]) -> str | None:
    algorithm = quantization.get("kv_cache_quant_algo")
    if algorithm is None:  # config.json says it in another way
        scheme = quantization.get("kv_cache_scheme")
        algorithm = scheme if isinstance(scheme, str) else ("FP8" if scheme else None)
    return str(algorithm).lower() if algorithm else None


# ---------------------------------------------------------------- writing


def to_tensors(name: str, linear: QuantizedLinear) -> dict[str, Tensor]:
    """The stored tensors of one linear; works on meta tensors, which is how an output is planned.

    CheckpointError for a branch beside a weight that can have none.
    """
    weight = linear.weight
    packed, block_scale = weight.packed, weight.block_scale
    is_stack = len(weight.shape) == 3
    if is_stack:
        packed, block_scale = packed.transpose(-1, -2).contiguous(), block_scale.transpose(-1, -2).contiguous()
    elif weight.format.granularity is Granularity.CHANNEL:
        block_scale = block_scale.float().reshape(-1)
    roles = {
        "packed": packed,
        "block_scale": block_scale,
        "global_scale": weight.global_scale,
        "input_global_scale": linear.input_global_scale,
        "pre_quant_scale": linear.pre_quant_scale,
    }
    separator = "_" if is_stack else "."
    names = {role: f"{name}{separator}{suffix}" for role, suffix in _SUFFIXES.items()}
    if is_stack:
        names["packed"] = name
    stored = {names[role]: tensor for role, tensor in roles.items() if tensor is not None}
    beside = branches.branch_tensors(name, linear)
    return stored | {f"{name}.{_BRANCH_SUFFIXES[role][0]}": tensor for role, tensor in beside.items()}


def kv_to_tensors(attention: str, scales: KVScales) -> dict[str, Tensor]:
    return {f"{attention}.k_proj.k_scale": scales.key, f"{attention}.v_proj.v_scale": scales.value}


def config_files(
    config: Mapping[str, Any],
    schemes: Mapping[str, Scheme],
    kept: Sequence[str],
    kv_format: str | None,
    has_pre_quant_scale: bool = False,
    low_rank: Container[str] = (),
) -> dict[str, str]:
    """config.json and hf_quant_config.json.

    schemes   by linear
    kept      modules left in 16 bits, or wildcards
    low_rank  linears with a low-rank branch
    """
    by_scheme: dict[Scheme, list[str]] = {}
    for module, scheme in schemes.items():
        by_scheme.setdefault(scheme, []).append(module)
    groups: dict[str, Any] = {}
    if len(by_scheme) == 1:
        scheme = next(iter(by_scheme))
        has_low_rank = any(module in low_rank for module in schemes)
        details: dict[str, Any] = {"quant_algo": _algorithm(scheme, has_pre_quant_scale, has_low_rank)}
        if details["quant_algo"] in _WITH_GROUPS:
            groups = {"group_0": {**_group(scheme), "targets": ["Linear"]}}
        excluded: dict[str, Any] = {"group_size": scheme.weight.block_size} if scheme.weight.block_size else {}
        if details["quant_algo"] in _WITH_FACTORS:
            excluded |= {"has_zero_point": False, "pre_quant_scale": has_pre_quant_scale}
        excluded["exclude_modules"] = list(kept)
        ignore = list(kept)
    else:
        _check_mixture(by_scheme)
        details = {"quant_algo": "MIXED_PRECISION", "quantized_layers": _layer_entries(schemes, low_rank)}
        groups = {f"group_{i}": {**_group(s), "targets": m} for i, (s, m) in enumerate(by_scheme.items())}
        excluded, ignore = {}, []
    nested = {**details, "kv_cache_quant_algo": kv_format.upper() if kv_format else None, **excluded}
    flat: dict[str, Any] = {**({"config_groups": groups} if groups else {}), "ignore": ignore, **details}
    if kv_format == "fp8":
        flat["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    elif kv_format:
        flat["kv_cache_scheme"] = kv_format.upper()
    producer = _producer(config)
    flat |= {"producer": producer, "quant_method": "modelopt"}
    return {
        "config.json": json.dumps({**config, "quantization_config": flat}, indent=2) + "\n",
        HF_QUANT_CONFIG: json.dumps({"producer": producer, "quantization": nested}, indent=2) + "\n",
    }


def _producer(config: Mapping[str, Any]) -> object:
    """As the config names it already; else the one whose layout this is, for loaders look at it."""
    quantization = config.get("quantization_config")
    said = quantization.get("producer") if isinstance(quantization, Mapping) else None
    return said if isinstance(said, Mapping) and isinstance(said.get("name"), str) else PRODUCER


def _check_mixture(by_scheme: Mapping[Scheme, Sequence[str]]) -> None:
    """CheckpointError for a mixture that engines have no loader for: they mix NVFP4 and per-tensor FP8 only."""
    for scheme, modules in by_scheme.items():
        if scheme not in (W4A4, W4A16, W8A8):
            raise CheckpointError(
                f"{modules[0]}: {scheme.name} cannot be mixed with other formats in the modelopt dialect",
                hint="use weight and activation fp8 for it, or --dialect compressed-tensors",
            )


def _algorithm(scheme: Scheme, has_pre_quant_scale: bool, has_low_rank: bool) -> str:
    if scheme in (W4A4, W4A16) and has_low_rank:
        return _SVD  # its group says whether inputs are rounded
    if scheme == W4A4 and has_pre_quant_scale:
        return "NVFP4_AWQ"
    for name, known in ALGORITHMS.items():
        if known == scheme:
            return name
    raise CheckpointError(
        f"the modelopt dialect has no name for {scheme.name}", hint="write it with --dialect compressed-tensors"
    )


def _layer_entries(schemes: Mapping[str, Scheme], low_rank: Container[str]) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    for module, scheme in schemes.items():
        has_branch = module in low_rank and scheme == W4A4  # a mixture's entries say it of W4A4 only
        entry: dict[str, Any] = {"quant_algo": _algorithm(scheme, has_pre_quant_scale=False, has_low_rank=has_branch)}
        if scheme.weight.block_size:
            entry["group_size"] = scheme.weight.block_size
        # loaders look experts up by the module that holds them all
        head, found, _ = module.partition(".experts.")
        entries[head + ".experts" if found else module] = entry
    return entries


def _group(scheme: Scheme) -> dict[str, Any]:
    group = {"weights": _arguments(scheme.weight.element.bits, scheme.weight.block_size)}
    if scheme.activation is not None:
        is_dynamic = not scheme.needs_input_scale
        activation = scheme.activation
        arguments = {**_arguments(activation.element.bits, activation.block_size), "dynamic": is_dynamic}
        group = {"input_activations": arguments, **group}
    return group


def _arguments(bits: int, block_size: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {"dynamic": False, "num_bits": bits, "type": "float"}
    return {**arguments, "group_size": block_size} if block_size else arguments
