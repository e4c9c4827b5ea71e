"""Decoder layers of Llama and all that are built like it: Mistral, SmolLM, Qwen, Phi; with experts Mixtral, Qwen's
mixtures and gpt-oss.

    x = x + attention(norm(x))
    x = x + feed_forward(norm(x))
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from blockscale.kernels.cpu import decode as cpu_decode
from blockscale.kernels.ops.between import gated, rotate_into_cache
from blockscale.kernels.paged_cache import PagedCache
from blockscale.models.attention import Rule, attend, attend_to_cache
from blockscale.models.config import Activation, DecoderConfig
from blockscale.models.layers import Product, add_rms_norm, rms_norm, turn
from blockscale.models.reading import Reader
from blockscale.models.step import Step

QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
FUSED = {QKV: "qkv_proj", GATE_UP: "gate_up_proj"}  # how Phi's checkpoints keep them


@dataclass(frozen=True)
class SelfAttention:
    """qkv     [T, hidden] -> [T, (num_heads + 2 num_kv_heads) * head_dim]
    o       [T, num_heads * head_dim] -> [T, hidden]
    norms   of queries and keys, fp32 [head_dim] each, or None
    """

    qkv: Product
    o: Product
    norms: tuple[Tensor, Tensor] | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float
    rule: Rule
    is_local: bool

    def __call__(self, x: Tensor, step: Step, cache: PagedCache) -> Tensor:
        """[T, hidden] like x."""
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)  # [T, H + 2 KV, D]
        by = step.local_turns if self.is_local else step.turns
        if heads.device.type == "cuda" and heads.dtype == cache.dtype:
            q = rotate_into_cache(heads, by.cos, by.sin, cache, step.batch.slots, self.norms, self.epsilon)
            return self.o(attend_to_cache(q, cache, step.batch, self.rule).flatten(1))
        num_turned = self.num_heads + self.num_kv_heads
        if self.norms is None:
            turned = turn(heads[:, :num_turned], by)
        else:
            q = rms_norm(heads[:, : self.num_heads], self.norms[0], self.epsilon)
            k = rms_norm(heads[:, self.num_heads : num_turned], self.norms[1], self.epsilon)
            turned = turn(torch.cat((q, k), dim=1), by)
        q, k = turned[:, : self.num_heads], turned[:, self.num_heads :]
        return self.o(attend(q, k, heads[:, num_turned:], cache, step.plan, self.rule).flatten(1))


@dataclass(frozen=True)
class FeedForward:
    """down(act(gate) * up); gate_up: [T, hidden] -> [T, 2 * inner]."""

    gate_up: Product
    down: Product
    activation: Activation

    def __call__(self, x: Tensor) -> Tensor:
        both = self.gate_up(x)
        if both.device.type == "cuda":
            return self.down(gated(both, self.activation.value))
        if self.activation is Activation.SILU and both.device.type == "cpu":
            fast = cpu_decode.silu_gate(both)
            if fast is not None:
                return self.down(fast)
        gate, up = both.chunk(2, dim=-1)
        if self.activation is Activation.SILU:
            return self.down(functional.silu(gate).mul_(up))
        return self.down(functional.gelu(gate, approximate="tanh").mul_(up))


@dataclass(frozen=True)
class LlamaLayer:
    """Norms are fp32 [hidden]."""

    input_norm: Tensor
    attention: SelfAttention
    middle_norm: Tensor
    feed_forward: Product
    epsilon: float

    def __call__(self, x: Tensor, added: Tensor | None, step: Step, cache: PagedCache) -> tuple[Tensor, Tensor]:
        """(x, what is still to be added to it), [T, hidden] each, from the same of the layer before."""
        x, normed = add_rms_norm(x, added, self.input_norm, self.epsilon)
        x, normed = add_rms_norm(x, self.attention(normed, step, cache), self.middle_norm, self.epsilon)
        return x, self.feed_forward(normed)


def load_llama_layer(reader: Reader, config: DecoderConfig, layer: int) -> LlamaLayer:
    """Layer `layer` of the checkpoint. ModelError for what is missing, or of another shape than the config says."""
    return LlamaLayer(
        reader.norm(f"layers.{layer}.input_layernorm", config.hidden),
        load_self_attention(reader, config, layer),
        reader.norm(f"layers.{layer}.post_attention_layernorm", config.hidden),
        load_feed_forward(reader, config, layer),
        config.epsilon,
    )


def load_self_attention(reader: Reader, config: DecoderConfig, layer: int) -> SelfAttention:
    parent, dim, hidden = f"layers.{layer}.self_attn", config.head_dim, config.hidden
    heads, kv_heads = reader.shard.heads(config.num_heads), reader.shard.kv_heads(config.num_kv_heads)
    rows = (heads.times(dim), kv_heads.times(dim), kv_heads.times(dim))
    qkv = reader.joined(parent, QKV, rows, hidden, has_bias=config.has_qkv_bias, fused=FUSED[QKV])
    o = reader.linear(
        f"{parent}.o_proj", (hidden, config.num_heads * dim), has_bias=config.has_o_bias, columns=heads.times(dim)
    )
    norms = None
    if config.has_qk_norm:
        norms = reader.norm(f"{parent}.q_norm", dim), reader.norm(f"{parent}.k_norm", dim)
    sinks = reader.tensor(f"{parent}.sinks", config.num_heads, rows=heads).float() if config.has_sinks else None
    window = config.windows[layer]
    return SelfAttention(
        qkv,
        reader.summed(o),
        norms,
        heads.size,
        kv_heads.size,
        dim,
        config.epsilon,
        Rule(config.scale, window, config.attention_softcap, sinks),
        bool(window),
    )


def load_feed_forward(reader: Reader, config: DecoderConfig, layer: int) -> Product:
    """A dense one, or the layer's experts."""
    if config.moe is not None and layer in config.moe.layers:
        parent = f"layers.{layer}.mlp"
        if config.family == "mixtral" and not reader.has(f"{parent}.gate.weight"):
            parent = f"layers.{layer}.block_sparse_moe"
        shared = None
        if config.moe.shared_inner:
            shared = load_dense(reader, config, f"{parent}.shared_experts", config.moe.shared_inner)
        return reader.summed(reader.experts(parent, config.moe, config.hidden, shared))
    return reader.summed(load_dense(reader, config, f"layers.{layer}.mlp", config.inner))


def load_dense(reader: Reader, config: DecoderConfig, parent: str, inner: int) -> FeedForward:
    """Where the model is divided, this rank's part of the sum."""
    has_bias, part = config.has_mlp_bias, reader.shard.width("width of feed-forward layers", inner)
    gate_up = reader.joined(parent, GATE_UP, (part, part), config.hidden, has_bias=has_bias, fused=FUSED[GATE_UP])
    down = reader.linear(f"{parent}.down_proj", (config.hidden, inner), has_bias=has_bias, columns=part)
    return FeedForward(gate_up, down, config.activation)
