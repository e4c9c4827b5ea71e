"""Decode of multi-head latent attention in Triton's interpreter, against float64."""

import pytest
import torch
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.kernels.paged_cache import KVFormat, LatentCache
from tests.kernels.attention_cases import Case, attend, error_units, make_case, tokens_of
from tests.kernels.interpreter import interpreted

mla = interpreted("blockscale.kernels.triton.attention_mla")
FORMATS = list(KVFormat)
LATENT, ROPE, SCALE = 64, 32, 0.2


def latents(case: Case) -> LatentCache:
    """The keys of a cache with one head, seen as latents and their parts with positions."""
    c = case.cache
    block_scale = None if c.k_block_scale is None else c.k_block_scale[:, :, 0]
    return LatentCache(c.format, c.k[:, :, 0], block_scale, c.k_scale, ROPE, c.dtype)


def make(fmt: KVFormat, lengths: list[int], num_heads: int = 5, **options: object) -> Case:
    return make_case(fmt, lengths, num_heads=num_heads, num_kv_heads=1, head_dim=LATENT + ROPE, **options)


def run(case: Case, splits: int | None = 1) -> Tensor:
    return mla.attention_mla(case.q, latents(case), case.page_table, case.lengths, scale=SCALE, splits=splits)


def reference(case: Case) -> tuple[Tensor, Tensor]:
    out = torch.zeros(*case.q.shape[:2], LATENT, dtype=torch.float64)
    bound = torch.zeros_like(out)
    for b, length in enumerate(case.lengths.tolist()):
        if length:
            k, _ = tokens_of(case, b)
            out[b : b + 1], bound[b : b + 1] = attend(case.q[b : b + 1], k, k[..., :LATENT], length - 1, scale=SCALE)
    return out, bound


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("splits", [1, 3, None])
def test_ragged_lengths_pages_out_of_order_and_poison_around_them(fmt: KVFormat, splits: int | None) -> None:
    case = make(fmt, [37, 0, 1, 70])
    out = run(case, splits)
    assert error_units(out, *reference(case), fmt) <= 1
    assert not out[1].any()


@pytest.mark.parametrize("fmt", FORMATS)
def test_more_heads_than_a_tile(fmt: KVFormat) -> None:
    case = make(fmt, [40], num_heads=33, page_size=64, dtype=torch.float16)
    assert error_units(run(case), *reference(case), fmt) <= 1


def test_parts_of_a_query_of_very_different_size() -> None:
    case = make(KVFormat.FP8, [33])
    case.q[..., LATENT:] *= 2.0**-40
    case.q[0, 1, LATENT:] *= 2.0**42
    assert error_units(run(case, 2), *reference(case), KVFormat.FP8) <= 1


def test_nan_of_one_sequence_stays_there() -> None:
    case = make(KVFormat.NVFP4, [40, 40])
    case.cache.k_block_scale.view(torch.uint8)[case.page_table[0, 1].item(), 3] = 0x7F
    out = run(case, 2)
    assert out[0].isnan().all()
    assert not out[1].isnan().any()


def test_operands_that_do_not_fit_are_refused() -> None:
    case = make(KVFormat.FP8, [5])
    cache = latents(case)
    with pytest.raises(FormatError, match="q is"):
        mla.attention_mla(case.q[..., :64], cache, case.page_table, case.lengths, scale=SCALE)
    with pytest.raises(FormatError, match="latent of"):
        LatentCache(cache.format, cache.pages, None, cache.scale, 16, cache.dtype)
    with pytest.raises(FormatError, match="pages"):
        LatentCache(cache.format, cache.pages[0], None, cache.scale, ROPE, cache.dtype)
