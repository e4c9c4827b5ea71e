"""A decoder ready to run: embedding, layers, norm and head."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from blockscale.checkpoint.linear import KVScales
from blockscale.errors import ModelError
from blockscale.kernels.cpu.layers import DecodeLayers
from blockscale.kernels.paged_cache import KVFormat, PagedCache
from blockscale.models.attention import make_plan
from blockscale.models.batch import Batch
from blockscale.models.caches import Cache, allocate_caches, cache_dtype, page_bytes
from blockscale.models.config import DecoderConfig
from blockscale.models.deepseek_layer import DeepseekLayer
from blockscale.models.gemma3 import GemmaLayer
from blockscale.models.latent import divide
from blockscale.models.layers import Product, Turns, add_rms_norm, rms_norm, turns
from blockscale.models.llama import LlamaLayer
from blockscale.models.one_call import in_one_call
from blockscale.models.parallel import Group, all_logits, embed
from blockscale.models.shard import Part
from blockscale.models.step import Step

Layer = LlamaLayer | GemmaLayer | DeepseekLayer
# Tokens attended to by all new tokens together, up to which one call is quicker than torch's products for attention
_MOST_ATTENDED = 1 << 18


@dataclass(frozen=True)
class Decoder:
    """identity    names weights, arithmetic and cache: keys and values of one are of no use to another
    dtype       of activations
    embedding   [V, hidden] as it is stored, V the tokens of `vocabulary`
    norm        fp32 [hidden]
    head        [R, hidden] -> [R, V]
    frequencies of positions, fp32 [R/2]: of layers that see all tokens, and of those with a window
    kv_scales   by layer
    group       of the devices that have a part each, or None. `config` then counts the heads of this one, and
    vocabulary  is the part whose embeddings and logits it has
    """

    config: DecoderConfig
    identity: str
    device: torch.device
    dtype: torch.dtype
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Product
    frequencies: tuple[Tensor, Tensor]
    kv_format: KVFormat
    kv_scales: Mapping[int, KVScales]
    vocabulary: Part
    group: Group | None = None

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def context(self) -> int:
        return self.config.context

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page of so many tokens, of all layers together."""
        return page_bytes(self.config, page_size, self.kv_format)

    def allocate(self, num_pages: int, page_size: int) -> list[Cache]:
        """Empty caches, one a layer."""
        dtype = cache_dtype(self.dtype)
        places = (self.config, num_pages, page_size, self.kv_format)
        return allocate_caches(*places, device=self.device, dtype=dtype, scales=self.kv_scales)

    @torch.inference_mode()
    def forward(self, batch: Batch, caches: Sequence[Cache]) -> Tensor:
        """[T, hidden]: hidden states after the final norm. The new tokens' keys and values are written to `caches`."""
        if len(caches) != len(self.layers):
            raise ModelError(f"{len(caches)} caches for {len(self.layers)} layers", hint="allocate gives one a layer")
        x = embed(self.embedding, batch.token_ids, self.vocabulary, self.dtype, self.group)
        if self.config.embedding_scale != 1.0:  # rounded to the type of activations, as the models were trained
            x = x * float(torch.tensor(self.config.embedding_scale, dtype=self.dtype))
        found = self._in_one_call(x, batch, caches)
        if found is not None:
            return rms_norm(found, self.norm, self.config.epsilon)
        step = self._step(batch, caches[0].page_size)
        added: Tensor | None = None
        for layer, cache in zip(self.layers, caches, strict=True):
            x, added = layer(x, added, step, cache)  # type: ignore[arg-type]  # a layer's cache is of its own kind
        return add_rms_norm(x, added, self.norm, self.config.epsilon)[1]

    def _in_one_call(self, x: Tensor, batch: Batch, caches: Sequence[Cache]) -> Tensor | None:
        """All layers at once, where the CPU's kernels do that; the numbers are the same."""
        whole = self._layers_at_once
        paged = [cache for cache in caches if isinstance(cache, PagedCache)]
        if whole is None or len(paged) < len(caches) or not whole.serves_caches(paged):
            return None
        table, lengths = batch.page_table, batch.lengths
        if not batch.is_decode:  # each token as a sequence of its own, whose last one it is
            if int(batch.positions.sum()) > _MOST_ATTENDED:
                return None
            counts = batch.cu_seqlens.diff()
            table = table.repeat_interleave(counts, 0)
            lengths = (batch.positions + 1).int()
        by, by_local = self._turns(batch)
        turned, locally = (by.cos, by.sin), (by_local.cos, by_local.sin)
        return whole(x, paged, turned, locally, table, lengths, batch.slots)

    @cached_property
    def _layers_at_once(self) -> DecodeLayers | None:
        is_plain = self.device.type == "cpu" and self.dtype == torch.float32 and self.group is None
        return in_one_call(self.layers, self.config) if is_plain else None

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> fp32 [R, V], of the whole vocabulary"""
        logits = all_logits(self.head(hidden), self.vocabulary, self.group).float()
        cap = self.config.final_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _step(self, batch: Batch, page_size: int) -> Step:
        by, by_local = self._turns(batch)
        if self.config.latent is None:
            return Step(batch, make_plan(batch, page_size), by, by_local)
        half = by.half
        angles = by.cos[:, 0, :half], by.sin[:, 0, half:]
        spans = None if batch.is_decode else divide(batch.cu_seqlens, batch.lengths)
        return Step(batch, make_plan(batch, page_size), by, by_local, angles, spans)

    def _turns(self, batch: Batch) -> tuple[Turns, Turns]:
        config, (whole, local) = self.config, self.frequencies
        by = turns(batch.positions, whole, config.rope.amount)
        return by, by if local is whole else turns(batch.positions, local, config.local_rope.amount)
