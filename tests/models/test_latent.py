"""Attention to cached latents: both ways against plain arithmetic in fp64, and against each other."""

import pytest
import torch
from torch import Tensor

from blockscale.kernels.paged_cache import KVFormat, LatentCache
from blockscale.models.latent import attend, divide, read_latents, write_latents

H, NOPE, ROPE, LATENT, V = 4, 16, 32, 64, 24
SCALE = 0.2
PAGE = 16
DTYPE = torch.float16


def make_cache(fmt: KVFormat, num_pages: int = 8) -> LatentCache:
    """Filled with what is no number, so that a row nobody wrote shows."""
    width = LATENT + ROPE
    if fmt is KVFormat.BITS16:
        pages = torch.full((num_pages, PAGE, width), torch.nan, dtype=DTYPE)
        return LatentCache(fmt, pages, None, None, ROPE, DTYPE)
    columns = width if fmt is KVFormat.FP8 else width // 2
    pages = torch.full((num_pages, PAGE, columns), 0x7F, dtype=torch.uint8)
    block_scale = None
    if fmt is KVFormat.FP8:
        pages = pages.view(torch.float8_e4m3fn)
    else:
        block_scale = torch.full((num_pages, PAGE, width // 16), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return LatentCache(fmt, pages, block_scale, torch.tensor(0.01), ROPE, DTYPE)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DTYPE)


def plain_attention(q: Tensor, up_k: Tensor, up_v: Tensor, rows: Tensor) -> Tensor:
    """fp64 [T, H, V]: the last T of the rows [S, LATENT + ROPE] ask."""
    latent, rope = rows[:, :LATENT].double(), rows[:, LATENT:].double()
    out = torch.empty(*q.shape[:2], V, dtype=torch.float64)
    for t in range(len(q)):
        seen = len(rows) - len(q) + t + 1
        for h in range(H):
            k = torch.cat((latent[:seen] @ up_k[h].double().T, rope[:seen]), dim=-1)
            weights = torch.softmax(k @ q[t, h].double() * SCALE, dim=0)
            out[t, h] = weights @ (latent[:seen] @ up_v[h].double().T)
    return out


@pytest.mark.parametrize("fmt", list(KVFormat))
def test_a_mixed_batch(fmt: KVFormat) -> None:
    """A prompt's second piece, one new token, a whole prompt, one new token, in pages out of order."""
    cache = make_cache(fmt)
    counts, contexts = [5, 1, 18, 1], [37, 20, 18, 1]
    table = torch.tensor([[3, 1, 6], [2, 4, 0], [5, 0, 0], [7, 0, 0]], dtype=torch.int32)
    rows = [drawn(n, LATENT + ROPE, seed=n) for n in contexts]
    for b, row in enumerate(rows):
        position = torch.arange(len(row))
        write_latents(cache, row, table[b].long()[position // PAGE] * PAGE + position % PAGE)
    q = drawn(sum(counts), H, NOPE + ROPE, seed=9)
    up_k, up_v = drawn(H, NOPE, LATENT, seed=10) * 0.1, drawn(H, V, LATENT, seed=11) * 0.1
    cu_seqlens = torch.tensor([0, 5, 6, 24, 25], dtype=torch.int32)
    lengths = torch.tensor(contexts, dtype=torch.int32)
    spans = divide(cu_seqlens, lengths)
    assert spans.single.tolist() == [1, 3]
    assert [span[0] for span in spans.several] == [0, 2]
    found = attend(q, up_k, up_v, cache, table, lengths, spans, SCALE)
    for b in range(4):
        part = slice(int(cu_seqlens[b]), int(cu_seqlens[b + 1]))
        stored = read_latents(cache, table[b], contexts[b])
        expected = plain_attention(q[part], up_k, up_v, stored)
        # keys, queries and the result are rounded to 11 bits: logits err by a few of their last places
        assert (found[part].double() - expected).norm() / expected.norm() < 2.0**-9


@pytest.mark.parametrize(("fmt", "bound"), [(KVFormat.BITS16, 0.0), (KVFormat.FP8, 2.0**-4), (KVFormat.NVFP4, 0.3)])
def test_what_is_written_is_read(fmt: KVFormat, bound: float) -> None:
    cache = make_cache(fmt)
    rows = drawn(20, LATENT + ROPE, seed=1)
    table = torch.tensor([4, 2], dtype=torch.int32)
    position = torch.arange(20)
    write_latents(cache, rows, table.long()[position // PAGE] * PAGE + position % PAGE)
    found = read_latents(cache, table, 20)
    # half a step of the format, relative to the row's largest (NVFP4: of 6 in steps of 2, and a rounded block scale)
    assert ((found - rows.float()).abs() <= bound * rows.float().abs().amax(1, keepdim=True)).all()


def test_places_outside_the_cache_are_skipped() -> None:
    cache = make_cache(KVFormat.BITS16, num_pages=1)
    write_latents(cache, drawn(3, LATENT + ROPE, seed=1), torch.tensor([-1, 2, 16]))
    assert cache.pages.isfinite().all(-1).squeeze(0).nonzero().flatten().tolist() == [2]
