"""What a model is made of, by its config: matrices, caches and experts, as numbers and without weights.

Notation of the formulas: L layers, H hidden, q and kv heads of size d, I feed-forward width, V vocabulary, E experts of
which each token uses k. Checked against published totals in the tests.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

from blockscale.errors import UsageError


class Part(Enum):
    """What a weight belongs to: parts differ in format, in how they are sharded and in when they are read."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    FEED_FORWARD = "feed-forward"
    EXPERTS = "experts"
    SHARED_EXPERTS = "shared experts"
    ROUTER = "router"
    NORM = "norms and biases"
    HEAD = "output head"
    MODULATION = "modulation"  # of diffusion transformers: applied once an image, not a token
    DRAFT = "draft layers"
    TOWER = "vision or audio tower"


LINEAR_PARTS = (Part.ATTENTION, Part.FEED_FORWARD, Part.EXPERTS, Part.SHARED_EXPERTS)


@dataclass(frozen=True)
class Matrix:
    """`count` weights [n, k] of one layer (a vector has n = 1)."""

    part: Part
    n: int
    k: int
    count: int = 1

    @property
    def num_parameters(self) -> int:
        return self.n * self.k * self.count


@dataclass(frozen=True)
class Attention:
    """How a layer remembers.

    cache_elements   a token's elements in the KV cache: 2 * kv * d, or the latent of MLA
    num_kv_heads     by which the cache can be sharded (1: every GPU holds all of it, as MLA's latent)
    window           tokens remembered; None: all
    state_bytes      of a recurrent layer, per sequence, whatever its length
    dot_products     multiply-adds a query token costs per remembered token when decoding: q * (d + d), MLA absorbed
    prefill_products the same in prefill
    """

    cache_elements: int
    num_kv_heads: int
    num_heads: int
    window: int | None = None
    state_bytes: int = 0
    dot_products: int = 0
    prefill_products: int = 0


@dataclass(frozen=True)
class Block:
    """`count` equal layers. `streams`: of so many copies of its matrices a token meets one (an image's or a text's)."""

    count: int
    attention: Attention
    matrices: tuple[Matrix, ...]
    num_experts: int = 0
    top_k: int = 0
    streams: int = 1

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0


@dataclass(frozen=True)
class Architecture:
    """A language model, or (with an empty vocabulary) a diffusion transformer. `is_tied`: the output head is the
    embedding."""

    name: str
    hidden: int
    vocabulary: int
    is_tied: bool
    blocks: tuple[Block, ...]
    context: int | None = None
    num_draft_layers: int = 0
    extra: tuple[Matrix, ...] = ()

    @property
    def num_layers(self) -> int:
        return sum(block.count for block in self.blocks)

    def matrices(self) -> Iterator[Matrix]:
        """Every weight of the model, without draft layers."""
        if self.vocabulary:
            yield Matrix(Part.EMBEDDING, self.vocabulary, self.hidden)
        if self.vocabulary and not self.is_tied:
            yield Matrix(Part.HEAD, self.vocabulary, self.hidden)
        yield Matrix(Part.NORM, 1, self.hidden)
        yield from self.extra
        for block in self.blocks:
            for m in block.matrices:
                yield Matrix(m.part, m.n, m.k, m.count * block.count)

    @cached_property
    def parameters_by_part(self) -> Mapping[Part, int]:
        """Counted once: a search asks for them a million times."""
        found: dict[Part, int] = {}
        for matrix in self.matrices():
            found[matrix.part] = found.get(matrix.part, 0) + matrix.num_parameters
        return found

    @property
    def num_parameters(self) -> int:
        return sum(self.parameters_by_part.values())

    @property
    def active_parameters(self) -> int:
        """Multiplied with by each token: without the embedding, with the head, and k of E experts."""
        total = self.vocabulary * self.hidden  # the head, tied or not
        for block in self.blocks:
            for m in block.matrices:
                if m.part is Part.EXPERTS:
                    total += m.num_parameters * block.count * block.top_k // block.num_experts
                elif m.part not in (Part.NORM, Part.MODULATION):
                    total += m.num_parameters * block.count // block.streams
        return total

    def cache_elements_per_token(self) -> int:
        """KV elements that one more token adds once windows are full."""
        return sum(b.count * b.attention.cache_elements for b in self.blocks if not b.attention.window)

    def cache_elements(self, context: int) -> int:
        """KV elements of one sequence of `context` tokens."""
        return sum(
            b.count * b.attention.cache_elements * min(context, b.attention.window or context) for b in self.blocks
        )


def from_config(config: Mapping[str, Any], name: str = "model") -> Architecture:
    """The architecture of a Hugging Face config. UsageError names the field that is missing."""
    if config.get("model_type") == "flux" or config.get("_class_name") == "FluxTransformer2DModel":
        return _flux(config, name)
    text = next((config[k] for k in _TEXT_CONFIGS if isinstance(config.get(k), Mapping)), config)
    model_type = str(text.get("model_type") or config.get("model_type") or "")
    hidden = _number(text, "hidden_size", "n_embd", "d_model")
    num_layers = _number(text, "num_hidden_layers", "n_layer")
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", model_type in _TIED_BY_DEFAULT))
    layers = [_layer(text, model_type, i, hidden) for i in range(num_layers)]
    blocks: list[Block] = []
    for layer in layers:  # equal neighbours, and those that alternate, are counted together
        for i, block in enumerate(blocks):
            if replace(block, count=1) == layer:
                blocks[i] = replace(block, count=block.count + 1)
                break
        else:
            blocks.append(layer)
    return Architecture(
        name,
        hidden,
        _number(text, "vocab_size"),
        bool(tied),
        tuple(blocks),
        text.get("max_position_embeddings"),
        int(text.get("num_nextn_predict_layers") or 0),
    )


_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
_TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3", "gemma3_text")


def _number(config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        if value is not None and not isinstance(value, int):
            raise UsageError(f"config: {key} is {value!r}, a positive integer is needed", hint="check config.json")
    if default is None:
        raise UsageError(f"config: {keys[0]} is missing", hint="give a model folder or a whole config.json")
    return default


def _layer(config: Mapping[str, Any], model_type: str, index: int, hidden: int) -> Block:
    attention, attention_matrices = _attention(config, model_type, index, hidden)
    num_experts, top_k, ffn = _feed_forward(config, model_type, index, hidden)
    norms = 4 if model_type.startswith(("gemma2", "gemma3")) else 2
    matrices = (*attention_matrices, *ffn, Matrix(Part.NORM, norms, hidden))
    return Block(1, attention, matrices, num_experts, top_k)


def _attention(
    config: Mapping[str, Any], model_type: str, index: int, hidden: int
) -> tuple[Attention, tuple[Matrix, ...]]:
    heads = _number(config, "num_attention_heads", "n_head")
    if config.get("kv_lora_rank"):
        return _latent_attention(config, hidden, heads)
    kinds = config.get("layer_types")
    kind = kinds[index] if isinstance(kinds, list) and index < len(kinds) else None
    if kind is None and config.get("full_attention_interval") and "linear_num_value_heads" in config:
        kind = None if (index + 1) % config["full_attention_interval"] == 0 else "linear_attention"
    if kind == "linear_attention":
        return _gated_delta_net(config, hidden)
    kv_heads = _number(config, "num_key_value_heads", default=heads)
    size = _number(config, "head_dim", default=hidden // heads)
    q, kv = heads * size, kv_heads * size
    gate = 2 if model_type == "qwen3_next" else 1  # its queries come with an output gate
    matrices = [
        Matrix(Part.ATTENTION, gate * q, hidden),
        Matrix(Part.ATTENTION, kv, hidden, 2),
        Matrix(Part.ATTENTION, hidden, q),
    ]
    has_bias = config.get("attention_bias", model_type == "qwen2")
    vectors = (q + 2 * kv + (hidden if model_type == "gpt_oss" else 0)) if has_bias else 0
    if model_type.startswith(("qwen3", "gemma3")):
        vectors += 2 * size
    if model_type == "gpt_oss":
        vectors += heads  # sinks
    if vectors:
        matrices.append(Matrix(Part.NORM, 1, vectors))
    products = 2 * heads * size
    return Attention(2 * kv, kv_heads, heads, _window(config, kind, index), 0, products, products), tuple(matrices)


def _window(config: Mapping[str, Any], kind: str | None, index: int) -> int | None:
    window = config.get("sliding_window")
    if not isinstance(window, int) or config.get("use_sliding_window") is False:
        return None
    if kind is not None:
        return window if kind == "sliding_attention" else None
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, int):
        return None if (index + 1) % pattern == 0 else window
    return window


def _latent_attention(config: Mapping[str, Any], hidden: int, heads: int) -> tuple[Attention, tuple[Matrix, ...]]:
    """MLA. The cache holds one latent for all heads; decoding multiplies with it directly (absorbed)."""
    rank, rope = _number(config, "kv_lora_rank"), _number(config, "qk_rope_head_dim")
    nope, value = _number(config, "qk_nope_head_dim"), _number(config, "v_head_dim")
    q_rank = config.get("q_lora_rank")
    q = heads * (nope + rope)
    matrices = (
        [Matrix(Part.ATTENTION, q, q_rank), Matrix(Part.ATTENTION, q_rank, hidden)]
        if q_rank
        else [Matrix(Part.ATTENTION, q, hidden)]
    )
    matrices += [
        Matrix(Part.ATTENTION, rank + rope, hidden),
        Matrix(Part.ATTENTION, heads * (nope + value), rank),
        Matrix(Part.ATTENTION, hidden, heads * value),
        Matrix(Part.NORM, 1, rank + (q_rank or 0)),
    ]
    absorbed = heads * (rank + rope + rank)
    expanded = heads * (nope + rope + value)
    return Attention(rank + rope, 1, heads, None, 0, absorbed, expanded), tuple(matrices)


def _gated_delta_net(config: Mapping[str, Any], hidden: int) -> tuple[Attention, tuple[Matrix, ...]]:
    """Recurrent layers of Qwen3-Next: a state [value heads, key size, value size] in fp32 and a short convolution."""
    key_heads, value_heads = (_number(config, f"linear_num_{x}_heads") for x in ("key", "value"))
    key_size, value_size = (_number(config, f"linear_{x}_head_dim") for x in ("key", "value"))
    keys, values = key_heads * key_size, value_heads * value_size
    kernel = _number(config, "linear_conv_kernel_dim", default=4)
    matrices = (
        Matrix(Part.ATTENTION, 2 * keys + 2 * values, hidden),
        Matrix(Part.NORM, 2 * value_heads, hidden),
        Matrix(Part.ATTENTION, hidden, values),
        Matrix(Part.NORM, 1, (2 * keys + values) * kernel + 2 * value_heads + value_size),
    )
    state = 4 * value_heads * key_size * value_size + 2 * (2 * keys + values) * (kernel - 1)
    return Attention(0, value_heads, value_heads, None, state, 0, 0), matrices


def _feed_forward(
    config: Mapping[str, Any], model_type: str, index: int, hidden: int
) -> tuple[int, int, tuple[Matrix, ...]]:
    """(experts, experts a token, matrices); 0 experts for a dense layer."""
    experts = next((config[k] for k in _NUM_EXPERTS if isinstance(config.get(k), int) and config[k] > 1), 0)
    if not experts or not _is_sparse(config, index):
        width = _number(config, "intermediate_size_mlp", "intermediate_size", "n_inner", default=4 * hidden)
        return 0, 0, (Matrix(Part.FEED_FORWARD, width, hidden, 2), Matrix(Part.FEED_FORWARD, hidden, width))
    top_k = _number(config, "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk")
    width = _number(config, "moe_intermediate_size", "expert_intermediate_size", "intermediate_size")
    matrices = [
        Matrix(Part.EXPERTS, width, hidden, 2 * experts),
        Matrix(Part.EXPERTS, hidden, width, experts),
        Matrix(Part.ROUTER, experts, hidden),
    ]
    shared = config.get("shared_expert_intermediate_size") or width * int(config.get("n_shared_experts") or 0)
    if model_type.startswith("llama4"):
        shared = width
    if shared:
        matrices += [Matrix(Part.SHARED_EXPERTS, shared, hidden, 2), Matrix(Part.SHARED_EXPERTS, hidden, shared)]
    if config.get("shared_expert_intermediate_size"):
        matrices.append(Matrix(Part.ROUTER, 1, hidden))
    if model_type == "gpt_oss":
        matrices.append(Matrix(Part.NORM, 1, experts * (2 * width + hidden + 1)))
    if config.get("topk_method") == "noaux_tc" or model_type == "minimax_m2":
        matrices.append(Matrix(Part.NORM, 1, experts))
    return experts, top_k, tuple(matrices)


_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def _is_sparse(config: Mapping[str, Any], index: int) -> bool:
    """Whether a layer of a model with experts has them."""
    if index < int(config.get("first_k_dense_replace") or 0) or index in (config.get("mlp_only_layers") or ()):
        return False
    step = config.get("interleave_moe_layer_step") or config.get("decoder_sparse_step") or config.get("moe_layer_freq")
    return (index + 1) % step == 0 if isinstance(step, int) and step > 1 else True


def _flux(config: Mapping[str, Any], name: str) -> Architecture:
    """FLUX.1's transformer: blocks with a stream for the image and one for the text, then blocks with one for both.

    A token meets one stream's weights: 12 H^2 of the 24 H^2 of a double block.
    """
    heads, size = _number(config, "num_attention_heads"), _number(config, "attention_head_dim")
    hidden = heads * size
    text, pooled = _number(config, "joint_attention_dim"), _number(config, "pooled_projection_dim")
    channels = _number(config, "in_channels")
    attention = Attention(0, heads, heads, None, 0, 2 * hidden, 2 * hidden)

    def block(count: int, streams: int, modulations: int) -> Block:
        biases = streams * 9 * hidden if streams > 1 else 8 * hidden
        matrices = (
            Matrix(Part.ATTENTION, hidden, hidden, 4 * streams),
            Matrix(Part.FEED_FORWARD, 4 * hidden, hidden, streams),
            Matrix(Part.FEED_FORWARD, hidden, 4 * hidden, streams),
            Matrix(Part.MODULATION, modulations * hidden, hidden),
            Matrix(Part.NORM, 1, modulations * hidden + biases + 2 * streams * size),
        )
        return Block(count, attention, matrices, streams=streams)

    extra = (
        Matrix(Part.EMBEDDING, hidden, channels + text + 256 + 256 + pooled),
        Matrix(Part.EMBEDDING, hidden, hidden, 3),
        Matrix(Part.MODULATION, 2 * hidden, hidden),
        Matrix(Part.HEAD, channels, hidden),
        Matrix(Part.NORM, 1, 10 * hidden),
    )
    blocks = (block(_number(config, "num_layers"), 2, 12), block(_number(config, "num_single_layers"), 1, 3))
    return Architecture(name, hidden, 0, False, blocks, None, 0, extra)
