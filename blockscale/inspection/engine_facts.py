"""What decides whether an engine loads a checkpoint, gathered once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from blockscale.algorithms.activation_scale import ActivationScale
from blockscale.checkpoint.dialects import branches
from blockscale.checkpoint.dialects.stored import StoredModel
from blockscale.checkpoint.faults import Fault
from blockscale.checkpoint.folder import HF_QUANT_CONFIG, Folder
from blockscale.checkpoint.groups import expert_set
from blockscale.checkpoint.linear import Scheme
from blockscale.checkpoint.record import read_activation_scale
from blockscale.checkpoint.shards import INDEX_NAME
from blockscale.checkpoint.structure import text_config
from blockscale.errors import CheckpointError
from blockscale.formats.spec import NVFP4
from blockscale.inspection.reading import Reading

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
_GGML_BLOCK = 64  # columns of an NVFP4 block there


@dataclass(frozen=True)
class Facts:
    """method             quant_method; None for 16 bits
    dialect            "modelopt" or "compressed-tensors", where linears are stored in one
    settings           quantization_config of config.json
    file_settings      what hf_quant_config.json says, without its wrapper
    algorithm          quant_algo as vLLM and SGLang find it; file_algorithm: as TensorRT-LLM does
    layer_algorithms   of a mixed modelopt checkpoint
    schemes            of all quantized linears; expert_schemes: of those of experts
    stack              a stack of experts in one tensor; "" without any
    uneven_experts     a layer whose experts are not all stored alike; "" without any
    pre_quant_scales   linears whose input is scaled by channel (AWQ)
    low_rank           a linear with a low-rank branch; "" without any
    residual           a linear with residual channels; "" without any
    activation_scale   how block scales of NVFP4 inputs are to be chosen, where that is not by amax; else ""
    num_untiled        NVFP4 linears whose K is no multiple of GGML's block
    kv_format          of the KV cache, as the config announces it
    is_named           whether the files are where a loader looks that does not list the folder
    """

    method: str | None
    dialect: str | None
    model_type: str
    settings: Mapping[str, Any]
    file_settings: Mapping[str, Any] | None
    algorithm: str
    file_algorithm: str
    layer_algorithms: frozenset[str]
    schemes: frozenset[Scheme]
    expert_schemes: frozenset[Scheme]
    stack: str
    uneven_experts: str
    pre_quant_scales: tuple[str, ...]
    low_rank: str
    residual: str
    activation_scale: str
    num_untiled: int
    kv_format: str | None
    has_kv_scales: bool
    has_tokenizer: bool
    is_named: bool
    faults: tuple[Fault, ...]

    @property
    def groups(self) -> list[Mapping[str, Any]]:
        """config_groups of a compressed-tensors config."""
        content = self.settings.get("config_groups")
        values = content.values() if isinstance(content, Mapping) else ()
        return [group for group in values if isinstance(group, Mapping)]


def gather_facts(reading: Reading, more_faults: Iterable[Fault]) -> Facts:
    folder, model = reading.folder, reading.model
    claims = {claim.file: claim for claim in model.claims} if model is not None else {}
    by_file = {file: "" if claim.algorithm is None else str(claim.algorithm) for file, claim in claims.items()}
    algorithm = by_file.get("config.json") or by_file.get(HF_QUANT_CONFIG, "")
    linears = list(model.linears.values()) if model is not None else []
    schemes = _distinct(linear.scheme for linear in linears)
    in_experts = [linear for linear in linears if expert_set(linear.name) is not None]
    return Facts(
        method=folder.method,
        dialect=None if model is None else model.dialect,
        model_type=_text_model_type(folder),
        settings=folder.config.get("quantization_config") or {},
        file_settings=_unwrapped(folder.quant_config),
        algorithm=algorithm,
        file_algorithm=by_file.get(HF_QUANT_CONFIG) or algorithm,
        layer_algorithms=frozenset(a for c in claims.values() if c.layers for a in c.layers.values()),
        schemes=schemes,
        expert_schemes=_distinct(linear.scheme for linear in in_experts),
        stack=next((linear.name for linear in linears if len(linear.shape) == 3), ""),
        uneven_experts="" if model is None else _uneven_experts(model, reading.kept),
        pre_quant_scales=tuple(linear.name for linear in linears if "pre_quant_scale" in linear.tensors),
        low_rank=next((linear.name for linear in linears if branches.has_low_rank(linear.tensors)), ""),
        residual=next((linear.name for linear in linears if branches.has_residual(linear.tensors)), ""),
        activation_scale=_activation_scale(folder, schemes),
        num_untiled=sum(linear.scheme.weight is NVFP4 and linear.shape[-1] % _GGML_BLOCK > 0 for linear in linears),
        kv_format=None if model is None else model.kv_format,
        has_kv_scales=model is not None and bool(model.kv_tensors),
        has_tokenizer=any(file.name in _TOKENIZERS for file in folder.companions),
        is_named=any((folder.path / name).is_file() for name in ("model.safetensors", INDEX_NAME)),
        faults=(*reading.faults, *more_faults),
    )


def _text_model_type(folder: Folder) -> str:
    """Of the language model, which the config of a multimodal one may leave to its class."""
    outer, inner = folder.config.get("model_type"), text_config(folder.config)
    own = inner.get("model_type")
    if inner is not folder.config and own is None and isinstance(outer, str):
        return f"{outer}_text"
    return own if isinstance(own, str) else ""


def _activation_scale(folder: Folder, schemes: Iterable[Scheme]) -> str:
    try:
        method = read_activation_scale(folder.path)
    except CheckpointError:  # a fault that reading has named
        return ""
    rounds = any(scheme.activation is NVFP4 for scheme in schemes)
    return method.value if rounds and method is not ActivationScale.AMAX else ""


def _unwrapped(quant_config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    inner = None if quant_config is None else quant_config.get("quantization")
    return inner if isinstance(inner, Mapping) else quant_config


def _distinct(schemes: Iterable[Scheme]) -> frozenset[Scheme]:
    """Most are one object, and hashing a scheme costs more than all else here."""
    return frozenset({id(scheme): scheme for scheme in schemes}.values())


def _uneven_experts(model: StoredModel, kept: Iterable[str]) -> str:
    """Engines run all experts of a layer in one kernel."""
    found: dict[str, dict[int, Scheme | None]] = {}
    for linear in model.linears.values():
        experts = expert_set(linear.name)
        if experts is not None:
            found.setdefault(experts, {})[id(linear.scheme)] = linear.scheme
    for name in kept:
        experts = expert_set(name)
        if experts in found and name.endswith(".weight"):
            found[experts][id(None)] = None
    return next((experts for experts, schemes in found.items() if len(set(schemes.values())) > 1), "")
