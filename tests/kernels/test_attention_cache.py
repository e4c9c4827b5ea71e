"""Paged caches: layouts, sizes and what is refused."""

import pytest
import torch

from blockscale.errors import FormatError, UsageError
from blockscale.kernels.paged_cache import KVFormat, PagedCache, allocate, dequantize_pages
from tests.kernels.attention_cases import make_case, tokens_of


@pytest.mark.parametrize(
    ("fmt", "token_bytes"), [(KVFormat.BITS16, 1024), (KVFormat.FP8, 512), (KVFormat.NVFP4, 256 + 32)]
)
def test_sizes_and_order_in_memory(fmt: KVFormat, token_bytes: int) -> None:
    cache = allocate(fmt, 3, 16, 2, 128)
    assert (cache.num_pages, cache.page_size, cache.num_kv_heads, cache.head_dim) == (3, 16, 2, 128)
    assert cache.bytes_per_token == token_bytes
    assert cache.k.transpose(1, 2).is_contiguous()  # a head's tokens of a page lie side by side
    assert (cache.k_scale is None) == (fmt is KVFormat.BITS16)


@pytest.mark.parametrize("fmt", list(KVFormat))
def test_written_tokens_come_back(fmt: KVFormat) -> None:
    case = make_case(fmt, [20], seed=3)
    k, _ = tokens_of(case, 0)
    torch.manual_seed(0)
    pages = dequantize_pages(fmt, case.cache.k, case.cache.k_block_scale, case.cache.k_scale)
    page, slot = case.page_table[0, 1].item(), 3
    assert torch.equal(pages[page, slot].double(), k[19])


def test_what_no_kernel_could_read_is_refused() -> None:
    good = allocate(KVFormat.NVFP4, 2, 16, 1, 64)
    parts = vars(good)
    bad = {
        "pages of 24": {"k": torch.zeros(2, 24, 1, 32, dtype=torch.uint8)},
        "head of 24": {"k": torch.zeros(2, 16, 1, 12, dtype=torch.uint8)},
        "dtype": {"k": good.k.view(torch.int8)},
        "no block scales": {"v_block_scale": None},
        "block scales of another shape": {"v_block_scale": good.v_block_scale[:1]},
        "no scale": {"k_scale": None},
        "scale of another dtype": {"k_scale": good.k_scale.double()},
        "columns apart": {"k": torch.zeros(2, 16, 1, 64, dtype=torch.uint8)[..., ::2]},
        "16 bits of fp32": {"dtype": torch.float32},
        "k and v apart": {"v": good.v[:1], "v_block_scale": good.v_block_scale[:1]},
    }
    for what, change in bad.items():
        with pytest.raises(FormatError, match="paged cache"):
            pytest.fail(f"{what}: {PagedCache(**{**parts, **change})}")
    with pytest.raises(FormatError, match="head dimension"):
        allocate(KVFormat.FP8, 2, 16, 1, 40)
    with pytest.raises(UsageError, match="0 pages"):
        allocate(KVFormat.FP8, 0, 16, 1, 64)
