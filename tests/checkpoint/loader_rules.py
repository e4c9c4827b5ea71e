"""What engines do with a quantized folder as they load it, by the sources of vLLM 0.33, SGLang 0.5.23 and TensorRT-LLM.

Each loader below walks the layers that the engine would build for the 16-bit model, decides by the config alone how
each is quantized, and lists the tensors that the engine would then look for. `check` compares that with the file:
nothing may be missing, of another dtype or shape, or left over. Nothing here imports blockscale.
"""

import fnmatch
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
EXPERT_PAIRS = ("gate_proj", "up_proj", "w1", "w3")  # of one expert: they share a scale
# What vLLM calls modules of models that see images, by how their weights' names begin. It renames lists likewise.
VLLM_NAMES = {
    "qwen2_5_vl": {"visual.": "visual.", "lm_head.": "language_model.lm_head.", "model.": "language_model.model."},
    "qwen3_vl": {
        "model.visual.": "visual.",
        "lm_head.": "language_model.lm_head.",
        "model.language_model.": "language_model.model.",
    },
}


class Refused(Exception):
    """The engine says that it does not take such a checkpoint."""


@dataclass(frozen=True)
class Layer:
    """A module that an engine builds: `shards` are the checkpoint's linears that it is made of."""

    prefix: str
    shards: tuple[str, ...]

    @property
    def is_experts(self) -> bool:
        return self.prefix.endswith(".experts")


@dataclass(frozen=True)
class Stored:
    dtype: str
    shape: tuple[int, ...]


Parameters = Mapping[str, Stored]


def read_tensors(folder: Path) -> dict[str, Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def layers_of(weights: Mapping[str, Tensor]) -> list[Layer]:
    """Fused as engines fuse them; embeddings are no linear layers, stacks of experts are."""
    found: dict[str, list[str]] = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        is_stack = ".experts." in name and module == name and weight.dim() == 3
        if not is_stack and (module == name or weight.dim() != 2 or "embed" in module):
            continue
        parent, _, leaf = module.rpartition(".")
        if ".experts." in module:
            prefix = module.partition(".experts.")[0] + ".experts"
        else:
            fused = next((fused for fused, leaves in FUSED.items() if leaf in leaves), leaf)
            prefix = f"{parent}.{fused}" if parent else fused
        found.setdefault(prefix, []).append(module)
    return [Layer(prefix, tuple(shards)) for prefix, shards in found.items()]


# ---------------------------------------------------------------- which tensors a method looks for


def _nvfp4(n: int, k: int) -> dict[str, Stored]:
    return {
        "weight": Stored("uint8", (n, k // 2)),
        "weight_scale": Stored("float8_e4m3fn", (n, k // 16)),
        "weight_scale_2": Stored("float32", ()),
    }


def _ct_nvfp4(n: int, k: int) -> dict[str, Stored]:
    return {
        "weight_packed": Stored("uint8", (n, k // 2)),
        "weight_scale": Stored("float8_e4m3fn", (n, k // 16)),
        "weight_global_scale": Stored("float32", (1,)),
    }


SCALAR = Stored("float32", ())
METHODS: dict[str, Callable[[int, int], dict[str, Stored]]] = {
    "NVFP4": lambda n, k: {**_nvfp4(n, k), "input_scale": SCALAR},
    "W4A16_NVFP4": _nvfp4,
    "FP8": lambda n, k: {"weight": Stored("float8_e4m3fn", (n, k)), "weight_scale": SCALAR, "input_scale": SCALAR},
    "FP8_PER_CHANNEL_PER_TOKEN": lambda n, k: {
        "weight": Stored("float8_e4m3fn", (n, k)),
        "weight_scale": Stored("float32", (n,)),
    },
    "CT_NVFP4": lambda n, k: {**_ct_nvfp4(n, k), "input_global_scale": Stored("float32", (1,))},
    "CT_NVFP4A16": _ct_nvfp4,
    "CT_MXFP4": lambda n, k: {
        "weight_packed": Stored("uint8", (n, k // 2)),
        "weight_scale": Stored("uint8", (n, k // 32)),
    },
    "CT_FP8": lambda n, k: {"weight": Stored("float8_e4m3fn", (n, k)), "weight_scale": Stored("float32", (n, 1))},
}
# One scalar for the whole fused layer: engines take the largest and do not rescale the rest.
SHARED = ("weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale")
SHARED_BY_EXPERTS = ("weight_scale_2", "weight_global_scale")  # by the gate and up of one expert


def check(folder: Path, base: Path, method_of: Callable[[Layer], str]) -> dict[str, str]:
    """The method of each layer, after comparing the file with what the methods look for."""
    weights, stored = read_tensors(base), read_tensors(folder)
    layers = layers_of(weights)
    expected: dict[str, Stored] = {}
    methods = {}
    for layer in layers:
        methods[layer.prefix] = method_of(layer)
        for shard in layer.shards:
            expected |= _parameters(shard, methods[layer.prefix], weights)
        _check_shared(layer, stored)
    in_layers = {name for layer in layers for shard in layer.shards for name in (shard, f"{shard}.weight")}
    expected |= {n: _as_stored(w) for n, w in weights.items() if n not in in_layers}
    found = {n: _as_stored(t) for n, t in stored.items()}
    cache = {n for n in found if n.endswith(("k_scale", "v_scale"))}
    assert {n: found[n] for n in found if n not in cache} == expected
    for name, tensor in stored.items():
        if tensor.is_floating_point():
            assert torch.isfinite(tensor.float()).all(), name  # a NaN scale counts as never loaded
        if name in cache or name.endswith(SHARED):
            assert tensor.numel() == 1, name
            assert tensor > 0, name
    return methods


def _as_stored(tensor: Tensor) -> Stored:
    return Stored(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _parameters(shard: str, method: str, weights: Mapping[str, Tensor]) -> dict[str, Stored]:
    plain = f"{shard}.weight" if f"{shard}.weight" in weights else shard
    if method == "NONE":
        return {plain: _as_stored(weights[plain])}
    if plain != shard:
        return {f"{shard}.{name}": what for name, what in METHODS[method](*weights[plain].shape).items()}
    if method.startswith("CT_"):
        raise Refused(f"{shard}: compressed-tensors has no stacks of experts")
    experts, k, n = weights[shard].shape  # the input dimension stays in the middle
    parameters = METHODS[method](n, k)
    return {
        shard if name == "weight" else f"{shard}_{name}": Stored(
            what.dtype, (experts, *reversed(what.shape)) if what.shape else ()
        )
        for name, what in parameters.items()
    }


def _check_shared(layer: Layer, stored: Mapping[str, Tensor]) -> None:
    sets: dict[str, list[str]] = {}
    for shard in layer.shards:
        parent, _, leaf = shard.rpartition(".")
        if not layer.is_experts:
            sets.setdefault(layer.prefix, []).append(shard)
        elif leaf in EXPERT_PAIRS:
            sets.setdefault(parent, []).append(shard)
    for shards in sets.values():
        for name in SHARED_BY_EXPERTS if layer.is_experts else SHARED:
            values = [stored[f"{shard}.{name}"] for shard in shards if f"{shard}.{name}" in stored]
            assert all(torch.equal(value, values[0]) for value in values), f"{layer.prefix}: {name}"


# ---------------------------------------------------------------- vLLM


def vllm(folder: Path, base: Path) -> dict[str, str]:
    """vllm/model_executor/layers/quantization/modelopt.py and compressed_tensors/."""
    config = _config(folder)
    names = VLLM_NAMES.get(json.loads((base / "config.json").read_text())["model_type"], {})
    if config["quant_method"] == "compressed-tensors":
        config["ignore"] = [_renamed(pattern, names) for pattern in config["ignore"]]
        return check(folder, base, lambda layer: _vllm_compressed_tensors(config, _in_vllm(layer, names)))
    assert config["quant_method"] == "modelopt"
    algorithm, patterns = str(config["quant_algo"]).upper(), config["ignore"]
    if algorithm == "MIXED_PRECISION":
        layers = config["quantized_layers"]
        return check(folder, base, lambda layer: _resolve(layers, layer, ("FP8", "NVFP4", "W4A16_NVFP4")))
    if algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4"):
        raise Refused(f"vLLM does not take quant_algo {algorithm}")
    if algorithm == "NVFP4" and not any("input_activations" in g for g in config["config_groups"].values()):
        algorithm = "W4A16_NVFP4"
    if names:  # `a.b*` is taken apart before it is renamed
        split = [(p[:-1], f"{p[:-1]}.*") if p.endswith("*") and not p.endswith(".*") else (p,) for p in patterns]
        patterns = [_renamed(pattern, names) for parts in split for pattern in parts]

    def method(layer: Layer) -> str:
        return "NONE" if _vllm_excluded(_in_vllm(layer, names), patterns) else _for_vllm(algorithm, layer)

    return check(folder, base, method)


def _in_vllm(layer: Layer, names: Mapping[str, str]) -> Layer:
    renamed = [_renamed(f"{name}.", names).removesuffix(".") for name in (layer.prefix, *layer.shards)]
    return Layer(renamed[0], tuple(renamed[1:]))


def _renamed(name: str, names: Mapping[str, str]) -> str:
    old = next((old for old in names if name.startswith(old)), "")
    return names.get(old, "") + name.removeprefix(old)


def _for_vllm(algorithm: str, layer: Layer) -> str:
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN" and layer.is_experts:
        raise Refused("vLLM's FP8 experts want one scale a tensor")
    return algorithm


def _vllm_excluded(layer: Layer, patterns: Sequence[str]) -> bool:
    prefix = layer.prefix
    if layer.is_experts:
        is_exact = any(prefix in pattern for pattern in patterns if "experts" in pattern)
    else:
        states = {shard in patterns for shard in layer.shards}
        if len(states) > 1:
            raise Refused(f"{prefix} is excluded in part")
        is_exact = states.pop()
    is_inside = any(pattern != prefix and pattern in prefix for pattern in patterns)
    return is_exact or is_inside or any(fnmatch.fnmatch(prefix, pattern) for pattern in patterns)


def _resolve(quantized_layers: Mapping[str, Any], layer: Layer, known: tuple[str, ...]) -> str:
    """By name, by the shards of a fused layer, by what lies below; what is not found is not quantized."""
    algorithms: set[str] = set()
    if layer.prefix in quantized_layers:
        algorithms = {quantized_layers[layer.prefix]["quant_algo"]}
    elif not layer.is_experts:
        algorithms = {quantized_layers[s]["quant_algo"] for s in layer.shards if s in quantized_layers}
    if not algorithms:
        algorithms = {v["quant_algo"] for name, v in quantized_layers.items() if name.startswith(layer.prefix + ".")}
    if len(algorithms) > 1:
        raise Refused(f"{layer.prefix}: {algorithms}")
    algorithm = algorithms.pop() if algorithms else "NONE"
    if algorithm not in (*known, "NONE"):
        raise Refused(f"{layer.prefix}: {algorithm} in a mixed checkpoint")
    return algorithm


def _matches(name: str, target: str) -> bool:
    return bool(re.match(target[3:], name)) if target.startswith("re:") else name == target


def _vllm_compressed_tensors(config: Mapping[str, Any], layer: Layer) -> str:
    methods = {_ct_method(config, shard) for shard in layer.shards}
    if len(methods) > 1:
        raise Refused(f"{layer.prefix}: {methods}")
    return methods.pop()


def _ct_method(config: Mapping[str, Any], name: str) -> str:
    if any(_matches(name, target) for target in config["ignore"]):
        return "NONE"
    groups = list(config["config_groups"].values())
    by_name = [group for group in groups if any(_matches(name, target) for target in group["targets"])]
    is_head = name.rpartition(".")[2] == "lm_head"  # a class of its own
    by_class = [group for group in groups if "Linear" in group["targets"] and not is_head]
    found = by_name or by_class
    return _ct_scheme(found[0]) if found else "NONE"


def _ct_scheme(group: Mapping[str, Any]) -> str:
    weights, inputs = group["weights"], group["input_activations"]
    assert weights["symmetric"]
    assert weights["dynamic"] is False
    kind = (weights["num_bits"], weights["type"], weights["strategy"], weights["group_size"])
    into = inputs and (inputs["num_bits"], inputs["type"], inputs["strategy"], inputs["group_size"], inputs["dynamic"])
    if kind == (4, "float", "tensor_group", 16) and group["format"] == "nvfp4-pack-quantized":
        if into is None:
            return "CT_NVFP4A16"
        if into == (4, "float", "tensor_group", 16, "local"):
            return "CT_NVFP4"
    if kind == (4, "float", "group", 32) and group["format"] == "mxfp4-pack-quantized":
        assert weights["scale_dtype"] == "torch.uint8"
        if into in (None, (4, "float", "group", 32, True)):
            return "CT_MXFP4"
    is_fp8 = kind == (8, "float", "channel", None) and group["format"] == "float-quantized"
    if is_fp8 and into == (8, "float", "token", None, True):
        return "CT_FP8"
    raise Refused(f"no scheme for {kind} with {into}")


# ---------------------------------------------------------------- SGLang


def sglang(folder: Path, base: Path) -> dict[str, str]:
    """sglang/srt/layers/quantization/modelopt_quant.py and compressed_tensors/."""
    config = _config(folder)
    if config["quant_method"] == "compressed-tensors":
        if any(_ct_scheme(group) == "CT_MXFP4" for group in config["config_groups"].values()):
            raise Refused("4-bit floats are taken in tensor groups of 16 only")  # _get_scheme_from_parts
        return check(folder, base, lambda layer: _vllm_compressed_tensors(config, layer))
    for section in (config, _hf_quant_config(folder)):  # either is read, depending on how the model is given
        algorithm = section["quant_algo"]
        if algorithm == "MIXED_PRECISION":
            layers = section["quantized_layers"]
            if not any("NVFP4" in entry["quant_algo"] for entry in layers.values()):
                raise Refused("taken for W4AFP8")
            methods = check(folder, base, lambda x, y=layers: _resolve(y, x, ("FP8", "NVFP4", "W4A16_NVFP4")))
            continue
        if algorithm not in ("FP8", "NVFP4", "NVFP4_AWQ", "W4A16_NVFP4"):
            raise Refused(f"SGLang does not take quant_algo {algorithm}")
        if "FP4" in algorithm:
            assert _group_sizes(section) == {16}
        patterns = section["ignore"] if section is config else section["exclude_modules"]
        methods = check(folder, base, lambda x, a=algorithm, p=patterns: "NONE" if _sglang_excluded(x, p) else a)
    return methods


def _group_sizes(section: Mapping[str, Any]) -> set[int]:
    parts = [section, *(part for group in section.get("config_groups", {}).values() for part in group.values())]
    return {part["group_size"] for part in parts if isinstance(part, dict) and part.get("group_size")}


SGLANG_PARTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


def _sglang_excluded(layer: Layer, patterns: Sequence[str]) -> bool:
    if not layer.is_experts:
        states = {shard in patterns for shard in layer.shards}
        if len(states) > 1:
            raise Refused(f"{layer.prefix} is excluded in part")
        if states.pop():
            return True
    leaf = layer.prefix.rpartition(".")[2]
    names = [layer.prefix, *layer.prefix.split(".")]
    globs = [re.compile(pattern.replace(".", r"\.").replace("*", ".*")) for pattern in patterns]
    # parts of MLA, of whatever layer the entry names
    tails = [tail for pattern in patterns if (tail := pattern.rpartition(".")[2]) in SGLANG_PARTS]
    return any(glob.fullmatch(name) for glob in globs for name in names) or any(tail in leaf for tail in tails)


# ---------------------------------------------------------------- TensorRT-LLM


def tensorrt_llm(folder: Path, base: Path) -> dict[str, str]:
    """tensorrt_llm/_torch/model_config.py and modules/linear.py: hf_quant_config.json counts."""
    config = _config(folder)
    if config["quant_method"] == "compressed-tensors":
        groups = config["config_groups"].values()
        if len(groups) > 1 and any("Linear" in group["targets"] for group in groups):
            raise Refused("several groups by class name")
        if any(_ct_scheme(group) in ("CT_NVFP4A16",) for group in groups):
            raise Refused("NVFP4 weights want NVFP4 activations")
        if any(_ct_scheme(group) == "CT_MXFP4" and group["input_activations"] for group in groups):
            raise Refused("MXFP4 is taken for weights only")
        return check(folder, base, lambda layer: _vllm_compressed_tensors(config, layer))
    section = _hf_quant_config(folder)
    algorithm = section["quant_algo"]
    if algorithm == "MIXED_PRECISION":
        layers = section["quantized_layers"]
        return check(folder, base, lambda layer: _resolve(layers, layer, ("FP8", "NVFP4", "W4A16_NVFP4")))
    if algorithm not in ("FP8", "NVFP4", "W4A16_NVFP4"):  # it knows others, whose tensors are not looked into here
        raise Refused(f"quant_algo {algorithm}")
    patterns = section["exclude_modules"]

    def method(layer: Layer) -> str:
        names = [layer.prefix] if layer.is_experts else [layer.prefix, *layer.shards]
        is_excluded = any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)
        return "NONE" if is_excluded else algorithm

    return check(folder, base, method)


# ---------------------------------------------------------------- config files


def _config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def _hf_quant_config(folder: Path) -> dict[str, Any]:
    quantization = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    assert "kv_cache_quant_algo" in quantization
    if quantization["quant_algo"] != "MIXED_PRECISION":
        assert "exclude_modules" in quantization
        if "NVFP4" in quantization["quant_algo"]:
            assert "group_size" in quantization
    return quantization


ENGINES: dict[str, Callable[[Path, Path], dict[str, str]]] = {
    "vLLM": vllm,
    "SGLang": sglang,
    "TensorRT-LLM": tensorrt_llm,
}
