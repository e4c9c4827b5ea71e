"""Decoder layers of Gemma 2 and 3: results are normed as well, before they are added.

    x = x + norm(attention(norm(x)))
    x = x + norm(feed_forward(norm(x)))

Norms multiply by 1 + weight (added where they are read), embeddings are scaled, layers take turns between a window and
all tokens, with positions of their own: what a config says, and not what a layer does.
"""

from dataclasses import dataclass

from torch import Tensor

from blockscale.kernels.paged_cache import PagedCache
from blockscale.models.config import DecoderConfig
from blockscale.models.layers import Product, add_rms_norm
from blockscale.models.llama import SelfAttention, load_feed_forward, load_self_attention
from blockscale.models.reading import Reader
from blockscale.models.step import Step


@dataclass(frozen=True)
class GemmaLayer:
    """Norms are fp32 [hidden], 1 + weight."""

    input_norm: Tensor
    attention: SelfAttention
    attention_norm: Tensor
    middle_norm: Tensor
    feed_forward: Product
    output_norm: Tensor
    epsilon: float

    def __call__(self, x: Tensor, added: Tensor | None, step: Step, cache: PagedCache) -> tuple[Tensor, Tensor]:
        """(x, what is still to be added to it), [T, hidden] each, from the same of the layer before."""
        x, normed = add_rms_norm(x, added, self.input_norm, self.epsilon)
        _, y = add_rms_norm(self.attention(normed, step, cache), None, self.attention_norm, self.epsilon)
        x, normed = add_rms_norm(x, y, self.middle_norm, self.epsilon)
        _, y = add_rms_norm(self.feed_forward(normed), None, self.output_norm, self.epsilon)
        return x, y


def load_gemma_layer(reader: Reader, config: DecoderConfig, layer: int) -> GemmaLayer:
    """Layer `layer` of the checkpoint. ModelError for what is missing, or of another shape than the config says."""

    def norm(leaf: str) -> Tensor:
        return reader.norm(f"layers.{layer}.{leaf}", config.hidden)

    return GemmaLayer(
        norm("input_layernorm"),
        load_self_attention(reader, config, layer),
        norm("post_attention_layernorm"),
        norm("pre_feedforward_layernorm"),
        load_feed_forward(reader, config, layer),
        norm("post_feedforward_layernorm"),
        config.epsilon,
    )
