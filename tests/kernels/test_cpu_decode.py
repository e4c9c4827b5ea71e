"""The CPU's 16-bit products, attention of single tokens and norms, against float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.kernels.cpu import decode, dense
from blockscale.kernels.paged_cache import KVFormat, PagedCache, allocate
from blockscale.kernels.reference.attention import attention_decode as reference

ULP = 2.0**-24
PAGE = 16


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (3, 37, 50), (17, 64, 64), (9, 100, 576), (8, 33, 15)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_product(m: int, n: int, k: int, has_bias: bool) -> None:
    x, weight = normal(m, k, seed=1), normal(n, k, seed=2).bfloat16()
    bias = normal(n, seed=3) if has_bias else None
    found = dense.linear(x, weight, bias)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
    # at most k / 16 + 6 additions stand behind a sum
    assert ((found - exact).abs() <= (k / 16 + 6) * ULP * size).all()
    for row in range(m):
        assert torch.equal(dense.linear(x[row], weight, bias), found[row]), "a row depends on its batch"


def test_product_of_a_strided_input_and_of_none() -> None:
    weight = normal(5, 32, seed=2).bfloat16()
    wide = normal(4, 64)
    assert torch.equal(dense.linear(wide[:, :32], weight), dense.linear(wide[:, :32].contiguous(), weight))
    assert dense.linear(wide[:0, :32], weight).shape == (0, 5)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.zeros(2, 8), torch.zeros(4, 8)),
        (torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(4, 8, dtype=torch.bfloat16)),
        (torch.zeros(2, 9), torch.zeros(4, 8, dtype=torch.bfloat16)),
        (torch.zeros(2, 4), torch.zeros(4, 8, dtype=torch.bfloat16).T),
    ],
)
def test_operands_of_a_product_are_checked(x: Tensor, weight: Tensor) -> None:
    with pytest.raises(FormatError):
        dense.linear(x, weight)


def filled(num_kv_heads: int, head_dim: int) -> tuple[PagedCache, Tensor, Tensor]:
    """Three sequences of 1, 16 and 41 tokens; NaN wherever none of their tokens lies."""
    cache = allocate(KVFormat.BITS16, 8, PAGE, num_kv_heads, head_dim)
    table = torch.tensor([[5, -7, 99], [2, 1 << 20, -1], [7, 0, 3]], dtype=torch.int32)
    lengths = torch.tensor([1, 16, 41], dtype=torch.int32)
    for side, pages in enumerate((cache.k, cache.v)):
        pages.fill_(torch.nan)
        for b, length in enumerate(lengths.tolist()):
            values = normal(length, num_kv_heads, head_dim, seed=10 * b + side).bfloat16()
            for t in range(length):
                pages[int(table[b, t // PAGE]), t % PAGE] = values[t]
    return cache, table, lengths


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 1},
        {"window": 20},
        {"softcap": 0.5},
        {"sinks": True},
        {"window": 7, "softcap": 2.0, "sinks": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (9, 3, 64), (2, 1, 48)])
def test_attention(options: dict[str, Any], heads: int, kv_heads: int, dim: int) -> None:
    cache, table, lengths = filled(kv_heads, dim)
    # bf16 queries: what the reference takes, and fp32 holds as well
    q = normal(3, heads, dim, seed=5).bfloat16()
    sinks = normal(heads, seed=6) if options.get("sinks") else None
    settings = {**options, "sinks": sinks, "scale": dim**-0.5}
    expected = reference(q, cache, table, lengths, **settings)
    found = decode.attention_decode(q.float(), cache, table, lengths, **settings)
    assert found is not None
    # the reference's result is rounded to bf16: half a place of 8 bits, and sums in another order
    largest = float(cache.v[~cache.v.isnan()].abs().max())
    assert ((found - expected.float()).abs() <= 2.0**-8 * expected.float().abs() + 64 * ULP * largest).all()
    alone = decode.attention_decode(q[1:2].float(), cache, table[1:2], lengths[1:2], **settings)
    assert alone is not None
    assert torch.equal(alone[0], found[1])


def test_attention_to_nothing_is_zero() -> None:
    cache, table, _ = filled(1, 16)
    found = decode.attention_decode(normal(3, 2, 16), cache, table, torch.zeros(3, dtype=torch.int32), scale=1.0)
    assert found is not None
    assert (found == 0).all()


@pytest.mark.parametrize(("row", "length"), [(0, 17), (1, 17), (2, 49), (0, -1)])
def test_a_table_that_leaves_the_cache_is_refused(row: int, length: int) -> None:
    cache, table, lengths = filled(1, 16)
    lengths[row] = length
    with pytest.raises(FormatError, match="outside"):
        decode.attention_decode(normal(3, 2, 16), cache, table, lengths, scale=1.0)


def test_what_is_left_to_torch() -> None:
    cache, table, lengths = filled(1, 16)
    q = normal(3, 2, 16)
    assert decode.attention_decode(q.bfloat16(), cache, table, lengths, scale=1.0) is None
    small = allocate(KVFormat.FP8, 8, PAGE, 1, 16)
    assert decode.attention_decode(q, small, table, lengths, scale=1.0) is None
    half = allocate(KVFormat.BITS16, 8, PAGE, 1, 16, dtype=torch.float16)
    assert decode.attention_decode(q, half, table, lengths, scale=1.0) is None
    assert decode.rms_norm(q.bfloat16(), torch.ones(16), 1e-6) is None


@pytest.mark.parametrize("shape", [(1, 5), (3, 16), (40, 50), (2, 17, 64)])
def test_norm(shape: tuple[int, ...]) -> None:
    x, weight = normal(*shape, seed=1), normal(shape[-1], seed=2)
    found = decode.rms_norm(x, weight, 1e-3)
    assert found is not None
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    assert ((found - exact).abs() <= (shape[-1] / 16 + 12) * ULP * exact.abs()).all()
    alone = decode.rms_norm(x.reshape(-1, shape[-1])[-1:], weight, 1e-3)
    assert alone is not None
    assert torch.equal(alone[0], found.reshape(-1, shape[-1])[-1])
