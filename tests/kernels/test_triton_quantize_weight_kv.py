"""Weight sweep and KV-cache quantization, in Triton's interpreter, against the library's own: the same bytes."""

import pytest
import torch
from torch import Tensor

from blockscale.algorithms.scale_sweep import best_block_scale
from blockscale.errors import FormatError
from blockscale.formats import fp8, nvfp4
from blockscale.formats.spec import FP8
from blockscale.formats.tensor import FLOAT_DTYPES
from blockscale.kernels.paged_cache import KVFormat, PagedCache, allocate
from tests.kernels.interpreter import interpreted
from tests.kernels.test_triton_quantize import assert_same, expected, sample

sweeps = interpreted("blockscale.kernels.triton.weight_sweep")
caches = interpreted("blockscale.kernels.triton.kv_quantize")


def swept(weight: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    block_scale = best_block_scale(weight, global_scale)
    return nvfp4.encode_packed(weight, block_scale, global_scale), block_scale


def weights(dtype: torch.dtype) -> Tensor:
    """[16, 160]: with blocks that are zero, tiny (codes below 8) and large beside the rest."""
    weight = sample(16, 160, dtype=torch.float32, scale=0.02)
    weight[0] *= 1e-4
    weight[1, :16] = 0
    weight[2] *= 3e-3
    weight[3] *= 20
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("factor", [1.0, 20.0, 0.125, 1e-9])
def test_sweep(dtype: torch.dtype, factor: float) -> None:
    weight = weights(dtype)
    scale = nvfp4.global_scale_from_amax(weight.abs().amax(), 6 * 256.0) * factor
    assert_same(sweeps.quantize_weight_sweep(weight, scale), swept(weight, scale))


def test_sweep_of_stacked_and_strided_weights() -> None:
    stack = sample(3, 4, 64, scale=0.02)
    scale = nvfp4.global_scale_from_amax(stack.abs().amax(), 6 * 256.0)
    assert_same(sweeps.quantize_weight_sweep(stack, scale), swept(stack, scale))
    view = stack.transpose(0, 1)
    assert_same(sweeps.quantize_weight_sweep(view, scale), swept(view.contiguous(), scale))


def test_sweep_errs_less_than_the_amax_scale() -> None:
    weight = sample(8, 64, scale=0.02)
    scale = nvfp4.global_scale_from_amax(weight.abs().amax(), 6 * 256.0)

    def error(quantized: tuple[Tensor, Tensor]) -> float:
        return (nvfp4.decode_packed(*quantized, scale) - weight.float()).square().sum().item()

    assert error(sweeps.quantize_weight_sweep(weight, scale)) < 0.95 * error(expected(weight, scale))


def test_sweep_of_a_broken_block() -> None:
    weight = sample(1, 48)
    weight[0, 20] = float("inf")
    packed, block_scale = sweeps.quantize_weight_sweep(weight, torch.tensor(1e-3))
    assert block_scale.view(torch.uint8)[0, 1] == 0x7F
    assert nvfp4.decode_packed(packed, block_scale, torch.tensor(1e-3)).isnan().sum() == 16
    assert sweeps.quantize_weight_sweep(weight[:0], torch.tensor(1.0))[0].shape == (0, 24)


SLOTS = torch.tensor([3, -1, 17, 63, 64, 32])  # of 4 pages of 16: two are none


def filled(fmt: KVFormat, k: Tensor, v: Tensor, cache: PagedCache | None = None) -> PagedCache:
    cache = cache or allocate(fmt, 4, 16, k.shape[1], k.shape[2], k_scale=0.02, v_scale=0.01)
    caches.quantize_kv(cache, k, v, SLOTS)
    return cache


@pytest.mark.parametrize("fmt", KVFormat)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kv_cache(fmt: KVFormat, dtype: torch.dtype) -> None:
    k, v = sample(6, 3, 48, dtype=dtype, scale=4.0), sample(6, 3, 48, dtype=dtype, scale=4.0, seed=1)
    k[0, 0, :3] = torch.tensor([0.0, -0.0, -1e-9])
    cache = filled(fmt, k, v)
    sides = (k, cache.k, cache.k_block_scale, cache.k_scale), (v, cache.v, cache.v_block_scale, cache.v_scale)
    for values, pages, block_scale, scale in sides:
        written = pages.contiguous().view(torch.uint8).flatten(2).ne(0).any(-1)  # [page, place]
        assert written.flatten().nonzero().flatten().tolist() == [3, 17, 32, 63]
        for token in (0, 2, 3, 5):
            page, place = divmod(int(SLOTS[token]), 16)
            got, want = pages[page, place], values[token]
            if fmt is KVFormat.BITS16:
                assert torch.equal(got, want.bfloat16())
            elif fmt is KVFormat.FP8:
                assert torch.equal(got.view(torch.uint8), fp8.encode_values(want, scale, FP8).view(torch.uint8))
            else:
                assert_same((got, block_scale[page, place]), expected(want, scale))


def test_kv_cache_of_strided_operands() -> None:
    qkv = sample(6, 9, 48)
    k, v = qkv[:, 3:6], qkv[:, 6:9]
    want = filled(KVFormat.NVFP4, k.contiguous(), v.contiguous())
    got = filled(KVFormat.NVFP4, k, v)
    assert torch.equal(got.k, want.k)
    assert torch.equal(got.v_block_scale.view(torch.uint8), want.v_block_scale.view(torch.uint8))
    flat = allocate(KVFormat.NVFP4, 4, 16, 3, 48, k_scale=0.02, v_scale=0.01)
    tokens_first = PagedCache(
        *(flat.format, flat.k.contiguous(), flat.v.contiguous()),
        *(flat.k_block_scale.contiguous(), flat.v_block_scale.contiguous(), flat.k_scale, flat.v_scale, flat.dtype),
    )
    assert torch.equal(filled(KVFormat.NVFP4, k, v, tokens_first).k, want.k)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_kv_cache_keeps_nan_where_it_came(bad: float) -> None:
    k, v = sample(6, 2, 32), sample(6, 2, 32, seed=1)
    k[2, 1, 20] = bad
    cache = filled(KVFormat.FP8, k, v)
    assert cache.k.view(torch.uint8)[1, 1, 1, 20] == 0x7F
    assert cache.k.float().isnan().sum() == 1
    cache = filled(KVFormat.NVFP4, k, v)
    assert cache.k_block_scale.view(torch.uint8)[1, 1, 1].tolist()[1] == 0x7F
    assert cache.k_block_scale.float().isnan().sum() == 1


def test_kv_operands_that_do_not_fit() -> None:
    cache = allocate(KVFormat.FP8, 2, 16, 2, 32)
    k = sample(6, 2, 32)
    caches.quantize_kv(cache, k[:0], k[:0], SLOTS[:0])
    for operands, message in (
        ((k[:, :1], k, SLOTS), "k is"),
        ((k, k.half(), SLOTS), "v is"),
        ((k, k, SLOTS.int()), "slots"),
        ((k, k, SLOTS[:5]), "slots"),
        ((k, k, SLOTS.repeat_interleave(2)[::2]), "slots"),
    ):
        with pytest.raises(FormatError, match=message):
            caches.quantize_kv(cache, *operands)
