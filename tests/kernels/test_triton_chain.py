"""The small kernels between linears, in Triton's interpreter, against the torch that models run without them."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from blockscale.errors import FormatError
from blockscale.kernels.ops.quantize import quantize_kv
from blockscale.kernels.paged_cache import KVFormat, PagedCache, allocate
from blockscale.models.layers import rms_norm, turn, turns
from tests.kernels.interpreter import interpreted

norms = interpreted("blockscale.kernels.triton.norm")
gates = interpreted("blockscale.kernels.triton.gated")
rotary = interpreted("blockscale.kernels.triton.rotary")
silu_quantize = interpreted("blockscale.kernels.triton.silu_quantize")

DTYPES = (torch.bfloat16, torch.float16)


def sample(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(got: Tensor, expected: Tensor) -> None:
    """All but sums in another order: at most one step of 16 bits apart, and hardly ever that."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    step = torch.finfo(got.dtype).eps * expected.float().abs() + 1e-6
    assert ((got.float() - expected.float()).abs() <= step).all()
    assert (got == expected).float().mean() > 0.98


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 48, 576, 2050, 9000])
@pytest.mark.parametrize("is_added", [False, True])
def test_norm(dtype: torch.dtype, columns: int, is_added: bool) -> None:
    x = sample(3, columns + 8, dtype=dtype)[:, :columns]
    added = sample(3, columns, dtype=dtype, seed=1) if is_added else None
    weight = sample(columns, dtype=torch.float32, seed=2)
    total, out = norms.add_rms_norm(x, added, weight, 1e-5)
    assert torch.equal(total, x if added is None else x + added)
    assert_near(out, rms_norm(total, weight, 1e-5))


def test_a_row_with_nan_stays_alone() -> None:
    x = sample(3, 64)
    x[1, 5] = torch.nan
    _, out = norms.add_rms_norm(x, None, torch.ones(64), 1e-5)
    assert out[1].isnan().all()
    assert not out[[0, 2]].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 600])
def test_gated(dtype: torch.dtype, width: int) -> None:
    both = sample(3, 2 * width + 4, dtype=dtype)[:, : 2 * width]
    gate, up = both.chunk(2, dim=-1)
    assert_near(gates.gated(both), functional.silu(gate) * up)
    expected = functional.gelu(gate, approximate="tanh") * up
    assert_near(gates.gated(both, silu_quantize.Gate.GELU_TANH), expected)


def stored(cache: PagedCache) -> list[Tensor]:
    parts = (cache.k, cache.v, cache.k_block_scale, cache.v_block_scale)
    return [part.view(torch.uint8) for part in parts if part is not None]


@pytest.mark.parametrize("fmt", list(KVFormat))
@pytest.mark.parametrize(("turned", "has_norm"), [(32, False), (32, True), (24, False), (24, True)])
def test_rotary(fmt: KVFormat, turned: int, has_norm: bool) -> None:
    tokens, num_heads, kv_heads, size = 5, 4, 2, 32
    heads = sample(tokens, num_heads + 2 * kv_heads, size)
    by = turns(torch.arange(tokens) * 7, 0.1 ** torch.arange(turned // 2), 1.0)
    weights = (sample(size, dtype=torch.float32, seed=3), sample(size, dtype=torch.float32, seed=4))
    scale = None if fmt is KVFormat.BITS16 else 0.02
    caches = [allocate(fmt, 3, 16, kv_heads, size, k_scale=scale, v_scale=scale) for _ in range(2)]
    slots = torch.tensor([3, 47, -1, 48, 16])  # the third and fourth lie outside

    q = rotary.rotate_into_cache(heads, by.cos, by.sin, caches[0], slots, weights if has_norm else None, 1e-6)

    q_in, k_in = heads[:, :num_heads], heads[:, num_heads : num_heads + kv_heads]
    if has_norm:
        q_in, k_in = (rms_norm(x, w, 1e-6) for x, w in zip((q_in, k_in), weights, strict=True))
    assert_near(q, turn(q_in, by))
    quantize_kv(caches[1], turn(k_in, by), heads[:, num_heads + kv_heads :], slots)
    written = [part.flatten(0, 1) for part in stored(caches[0])]
    for ours, theirs in zip(written, (part.flatten(0, 1) for part in stored(caches[1])), strict=True):
        assert (ours == theirs).float().mean() > 0.995  # norms sum in another order
        assert not ours[[0, 1, 2, 4]].any()
    assert torch.equal(written[1], stored(caches[1])[1].flatten(0, 1))  # values are as they came
    if not has_norm:
        assert torch.equal(written[0], stored(caches[1])[0].flatten(0, 1))


def test_refusals() -> None:
    heads = sample(1, 8, 32)
    by = turns(torch.arange(1), torch.ones(16), 1.0)
    cache = allocate(KVFormat.BITS16, 1, 16, 2, 32)
    slots = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(FormatError, match="heads"):
        rotary.rotate_into_cache(sample(1, 4, 32), by.cos, by.sin, cache, slots)
    with pytest.raises(FormatError, match="heads is float16"):
        rotary.rotate_into_cache(heads.half(), by.cos, by.sin, cache, slots)
    with pytest.raises(FormatError, match="slots"):
        rotary.rotate_into_cache(heads, by.cos, by.sin, cache, slots.int())
    with pytest.raises(FormatError, match="two halves"):
        gates.gated(sample(2, 7))
    with pytest.raises(FormatError, match="added"):
        norms.add_rms_norm(sample(2, 16), sample(2, 8), torch.ones(16), 1e-5)
