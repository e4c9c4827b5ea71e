"""What llama.cpp's architectures are made of, and which of their products multiply by a weight's `.scale`.

llama.cpp loads `.scale` for any weight, but each graph applies it by itself: some feed-forward networks ignore it, and
a few would apply it after the bias, and abort. A model whose own graph ignores scales is written as `llama` where that
graph computes the same.
Source: src/models/*.cpp and src/llama-graph.cpp of llama.cpp (ggml 0.25.3).
"""

from dataclasses import dataclass
from enum import Enum

from blockscale.conversion.gguf import rows
from blockscale.conversion.gguf.rows import Rows


class Product(Enum):
    """What the graph does with a weight.

    SCALED            multiplies by it, then by its `.scale`, then adds the bias
    SCALED_UNBIASED   the same, but a bias beside a scale aborts
    UNSCALED          multiplies by it and ignores `.scale`
    TABLE             looks rows up
    SMALL             an fp32 vector, or a router
    """

    SCALED = "scaled"
    SCALED_UNBIASED = "scaled without a bias"
    UNSCALED = "unscaled"
    TABLE = "table"
    SMALL = "small"


@dataclass(frozen=True)
class Source:
    """A name in the checkpoint, without `.weight`; {i} is the layer and {e} the expert.

    rows            which rows, None for all
    is_stack        it is [E, N, K], all experts in one
    is_transposed   or, where it is plain, [E, K, N]
    """

    name: str
    rows: Rows | None = None
    is_stack: bool = False
    is_transposed: bool = False


@dataclass(frozen=True)
class Slot:
    """A tensor of the file.

    sources       what it is made of: the first that the checkpoint has
    has_bias      whether the graph adds one
    may_be_tied   a model with tied embeddings does without
    offset        added to what the checkpoint holds
    fold          the layer's norm in front of an UNSCALED product, which can take the scale in
    """

    name: str
    sources: tuple[Source, ...]
    product: Product
    has_bias: bool = False
    may_be_tied: bool = False
    offset: float = 0.0
    fold: str | None = None


@dataclass(frozen=True)
class Family:
    """`architecture` is llama.cpp's name. `layer`: the slots of each layer."""

    architecture: str
    model: tuple[Slot, ...]
    layer: tuple[Slot, ...]


_LAYER, _EXPERT = "model.layers.{i}.", "{e}."


def _norm(name: str, source: str, offset: float = 0.0) -> Slot:
    return Slot(name, (Source(source),), Product.SMALL, offset=offset)


def _model(*, offset: float = 0.0, has_output: bool = True) -> tuple[Slot, ...]:
    embedding = Slot("token_embd", (Source("model.embed_tokens"),), Product.TABLE)
    output = Slot("output", (Source("lm_head"),), Product.SCALED, may_be_tied=True)
    return (embedding, _norm("output_norm", "model.norm", offset), *((output,) if has_output else ()))


def _attention(
    *, is_rotary_neighbours: bool = False, has_bias: bool = True, has_output_bias: bool = False
) -> tuple[Slot, ...]:
    order: dict[str, Rows | None] = {"q": None, "k": None, "v": None}
    if is_rotary_neighbours:
        order |= {"q": rows.rotary_q, "k": rows.rotary_k}
    qkv = (
        Slot(f"blk.{{i}}.attn_{x}", (Source(f"{_LAYER}self_attn.{x}_proj", order[x]),), Product.SCALED, has_bias)
        for x in "qkv"
    )
    out = Slot("blk.{i}.attn_output", (Source(f"{_LAYER}self_attn.o_proj"),), Product.SCALED, has_output_bias)
    return (*qkv, out)


def _qk_norms(offset: float = 0.0) -> tuple[Slot, ...]:
    return tuple(_norm(f"blk.{{i}}.attn_{x}_norm", f"{_LAYER}self_attn.{x}_norm", offset) for x in "qk")


def _norms(offset: float = 0.0) -> tuple[Slot, ...]:
    """In front of attention and of the feed-forward network."""
    return (
        _norm("blk.{i}.attn_norm", f"{_LAYER}input_layernorm", offset),
        _norm("blk.{i}.ffn_norm", f"{_LAYER}post_attention_layernorm", offset),
    )


def _feed_forward(product: Product, *, has_bias: bool = False, fold: str | None = None) -> tuple[Slot, ...]:
    return tuple(
        Slot(
            f"blk.{{i}}.ffn_{x}",
            (Source(f"{_LAYER}mlp.{x}_proj"),),
            product,
            has_bias,
            fold=None if x == "down" else fold,
        )
        for x in ("gate", "up", "down")
    )


def _experts(parent: str, leaves: dict[str, str], router: str) -> tuple[Slot, ...]:
    """A linear an expert, or stacks [E, N, K] with gate and up in one."""
    fused = {"gate": rows.first_half, "up": rows.second_half, "down": None}
    stacks = tuple(
        Slot(
            f"blk.{{i}}.ffn_{x}_exps",
            (
                Source(f"{_LAYER}{parent}.experts.{_EXPERT}{leaf}"),
                Source(
                    f"{_LAYER}{parent}.experts.{'down_proj' if x == 'down' else 'gate_up_proj'}",
                    fused[x],
                    is_stack=True,
                ),
            ),
            Product.SCALED,
        )
        for x, leaf in leaves.items()
    )
    return (Slot("blk.{i}.ffn_gate_inp", (Source(_LAYER + router),), Product.SMALL), *stacks)


_GATED = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_LLAMA_ATTENTION = _attention(is_rotary_neighbours=True, has_output_bias=True)

LLAMA = Family(
    "llama", _model(), (*_norms(), *_LLAMA_ATTENTION, *_feed_forward(Product.SCALED_UNBIASED, has_bias=True))
)
MIXTRAL = Family(
    "llama",
    _model(),
    (
        *_norms(),
        *_LLAMA_ATTENTION,
        *_experts("block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}, "block_sparse_moe.gate"),
    ),
)
QWEN2 = Family("qwen2", _model(), (*_norms(), *_attention(), *_feed_forward(Product.UNSCALED)))
QWEN3 = Family("qwen3", _model(), (*_norms(), *_attention(), *_qk_norms(), *_feed_forward(Product.SCALED_UNBIASED)))
QWEN3_MOE = Family("qwen3moe", _model(), (*_norms(), *_attention(), *_qk_norms(), *_experts("mlp", _GATED, "mlp.gate")))
_GEMMA_NORMS = (
    _norm("blk.{i}.attn_norm", f"{_LAYER}input_layernorm", 1.0),
    _norm("blk.{i}.post_attention_norm", f"{_LAYER}post_attention_layernorm", 1.0),
    _norm("blk.{i}.ffn_norm", f"{_LAYER}pre_feedforward_layernorm", 1.0),
    _norm("blk.{i}.post_ffw_norm", f"{_LAYER}post_feedforward_layernorm", 1.0),
)
_GEMMA_FEED_FORWARD = _feed_forward(Product.UNSCALED, fold="ffn_norm")
GEMMA2 = Family("gemma2", _model(offset=1.0, has_output=False), (*_GEMMA_NORMS, *_attention(), *_GEMMA_FEED_FORWARD))
GEMMA3 = Family("gemma3", _model(offset=1.0), (*_GEMMA_NORMS, *_attention(), *_qk_norms(1.0), *_GEMMA_FEED_FORWARD))
_PHI3_OUTPUT = Slot("blk.{i}.attn_output", (Source(f"{_LAYER}self_attn.o_proj"),), Product.SCALED)
PHI3 = Family(
    "phi3",
    _model(),
    (
        *_norms(),
        Slot("blk.{i}.attn_qkv", (Source(f"{_LAYER}self_attn.qkv_proj"),), Product.SCALED),
        _PHI3_OUTPUT,
        Slot("blk.{i}.ffn_up", (Source(f"{_LAYER}mlp.gate_up_proj"),), Product.UNSCALED, fold="ffn_norm"),
        Slot("blk.{i}.ffn_down", (Source(f"{_LAYER}mlp.down_proj"),), Product.UNSCALED),
    ),
)
PHI3_AS_LLAMA = Family(
    "llama",
    _model(),
    (
        *_norms(),
        *(
            Slot(f"blk.{{i}}.attn_{x}", (Source(f"{_LAYER}self_attn.qkv_proj", order),), Product.SCALED)
            for x, order in (("q", rows.fused_q), ("k", rows.fused_k), ("v", rows.fused_v))
        ),
        _PHI3_OUTPUT,
        *(
            Slot(f"blk.{{i}}.ffn_{x}", (Source(f"{_LAYER}mlp.gate_up_proj", half),), Product.SCALED)
            for x, half in (("gate", rows.first_half), ("up", rows.second_half))
        ),
        Slot("blk.{i}.ffn_down", (Source(f"{_LAYER}mlp.down_proj"),), Product.SCALED),
    ),
)
GPT_OSS = Family(
    "gpt-oss",
    (
        *_model(has_output=False),
        Slot("output", (Source("lm_head"), Source("model.embed_tokens")), Product.SCALED),  # the graph has no tied one
    ),
    (
        _norm("blk.{i}.attn_norm", f"{_LAYER}input_layernorm"),
        _norm("blk.{i}.post_attention_norm", f"{_LAYER}post_attention_layernorm"),
        *_attention(has_output_bias=True),
        Slot("blk.{i}.attn_sinks", (Source(f"{_LAYER}self_attn.sinks"),), Product.SMALL),
        Slot("blk.{i}.ffn_gate_inp", (Source(f"{_LAYER}mlp.router"),), Product.SMALL, has_bias=True),
        *(
            Slot(
                f"blk.{{i}}.ffn_{x}_exps",
                (Source(f"{_LAYER}mlp.experts.{leaf}", order, is_stack=True, is_transposed=True),),
                Product.UNSCALED,
                has_bias=True,
            )
            for x, leaf, order in (
                ("gate", "gate_up_proj", rows.even),
                ("up", "gate_up_proj", rows.odd),
                ("down", "down_proj", None),
            )
        ),
    ),
)


@dataclass(frozen=True)
class Families:
    """`scaled`: another architecture that computes the same and applies every scale."""

    own: Family
    scaled: Family | None = None


FAMILIES: dict[str, Families] = {
    "llama": Families(LLAMA),
    "mistral": Families(LLAMA),
    "mixtral": Families(MIXTRAL),
    "qwen2": Families(QWEN2, LLAMA),
    "qwen3": Families(QWEN3),
    "qwen3_moe": Families(QWEN3_MOE),
    "gemma2": Families(GEMMA2),
    "gemma3_text": Families(GEMMA3),
    "phi3": Families(PHI3, PHI3_AS_LLAMA),
    "gpt_oss": Families(GPT_OSS),
}
