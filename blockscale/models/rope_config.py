"""What a config says of rotary positions, as frequencies. Needs no torch.

Pair j of a head's first `2 * len(frequencies)` elements turns by position * frequencies[j]; cosine and sine are
multiplied by `amount`. The rules are those of transformers (`modeling_rope_utils.py`, 5.x), where the papers' formulas
are called by these names.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blockscale.errors import ModelError

HINT = "this architecture runs through transformers"


@dataclass(frozen=True)
class Rope:
    """frequencies  of each pair, in radians a token
    amount       that cosine and sine are multiplied by
    """

    frequencies: tuple[float, ...]
    amount: float = 1.0


def rope_settings(config: Mapping[str, Any], layer_type: str = "full_attention") -> Mapping[str, Any]:
    """The settings of one kind of layer under one set of names, whichever age the config is of."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(found.get(layer_type), Mapping):
        found = found[layer_type]
    elif layer_type == "sliding_attention" and config.get("rope_local_base_freq"):
        return {"rope_type": "default", "rope_theta": config["rope_local_base_freq"]}
    theta = found.get("rope_theta", config.get("rope_theta", 10_000.0))
    kind = found.get("rope_type", found.get("type", "default"))
    return {**found, "rope_type": "longrope" if kind == "su" else kind, "rope_theta": theta}


def read_rope(config: Mapping[str, Any], settings: Mapping[str, Any], head_dim: int, *, is_long: bool = False) -> Rope:
    """The frequencies for `head_dim` elements.

    is_long  of LongRoPE's two sets, that for contexts longer than the original
    ModelError for a kind that is not known, and for settings that are missing.
    """
    share = float(settings.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) or 1.0)
    dim = int(head_dim * share)
    kind = str(settings["rope_type"])
    try:
        plain = tuple(float(settings["rope_theta"]) ** (-j / dim) for j in range(0, dim, 2))
        match kind:
            case "default" | "dynamic":  # dynamic differs past max_position_embeddings, where no sequence gets
                return Rope(plain)
            case "linear":
                return Rope(tuple(f / float(settings["factor"]) for f in plain))
            case "llama3":
                return Rope(tuple(_llama3(f, settings) for f in plain))
            case "yarn":
                return _yarn(config, settings, plain)
            case "longrope":
                return _longrope(config, settings, plain, is_long)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as e:
        raise ModelError(
            f"config.json: rotary positions of type '{kind}' cannot be read: {e}",
            hint="restore the config.json that the model was published with",
        ) from e
    raise ModelError(f"no rotary positions of type '{kind}' here", hint=HINT)


def original_context(config: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    """Tokens that a model with scaled positions was first trained on."""
    found = settings.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return int(found or config["max_position_embeddings"])


def _llama3(frequency: float, settings: Mapping[str, Any]) -> float:
    """Waves longer than the original context are stretched, short ones kept, those between blended."""
    factor, original = float(settings["factor"]), float(settings["original_max_position_embeddings"])
    low, high = float(settings["low_freq_factor"]), float(settings["high_freq_factor"])
    wave = 2 * math.pi / frequency
    if wave > original / low:
        return frequency / factor
    if wave < original / high:
        return frequency
    share = (original / wave - low) / (high - low)
    return (1 - share) * frequency / factor + share * frequency


def _yarn(config: Mapping[str, Any], settings: Mapping[str, Any], plain: tuple[float, ...]) -> Rope:
    """Peng et al., 2023 (arXiv 2309.00071), sections 3.2 to 3.4."""
    factor, base = float(settings["factor"]), float(settings["rope_theta"])
    original, dim = original_context(config, settings), 2 * len(plain)

    def amount(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    def place(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = place(float(settings.get("beta_fast") or 32)), place(float(settings.get("beta_slow") or 1))
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    kept = [1 - min(max((j - low) / width, 0), 1) for j in range(len(plain))]
    frequencies = tuple(f / factor * (1 - k) + f * k for f, k in zip(plain, kept, strict=True))
    stated, mscale, of_all = (settings.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if stated is None:
        stated = amount(float(mscale)) / amount(float(of_all)) if mscale and of_all else amount(1.0)
    return Rope(frequencies, float(stated))


def _longrope(config: Mapping[str, Any], settings: Mapping[str, Any], plain: tuple[float, ...], is_long: bool) -> Rope:
    """LongRoPE (arXiv 2402.13753): a factor a pair, one set up to the original context and one beyond."""
    divisors = [float(f) for f in settings["long_factor" if is_long else "short_factor"]]
    frequencies = tuple(f / d for f, d in zip(plain, divisors, strict=True))
    original = original_context(config, settings)
    factor = float(settings.get("factor") or config["max_position_embeddings"] / original)
    stated = settings.get("attention_factor")
    if stated is None:
        stated = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return Rope(frequencies, float(stated))
