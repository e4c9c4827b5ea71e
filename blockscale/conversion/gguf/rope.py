"""A model's rotary embedding as llama.cpp's metadata, and as the tensors of factors that some graphs read.

Factors divide a pair's frequency: Llama 3's follow from its config, Phi-3's long and short ones stand in it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import gguf
import torch
from torch import Tensor

from blockscale.conversion.gguf.families import Family
from blockscale.conversion.gguf.hyperparameters import checked_size, size
from blockscale.conversion.gguf.rows import Geometry
from blockscale.errors import CheckpointError

_YARN_MSCALE = 0.1  # llama.cpp multiplies by 1 + 0.1 ln(factor) by itself
_WITH_FACTORS = ("llama", "phi3")  # the graphs that read them
_LONG_ROPE = ("longrope", "su")
_ORIGINAL = "original_max_position_embeddings"
_YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}  # llama.cpp reads others for other architectures only


@dataclass(frozen=True)
class Rope:
    """What the file says of the rotary embedding.

    base, base_sliding   theta of the layers that see everything, and of those that see a window (None: the same)
    scaling              llama.cpp's name, None for a plain embedding
    factor               contexts are stretched by
    original_length      tokens that the model was first trained on
    attention_factor     multiplied into cos and sin, beside what llama.cpp multiplies by itself
    tensors              by name, fp32 [rotated / 2]
    """

    base: float
    num_rotated: int
    base_sliding: float | None = None
    scaling: gguf.RopeScalingType | None = None
    factor: float | None = None
    original_length: int | None = None
    attention_factor: float = 1.0
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


def num_rotated(config: Any, geometry: Geometry) -> int:
    """Dimensions of a head that turn."""
    parameters = _parameters(config)
    return int(geometry.head_dim * _number({"partial_rotary_factor": 1.0, **parameters}, "partial_rotary_factor"))


def _parameters(config: Any) -> dict[str, Any]:
    """Of the layers that see everything."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return dict(parameters.get("full_attention", parameters))


def read_rope(config: Any, family: Family, geometry: Geometry) -> Rope:
    """CheckpointError for a scaling that the architecture's graph does not compute."""
    parameters = _parameters(config)
    kind = parameters.get("rope_type", "default")
    base = _number(parameters, "rope_theta")
    sliding = config.rope_parameters.get("sliding_attention") or {} if family.architecture == "gemma3" else {}
    if num_rotated(config, geometry) != geometry.head_dim and family.architecture != "phi3":
        raise _unsupported("of a part of each head", family)
    if sliding.get("rope_type", "default") != "default":
        raise _unsupported(f"{sliding['rope_type']} in layers with a window", family)
    base_sliding = _number(sliding, "rope_theta") if "rope_theta" in sliding else None
    plain = Rope(base, num_rotated(config, geometry), base_sliding)
    if kind == "default":
        return plain
    if kind == "linear":
        return replace(plain, scaling=gguf.RopeScalingType.LINEAR, factor=_number(parameters, "factor"))
    if kind == "llama3" and family.architecture == "llama":
        return replace(plain, tensors={"rope_freqs.weight": _llama3_factors(parameters, geometry.head_dim)})
    if kind == "yarn" and family.architecture not in ("gemma2", "gemma3", "phi3"):
        for name, value in _YARN_BETAS.items():
            if parameters.get(name) not in (None, value):
                raise _unsupported(f"yarn with {name} {parameters[name]}", family)
        return _yarn(plain, config, parameters)
    if kind in _LONG_ROPE and family.architecture in _WITH_FACTORS:
        return _long_rope(plain, config, parameters)
    raise _unsupported(kind, family)


def _unsupported(what: str, family: Family) -> CheckpointError:
    return CheckpointError(
        f"a rotary embedding '{what}' is not computed by llama.cpp's graph of '{family.architecture}'",
        hint="remove the scaling from config.json to keep to the model's original context",
    )


def _number(parameters: Mapping[str, Any], name: str) -> float:
    value = parameters.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise CheckpointError(f"config.json: {name} of the rotary embedding is {value!r}", hint="mend config.json")
    return float(value)


def _llama3_factors(parameters: Mapping[str, Any], dim: int) -> Tensor:
    """fp32 [dim/2]: 1 for short wavelengths, `factor` for long ones, and a blend between."""
    factor, low, high = (_number(parameters, n) for n in ("factor", "low_freq_factor", "high_freq_factor"))
    length = _number(parameters, _ORIGINAL)
    wavelength = 2 * math.pi * parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    blend = ((length / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - blend) / factor + blend)).float()


def _yarn(plain: Rope, config: Any, parameters: Mapping[str, Any]) -> Rope:
    factor = _number(parameters, "factor")
    own = 1 + _YARN_MSCALE * math.log(factor) if factor > 1 else 1.0
    notice = "llama.cpp rounds the range of YaRN's correction to whole dimensions, this model does not"
    return replace(
        plain,
        scaling=gguf.RopeScalingType.YARN,
        factor=factor,
        original_length=_original_length(config, parameters),
        attention_factor=_attention_factor(config) / own,
        notices=() if parameters.get("truncate", True) else (notice,),
    )


def _long_rope(plain: Rope, config: Any, parameters: Mapping[str, Any]) -> Rope:
    tensors = {}
    for kind in ("long", "short"):
        values = parameters.get(f"{kind}_factor")
        if not isinstance(values, list) or len(values) != plain.num_rotated // 2:
            raise CheckpointError(
                f"config.json: {kind}_factor is no list of {plain.num_rotated // 2} factors", hint="mend config.json"
            )
        tensors[f"rope_factors_{kind}.weight"] = torch.tensor(values, dtype=torch.float32)
    return replace(
        plain,
        scaling=gguf.RopeScalingType.LONGROPE,
        original_length=_original_length(config, parameters),
        attention_factor=_attention_factor(config),
        tensors=tensors,
    )


def _original_length(config: Any, parameters: Mapping[str, Any]) -> int:
    own = parameters.get(_ORIGINAL)
    return size(config, "max_position_embeddings") if own is None else checked_size(own, _ORIGINAL)


def _attention_factor(config: Any) -> float:
    """As transformers computes it from the config."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = _parameters(config)["rope_type"]
    try:
        return float(ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[1])
    except Exception as e:  # transformers raises what its formulas trip over
        raise CheckpointError(
            f"config.json: transformers cannot compute the rotary scaling '{kind}': {e}", hint="mend config.json"
        ) from e


def add_rope(writer: gguf.GGUFWriter, rope: Rope) -> None:
    writer.add_rope_dimension_count(rope.num_rotated)
    writer.add_rope_freq_base(rope.base)
    if rope.base_sliding is not None:
        writer.add_rope_freq_base_swa(rope.base_sliding)
    if rope.scaling is not None:
        writer.add_rope_scaling_type(rope.scaling)
    if rope.factor is not None:
        writer.add_rope_scaling_factor(rope.factor)
    if rope.original_length is not None:
        writer.add_rope_scaling_orig_ctx_len(rope.original_length)
    if rope.attention_factor != 1.0:
        writer.add_rope_scaling_attn_factors(rope.attention_factor)
