"""Latent attention from the folder to the result, against the module of transformers, in every way of computing it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_configs import tiny_config
from torch import Tensor

from blockscale.checkpoint.reader import open_checkpoint
from blockscale.errors import ModelError
from blockscale.kernels.paged_cache import KVFormat
from blockscale.models.deepseek import LatentAttention, load_attention
from blockscale.models.latent import divide
from blockscale.models.moe_config import read_latent

from .test_experts import fp32_linear, relative
from .test_latent import DTYPE, PAGE, make_cache

CPU = torch.device("cpu")
NUM_TOKENS, HEADS, HIDDEN = 21, 4, 64
PREFIX = "model.layers.0.self_attn"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
}
CHANGES: dict[str, dict[str, Any]] = {
    "as published": {},
    "no query latent": {"q_lora_rank": None},
    "pairs a half apart": {"rope_interleave": False},
    "yarn": {"rope_parameters": YARN},
}
PIECES = ([NUM_TOKENS], [8, 1, 12], [1] * NUM_TOKENS)


class Case:
    """A module of transformers, the same weights in a folder, and what both are given."""

    def __init__(self, write_model: Callable[..., Path], change: dict[str, Any]) -> None:
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as peer

        sizes = tiny_config("deepseek_v3").to_dict()
        sizes |= {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "v_head_dim": 24, "head_dim": 32, **change}
        config = type(tiny_config("deepseek_v3"))(**sizes)
        config._attn_implementation = "eager"
        self.theirs = peer.DeepseekV3Attention(config, 0).eval()
        generator = torch.Generator().manual_seed(8)
        with torch.no_grad():
            for weight in self.theirs.parameters():
                drawn = torch.randn(weight.shape, generator=generator) * 0.12
                weight.copy_((drawn if weight.dim() > 1 else weight + drawn).half())
        tensors = {f"{PREFIX}.{n}": w.detach().half().clone() for n, w in self.theirs.named_parameters()}
        self.path = write_model(config.to_dict(), [tensors])
        self.config = read_latent(config.to_dict())
        self.x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).to(DTYPE)
        cos, sin = peer.DeepseekV3RotaryEmbedding(config)(self.x.float(), torch.arange(NUM_TOKENS)[None])
        self.rotary = cos, sin
        self.cos, self.sin = (t[0, :, :16].contiguous() for t in (cos, sin))

    def load(self, num_heads: int = HEADS) -> LatentAttention:
        checkpoint = open_checkpoint(self.path)
        assert self.config is not None
        return load_attention(checkpoint, PREFIX, self.config, num_heads, fp32_linear_like, device=CPU, dtype=DTYPE)

    def expected(self) -> Tensor:
        mask = torch.full((NUM_TOKENS, NUM_TOKENS), -torch.inf).triu(1)[None, None]
        with torch.inference_mode():
            return self.theirs(self.x.float()[None], self.rotary, mask)[0][0]

    def found(self, layer: LatentAttention, pieces: Sequence[int], fmt: KVFormat = KVFormat.BITS16) -> Tensor:
        cache, table = make_cache(fmt), torch.tensor([[5, 2]], dtype=torch.int32)
        out, begin = [], 0
        for count in pieces:
            position = torch.arange(begin, begin + count)
            lengths = torch.tensor([begin + count], dtype=torch.int32)
            spans = None if count == 1 else divide(torch.tensor([0, count], dtype=torch.int32), lengths)
            slots = table[0].long()[position // PAGE] * PAGE + position % PAGE
            part = slice(begin, begin + count)
            rotary = self.cos[part], self.sin[part]
            out.append(layer(self.x[part], *rotary, cache, slots, table, lengths, spans))
            begin += count
        return torch.cat(out)


def fp32_linear_like(stored: Any, bias: Any) -> Callable[[Tensor], Tensor]:
    """In the dtype of x, as linears of a model are."""
    product = fp32_linear(stored, bias)
    return lambda x: product(x).to(x.dtype)


@pytest.mark.parametrize("pieces", PIECES, ids=["at once", "in pieces", "token by token"])
@pytest.mark.parametrize("change", CHANGES)
def test_attention(change: str, pieces: list[int], write_model: Callable[..., Path]) -> None:
    case = Case(write_model, CHANGES[change])
    # five roundings to fp16 between x and the result, each half a place of 11 bits
    assert relative(case.found(case.load(), pieces), case.expected()) < 5 * 2.0**-11


@pytest.mark.parametrize("fmt", [KVFormat.FP8, KVFormat.NVFP4])
def test_a_small_cache_gives_the_same_in_every_way(fmt: KVFormat, write_model: Callable[..., Path]) -> None:
    """Pieces read what earlier ones stored, and a whole prompt reads what itself stored."""
    case = Case(write_model, {})
    layer = case.load()
    whole, *others = (case.found(layer, pieces, fmt) for pieces in PIECES)
    for other in others:
        assert relative(other, whole.float()) < 5 * 2.0**-11
    assert relative(whole, case.expected()) > 5 * 2.0**-11  # it is rounded


def test_weights_of_another_model_are_refused(write_model: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match=r"kv_b_proj: the checkpoint has \[160, 64\], the model \[80, 64\]"):
        Case(write_model, {}).load(num_heads=2)
