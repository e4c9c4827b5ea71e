"""Decoder layers of DeepSeek-V3 and R1: latent attention, then a dense feed-forward or experts with a shared one."""

from dataclasses import dataclass, replace

from torch import Tensor

from blockscale.kernels.paged_cache import LatentCache
from blockscale.models.config import DecoderConfig
from blockscale.models.deepseek import LatentAttention, load_attention
from blockscale.models.layers import Product, add_rms_norm
from blockscale.models.llama import load_feed_forward
from blockscale.models.reading import Reader
from blockscale.models.step import Step


@dataclass(frozen=True)
class DeepseekLayer:
    """Norms are fp32 [hidden]."""

    input_norm: Tensor
    attention: LatentAttention
    middle_norm: Tensor
    feed_forward: Product
    epsilon: float

    def __call__(self, x: Tensor, added: Tensor | None, step: Step, cache: LatentCache) -> tuple[Tensor, Tensor]:
        """(x, what is still to be added to it), [T, hidden] each, from the same of the layer before."""
        assert step.angles is not None
        batch = step.batch
        x, normed = add_rms_norm(x, added, self.input_norm, self.epsilon)
        cos, sin = step.angles
        attended = self.attention(
            normed, cos, sin, cache, batch.slots, batch.page_table, batch.lengths, step.latent_spans
        )
        x, normed = add_rms_norm(x, attended, self.middle_norm, self.epsilon)
        return x, self.feed_forward(normed)


def load_deepseek_layer(reader: Reader, config: DecoderConfig, layer: int) -> DeepseekLayer:
    """Layer `layer` of the checkpoint. ModelError for what is missing, or of another shape than the config says."""
    assert config.latent is not None
    attention = load_attention(
        reader.checkpoint,
        f"{reader.prefix}layers.{layer}.self_attn",
        config.latent,
        config.num_heads,
        reader.read_linear,
        device=reader.device,
        dtype=reader.dtype,
        is_emulating=reader.is_emulating,
        shard=reader.shard,
    )
    return DeepseekLayer(
        reader.norm(f"layers.{layer}.input_layernorm", config.hidden),
        replace(attention, o=reader.summed(attention.o)),
        reader.norm(f"layers.{layer}.post_attention_layernorm", config.hidden),
        load_feed_forward(reader, config, layer),
        config.epsilon,
    )
