"""What a config says of experts and of latent attention. Needs no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from blockscale.errors import ModelError


class Routing(Enum):
    """The rule by which tokens choose experts; see `routing`."""

    SOFTMAX_THEN_TOP = "softmax, then the largest"
    TOP_THEN_SOFTMAX = "the largest, then softmax"
    TOP_OF_GROUPS = "the best of the best groups"


@dataclass(frozen=True)
class MoEConfig:
    """A layer of experts.

    num_experts, top_k   how many there are, and how many a token goes to
    inner                width inside an expert
    layers               which layers have experts; the others are dense
    routing              and its settings: is_normalized, num_groups and num_chosen_groups, factor of the weights
    shared_inner         width inside what all tokens share; 0 for none
    alpha, beta, limit   of the gated activation; see `kernels.experts.GatedActivation`
    """

    num_experts: int
    top_k: int
    inner: int
    layers: frozenset[int]
    routing: Routing
    is_normalized: bool = True
    num_groups: int = 1
    num_chosen_groups: int = 1
    factor: float = 1.0
    shared_inner: int = 0
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention.

    q_rank            of the query's low-rank projection; 0 for none
    latent_dim        kept of a token, beside rope_dim elements with its position
    nope_dim, v_dim   of a head's keys without position, and of its values
    is_interleaved    stored pairs that turn together are neighbours, and not a half apart
    scale             of the logits
    """

    q_rank: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    is_interleaved: bool
    scale: float


def read_moe(config: Mapping[str, Any]) -> MoEConfig | None:
    """Of a language model's config.json; None where its family has no experts. ModelError for settings that cannot
    be."""
    read = _READ.get(str(config.get("model_type")))
    if read is None:
        return None
    try:
        found = read(config)
    except (KeyError, TypeError, ValueError) as e:
        raise _unreadable(e) from e
    if not (0 < found.top_k <= found.num_experts and found.inner > 0):
        raise ModelError(
            f"config.json: {found.top_k} of {found.num_experts} experts of width {found.inner}",
            hint="num_experts_per_tok lies between 1 and the number of experts",
        )
    has_groups = found.num_groups > 0 and found.num_experts % found.num_groups == 0
    if not has_groups or not 0 < found.num_chosen_groups <= found.num_groups:
        raise ModelError(
            f"config.json: {found.num_chosen_groups} of {found.num_groups} groups of {found.num_experts} experts",
            hint="n_group divides n_routed_experts, topk_group lies between 1 and n_group",
        )
    return found


def read_latent(config: Mapping[str, Any]) -> LatentConfig | None:
    """Of a language model's config.json; None for attention of the usual kind."""
    if config.get("model_type") != "deepseek_v3":
        return None
    try:
        nope, rope = int(config["qk_nope_head_dim"]), int(config["qk_rope_head_dim"])
        return LatentConfig(
            q_rank=int(config.get("q_lora_rank") or 0),
            latent_dim=int(config["kv_lora_rank"]),
            rope_dim=rope,
            nope_dim=nope,
            v_dim=int(config["v_head_dim"]),
            is_interleaved=bool(config.get("rope_interleave", True)),
            scale=_yarn_scale(config) / math.sqrt(nope + rope),
        )
    except (KeyError, TypeError, ValueError) as e:
        raise _unreadable(e) from e


def _unreadable(error: Exception) -> ModelError:
    what = f"has no {error}" if isinstance(error, KeyError) else f"cannot be read: {error}"
    return ModelError(f"config.json {what}", hint="restore the config.json that the model was published with")


def _yarn_scale(config: Mapping[str, Any]) -> float:
    """YaRN makes logits larger where contexts are longer than those trained on (Peng et al., 2023, section 3.4)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    amount = float(rope.get("mscale_all_dim") or 0.0)
    factor = float(rope.get("factor") or 1.0)
    is_scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    if not is_scaled or not amount or factor <= 1:
        return 1.0
    return (0.1 * amount * math.log(factor) + 1.0) ** 2


def _mixtral(config: Mapping[str, Any]) -> MoEConfig:
    return MoEConfig(
        num_experts=int(config["num_local_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        inner=int(config["intermediate_size"]),
        layers=frozenset(range(int(config["num_hidden_layers"]))),
        routing=Routing.SOFTMAX_THEN_TOP,
    )


def _qwen3_moe(config: Mapping[str, Any]) -> MoEConfig:
    step, dense = int(config.get("decoder_sparse_step", 1)), set(config.get("mlp_only_layers") or ())
    layers = range(int(config["num_hidden_layers"]))
    return MoEConfig(
        num_experts=int(config.get("num_experts", config.get("num_local_experts"))),
        top_k=int(config["num_experts_per_tok"]),
        inner=int(config["moe_intermediate_size"]),
        layers=frozenset(i for i in layers if i not in dense and (i + 1) % step == 0),
        routing=Routing.SOFTMAX_THEN_TOP,
        is_normalized=bool(config.get("norm_topk_prob", False)),
    )


def _gpt_oss(config: Mapping[str, Any]) -> MoEConfig:
    return MoEConfig(
        num_experts=int(config["num_local_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        inner=int(config["intermediate_size"]),
        layers=frozenset(range(int(config["num_hidden_layers"]))),
        routing=Routing.TOP_THEN_SOFTMAX,
        alpha=float(config.get("swiglu_alpha", 1.702)),
        beta=1.0,
        limit=float(config.get("swiglu_limit", 7.0)),
    )


def _deepseek(config: Mapping[str, Any]) -> MoEConfig:
    layers = range(int(config.get("first_k_dense_replace", 0)), int(config["num_hidden_layers"]))
    inner = int(config["moe_intermediate_size"])
    return MoEConfig(
        num_experts=int(config["n_routed_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        inner=inner,
        layers=frozenset(layers),
        routing=Routing.TOP_OF_GROUPS,
        is_normalized=bool(config.get("norm_topk_prob", True)),
        num_groups=int(config.get("n_group") or 1),
        num_chosen_groups=int(config.get("topk_group") or 1),
        factor=float(config.get("routed_scaling_factor", 1.0)),
        shared_inner=inner * int(config.get("n_shared_experts") or 0),
    )


_READ = {"mixtral": _mixtral, "qwen3_moe": _qwen3_moe, "gpt_oss": _gpt_oss, "deepseek_v3": _deepseek}
