"""A decoder's shape, read once from a Hugging Face config. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from blockscale.checkpoint.structure import text_config
from blockscale.errors import ModelError
from blockscale.models.moe_config import LatentConfig, MoEConfig, read_latent, read_moe
from blockscale.models.rope_config import HINT, Rope, original_context, read_rope, rope_settings


class Activation(Enum):
    """Of the gate: what stands between the two products of a feed-forward layer."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True)
class DecoderConfig:
    """family              `model_type` of the language model's config
    hidden, inner       widths of the model and inside a dense feed-forward layer
    num_kv_heads        key and value heads; num_heads is a multiple
    context             tokens that positions are known for
    epsilon             of every RMSNorm
    windows             of each layer: tokens that a query sees, itself included; 0 for all
    rope, local_rope    of layers that see all tokens, and of those with a window
    scale               of attention's logits
    attention_softcap   logits become cap * tanh(logits / cap); 0 for none
    final_softcap       the same of the vocabulary's
    embedding_scale     that embeddings are multiplied by
    is_tied             the head is the embedding
    has_unit_offset     norms multiply by 1 + weight
    has_qk_norm         queries and keys are normed, a head at a time
    has_outer_norms     the results of attention and feed-forward are normed as well (Gemma)
    has_qkv_bias, has_o_bias, has_mlp_bias
    has_sinks           a logit a head that takes part in the softmax's denominator alone
    moe                 None without experts
    latent              None where keys and values are kept
    """

    family: str
    vocab_size: int
    hidden: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    epsilon: float
    windows: tuple[int, ...]
    rope: Rope
    local_rope: Rope
    scale: float
    activation: Activation
    is_tied: bool
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    embedding_scale: float = 1.0
    has_unit_offset: bool = False
    has_qk_norm: bool = False
    has_outer_norms: bool = False
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    has_sinks: bool = False
    moe: MoEConfig | None = None
    latent: LatentConfig | None = None


@dataclass(frozen=True)
class _Family:
    """What the name alone says. Biases: None where the config says it (`attention_bias`)."""

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    has_qk_norm: bool = False
    is_gemma: bool = False
    has_sinks: bool = False
    window_every: int = 0  # without `layer_types`: every so manieth layer sees all tokens, the others a window


_FAMILIES: dict[str, _Family] = {
    "llama": _Family(),
    "mistral": _Family(False, False),
    "qwen2": _Family(True, False),
    "qwen3": _Family(has_qk_norm=True),
    "phi3": _Family(False, False),
    "gemma2": _Family(is_gemma=True, window_every=2),
    "gemma3_text": _Family(has_qk_norm=True, is_gemma=True, window_every=6),
    "mixtral": _Family(False, False),
    "qwen3_moe": _Family(has_qk_norm=True),
    "gpt_oss": _Family(has_sinks=True, window_every=2),
    "deepseek_v3": _Family(),
}
FAMILIES = tuple(_FAMILIES)
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_tanh": Activation.GELU_TANH,
}
_GEMMA_DEFAULTS = {"tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256}


def has_decoder(config: Mapping[str, Any]) -> bool:
    """Whether a model of this config.json is of a family that has a decoder here."""
    return str(text_config(config).get("model_type")) in _FAMILIES


def read_config(config: Mapping[str, Any], *, is_long: bool = False) -> DecoderConfig:
    """The decoder of a model's config.json, or of the language model inside it.

    is_long  a model with LongRoPE serves its whole context, for which its positions differ from those of the original
             context from the first token on
    ModelError for a family that has no decoder here, for a variant that it does not compute, and for what is missing.
    """
    text = dict(text_config(config))
    name = str(text.get("model_type"))
    family = _FAMILIES.get(name)
    if family is None:
        raise ModelError(f"no decoder here for model type '{name}'", hint=HINT)
    if family.is_gemma:
        text = {**_GEMMA_DEFAULTS, **{key: value for key, value in text.items() if value is not None}}
    try:
        found = _read(name, family, text, is_long)
    except KeyError as e:
        raise ModelError(
            f"config.json has no {e}", hint="restore the config.json that the model was published with"
        ) from e
    except (TypeError, ValueError) as e:
        raise ModelError(
            f"config.json cannot be read: {e}", hint="restore the config.json that the model was published with"
        ) from e
    _check(found)
    return found


def _read(name: str, family: _Family, text: Mapping[str, Any], is_long: bool) -> DecoderConfig:
    hidden, num_heads = int(text["hidden_size"]), int(text["num_attention_heads"])
    head_dim = int(text.get("head_dim") or hidden // num_heads)
    latent = read_latent(text)
    settings = rope_settings(text)
    context = int(text["max_position_embeddings"])
    if settings["rope_type"] == "longrope" and not is_long:
        context = min(context, original_context(text, settings))
    rope_dim = latent.rope_dim if latent else head_dim
    local = rope_settings(text, "sliding_attention")
    of_config = bool(text.get("attention_bias", False))
    return DecoderConfig(
        family=name,
        vocab_size=int(text["vocab_size"]),
        hidden=hidden,
        inner=int(text["intermediate_size"]),
        num_layers=int(text["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(text.get("num_key_value_heads") or num_heads),
        head_dim=head_dim,
        context=context,
        epsilon=float(text["rms_norm_eps"]),
        windows=_windows(text, family),
        rope=read_rope(text, settings, rope_dim, is_long=is_long),
        local_rope=read_rope(text, local, rope_dim, is_long=is_long),
        scale=float(text.get("query_pre_attn_scalar") or head_dim) ** -0.5 if family.is_gemma else head_dim**-0.5,
        activation=_activation(text, family),
        is_tied=bool(text.get("tie_word_embeddings", False)),
        attention_softcap=float(text.get("attn_logit_softcapping") or 0.0),
        final_softcap=float(text.get("final_logit_softcapping") or 0.0),
        embedding_scale=hidden**0.5 if family.is_gemma else 1.0,
        has_unit_offset=family.is_gemma,
        has_qk_norm=family.has_qk_norm,
        has_outer_norms=family.is_gemma,
        has_qkv_bias=of_config if family.qkv_bias is None else family.qkv_bias,
        has_o_bias=of_config if family.o_bias is None else family.o_bias,
        has_mlp_bias=bool(text.get("mlp_bias", False)),
        has_sinks=family.has_sinks,
        moe=read_moe(text),
        latent=latent,
    )


def _windows(text: Mapping[str, Any], family: _Family) -> tuple[int, ...]:
    num_layers, window = int(text["num_hidden_layers"]), int(text.get("sliding_window") or 0)
    if text.get("use_sliding_window") is False:
        return (0,) * num_layers
    kinds = text.get("layer_types")
    if kinds is not None:
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown or len(kinds) != num_layers:
            raise ValueError(f"layer_types of {len(kinds)} layers with {', '.join(sorted(set(kinds)))}")
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    every = int(text.get("sliding_window_pattern") or text.get("_sliding_window_pattern") or family.window_every)
    if every:
        return tuple(window if (i + 1) % every else 0 for i in range(num_layers))
    if "max_window_layers" in text:  # Qwen: the layers from there on
        first = int(text["max_window_layers"]) if text.get("use_sliding_window") else num_layers
        return tuple(window if i >= first else 0 for i in range(num_layers))
    return (window,) * num_layers


def _activation(text: Mapping[str, Any], family: _Family) -> Activation:
    if family.is_gemma:
        name = text.get("hidden_activation") or text.get("hidden_act") or "gelu_pytorch_tanh"
        name = "gelu_pytorch_tanh" if name == "gelu" else name  # what early Gemma configs say and do not mean
    else:
        name = text.get("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        raise ModelError(f"config.json: no activation '{name}' in a decoder here", hint=HINT)
    return _ACTIVATIONS[name]


def _check(config: DecoderConfig) -> None:
    sizes = (config.vocab_size, config.hidden, config.num_layers, config.num_heads, config.num_kv_heads, config.context)
    if min(sizes) < 1 or config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"config.json: {config.num_heads} heads over {config.num_kv_heads} of keys and values, "
            f"{config.num_layers} layers of {config.hidden}, a vocabulary of {config.vocab_size}",
            hint="sizes are positive, and query heads a multiple of key and value heads",
        )
    if config.latent is None and config.head_dim % 16:
        raise ModelError(f"heads of {config.head_dim}: caches here hold multiples of 16", hint=HINT)
    if config.latent is None and 2 * len(config.rope.frequencies) > config.head_dim:
        raise ModelError(f"config.json: positions turn more than the head's {config.head_dim} elements", hint=HINT)
