"""Decoders run over batches of every kind, and what transformers answers to the same."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockscale.host import attention
from blockscale.host.model import load_model
from blockscale.kernels.paged_cache import PagedCache
from blockscale.models.batch import Batch
from blockscale.models.decoder import Decoder

PAGE = 16
NUM_TOKENS = 24  # longer than the tiny models' windows
PIECES = ([NUM_TOKENS], [7, 1, 12, 4], [1] * NUM_TOKENS)


def tokens(vocabulary: int = 128, seed: int = 1, count: int = NUM_TOKENS) -> Tensor:
    return torch.randint(vocabulary - 2, (count,), generator=torch.Generator().manual_seed(seed))


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def batch_of(parts: Sequence[Tensor], begins: Sequence[int], table: Tensor) -> Batch:
    """New tokens `parts` of sequences that have `begins` tokens already, whose pages are the rows of `table`."""
    counts = torch.tensor([len(part) for part in parts])
    positions = torch.cat([torch.arange(b, b + len(part)) for b, part in zip(begins, parts, strict=True)])
    of = torch.repeat_interleave(torch.arange(len(parts)), counts)
    return Batch(
        token_ids=torch.cat(list(parts)),
        positions=positions,
        cu_seqlens=torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int(),
        lengths=(torch.tensor(begins) + counts).int(),
        page_table=table,
        slots=table[of, positions // PAGE].long() * PAGE + positions % PAGE,
        max_query=int(counts.max()),
        is_decode=bool(counts.max() == 1),
    )


def poisoned(decoder: Decoder, num_pages: int) -> list[Any]:
    """Caches whose 16-bit pages hold NaN where nobody has written."""
    caches = decoder.allocate(num_pages, PAGE)
    for cache in caches:
        assert isinstance(cache, PagedCache)
        for pages in (cache.k, cache.v):
            if pages.dtype == torch.bfloat16:
                pages.fill_(torch.nan)
    return caches


def run(decoder: Decoder, ids: Tensor, pieces: Sequence[int] = (NUM_TOKENS,)) -> Tensor:
    """fp32 [T, V]: logits of one sequence given in pieces, on pages that do not follow one another."""
    caches, table = poisoned(decoder, 5), torch.tensor([[3, 1]], dtype=torch.int32)
    out, begin = [], 0
    for count in pieces:
        hidden = decoder.forward(batch_of([ids[begin : begin + count]], [begin], table), caches)
        out.append(decoder.logits(hidden))
        begin += count
    return torch.cat(out)


def transformers_logits(
    path: Path, ids: Tensor, *, is_emulating: bool = False, kv: Callable[[int], attention.KVTransform] | None = None
) -> Tensor:
    """fp32 [T, V] of transformers' model over the same weights.

    kv  rounds keys and values of a layer; without it they become bfloat16
    """

    def to_bf16(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key.bfloat16().to(key.dtype), value.bfloat16().to(value.dtype)

    model = load_model(path, emulate_activations=is_emulating).model
    model.set_attn_implementation(attention.register("eager"))
    for module in model.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "o_proj"):
            module.kv_transform = kv(module.layer_idx) if kv else to_bf16
    with torch.inference_mode():
        return model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].float()
