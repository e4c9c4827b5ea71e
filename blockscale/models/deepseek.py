"""Multi-head latent attention of a layer of DeepSeek-V3 and R1: its weights, and what becomes of new tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from blockscale.checkpoint.dialects.stored import StoredLinear
from blockscale.checkpoint.load import load_linear, plain_values
from blockscale.checkpoint.reader import Checkpoint
from blockscale.errors import ModelError
from blockscale.kernels.paged_cache import LatentCache
from blockscale.models.cut import Stored, cut_columns, cut_rows
from blockscale.models.experts import Product
from blockscale.models.latent import Spans, attend, write_latents
from blockscale.models.moe import ReadLinear
from blockscale.models.moe_config import LatentConfig
from blockscale.models.shard import WHOLE, Part, Shard

_EPSILON = 1e-6  # of the norms inside attention, whatever the config says of the others


@dataclass(frozen=True)
class LatentAttention:
    """q, kv_a and o are linears; x [T, K]. H are the heads of this device, whose results are still to be summed where
    it has not all.

    q_a      x -> [T, q_rank] and its norm's weight, before q; None where q reads x itself
    q        -> [T, H * (nope + rope)]
    kv_a     x -> [T, latent + rope]
    kv_norm  [latent]
    up_k     [H, nope, latent]: from the latent to a head's keys
    up_v     [H, v, latent]: to its values
    o        [T, H * v] -> [T, K]
    """

    config: LatentConfig
    q_a: tuple[Product, Tensor] | None
    q: Product
    kv_a: Product
    kv_norm: Tensor
    up_k: Tensor
    up_v: Tensor
    o: Product

    def __call__(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LatentCache,
        slots: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        spans: Spans | None,
    ) -> Tensor:
        """[T, K] like x; the tokens' latents are written to the cache.

        cos, sin  fp32 [T, rope / 2]
        slots     int64 [T]: page * page_size + place in the page
        spans     None where each sequence has one new token; see `latent.divide`
        """
        config = self.config
        source = x if self.q_a is None else _normed(self.q_a[0](x), self.q_a[1])
        q = self.q(source).unflatten(-1, (-1, config.nope_dim + config.rope_dim))  # [T, H, nope + rope]
        q_nope, q_rope = q.split((config.nope_dim, config.rope_dim), dim=-1)
        latent, k_rope = self.kv_a(x).split((config.latent_dim, config.rope_dim), dim=-1)
        turned = turn(k_rope.unsqueeze(1), cos, sin, is_interleaved=config.is_interleaved).squeeze(1)
        write_latents(cache, torch.cat((_normed(latent, self.kv_norm), turned), dim=-1), slots)
        q = torch.cat((q_nope, turn(q_rope, cos, sin, is_interleaved=config.is_interleaved)), dim=-1)
        out = attend(q, self.up_k, self.up_v, cache, page_table, lengths, spans, config.scale)
        return self.o(out.flatten(1))


def load_attention(
    checkpoint: Checkpoint,
    prefix: str,
    config: LatentConfig,
    num_heads: int,
    read_linear: ReadLinear,
    *,
    device: torch.device,
    dtype: torch.dtype,
    is_emulating: bool = False,
    shard: Shard = WHOLE,
) -> LatentAttention:
    """The attention at `prefix` (`model.layers.0.self_attn`).

    read_linear   makes a linear of what is stored, and of its bias
    is_emulating  inputs are rounded as the scheme says
    shard         which of the heads; the latent is everybody's
    ModelError for what is missing, or of another shape than the config says.
    """

    heads = shard.heads(num_heads)

    def stored(leaf: str) -> Stored:
        return _stored(checkpoint, f"{prefix}.{leaf}")

    def linear(leaf: str) -> Product:
        return read_linear(stored(leaf), checkpoint.kept.get(f"{prefix}.{leaf}.bias"))

    def values(leaf: str, *shape: int, rows: Part | None = None) -> Tensor:
        found = stored(leaf)
        if tuple(found.shape) != shape:
            raise ModelError(
                f"{prefix}.{leaf}: the checkpoint has {list(found.shape)}, the model {list(shape)}",
                hint="config.json belongs to another model",
            )
        own = found if rows is None else cut_rows(found, rows)
        read = plain_values(load_linear(own, dtype)) if isinstance(own, StoredLinear) else own.read()
        return read.to(device, dtype)

    width = config.nope_dim + config.v_dim
    up = values("kv_b_proj", num_heads * width, config.latent_dim, rows=heads.times(width))
    up_k, up_v = up.unflatten(0, (heads.size, -1)).split((config.nope_dim, config.v_dim), dim=1)
    q_a = (linear("q_a_proj"), values("q_a_layernorm", config.q_rank)) if config.q_rank else None
    q = cut_rows(stored("q_b_proj" if config.q_rank else "q_proj"), heads.times(config.nope_dim + config.rope_dim))
    o = cut_columns(stored("o_proj"), heads.times(config.v_dim), is_emulating=is_emulating)
    o_bias = checkpoint.kept.get(f"{prefix}.o_proj.bias") if shard.rank == 0 else None
    return LatentAttention(
        config,
        q_a,
        read_linear(q, None),
        linear("kv_a_proj_with_mqa"),
        values("kv_a_layernorm", config.latent_dim),
        up_k.contiguous(),
        up_v.contiguous(),
        read_linear(o, o_bias),
    )


def turn(x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> Tensor:
    """Rotary positions of x [T, H, R] by cos and sin [T, R / 2]; the result has its pairs a half apart.

    is_interleaved  the pairs of x are neighbours
    """
    a, b = (x[..., 0::2].float(), x[..., 1::2].float()) if is_interleaved else x.float().chunk(2, dim=-1)
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(x.dtype)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), _EPSILON).to(x.dtype)


def _stored(checkpoint: Checkpoint, module: str) -> Stored:
    linears = checkpoint.quantized.linears if checkpoint.quantized else {}
    stored = linears.get(module) or checkpoint.kept.get(f"{module}.weight")
    if stored is None:
        raise ModelError(f"{module}: the checkpoint has no weight for it", hint="the checkpoint is incomplete")
    return stored
