"""The ops between linears as compiled, on a GPU, against plain torch: shapes, dtypes, strides, all formats of caches.

Memory that a result is written to holds NaN before, and so does what lies around strided operands.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from blockscale.kernels.ops import between
from blockscale.kernels.paged_cache import KVFormat, PagedCache, allocate
from blockscale.kernels.reference import between as plain
from blockscale.kernels.selftest.outcome import HALF_UNIT, check_equal, check_near

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

DEVICE = "cuda"
BEFORE = 0x5A  # every byte of a cache before anything is written
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(4, device=DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


def sample(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def moved(x: Tensor, layout: str) -> Tensor:
    """The same values on the GPU: "dense", "rows" apart by an odd number of NaN, or "columns" apart."""
    if layout == "dense":
        return x.to(DEVICE)
    *lead, last = x.shape
    if layout == "rows":
        wide = torch.full((*lead, last + 7), torch.nan, dtype=x.dtype, device=DEVICE)
        view = wide[..., 3 : 3 + last]
    else:
        wide = torch.full((*lead, 2 * last), torch.nan, dtype=x.dtype, device=DEVICE)
        view = wide[..., ::2]
    view.copy_(x)
    return view


def assert_near(found: Tensor, expected: Tensor, magnitude: Tensor, num_roundings: int) -> None:
    """16 bits: that many roundings of numbers up to `magnitude` fall to the other side. fp32: what a sum of squares in
    another order, and exp and roots of the GPU, may differ by."""
    assert found.dtype == expected.dtype
    unit = 2.0**-17 if found.dtype == FP32 else 2 * num_roundings * HALF_UNIT[found.dtype]
    check_near(str(found.dtype), found.cpu(), expected.double(), magnitude.double().abs() * unit + 1e-6)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("layout", ["dense", "rows", "columns"])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (5, 48), (3, 576), (33, 2880), (2, 4096), (7, 16_385), (1, 32_768)]
)
def test_norm(dtype: torch.dtype, layout: str, rows: int, columns: int) -> None:
    x, added = (sample(rows, columns, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = sample(columns, seed=2)
    for other in (None, added):
        there = None if other is None else moved(other, layout)
        total, out = between.add_rms_norm(moved(x, layout), there, weight.to(DEVICE), 1e-5)
        expected_total, expected = plain.add_rms_norm(x, other, weight, 1e-5)
        assert torch.equal(total.cpu(), expected_total)
        assert_near(out, expected, expected, 1)


def test_a_row_that_is_broken_stays_alone() -> None:
    x = sample(4, 2048, dtype=BF16)
    x[1, 77], x[2, 5] = torch.nan, torch.inf
    _, out = between.add_rms_norm(x.to(DEVICE), None, torch.ones(2048, device=DEVICE), 1e-5)
    assert out[1].isnan().all()
    assert out[2, 5].isnan()
    assert out[[0, 3]].isfinite().all()


@pytest.mark.parametrize("activation", between.ACTIVATIONS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("layout", ["dense", "rows", "columns"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 16), (3, 513), (64, 1536), (1, 14_336)])
def test_gated(activation: str, dtype: torch.dtype, layout: str, rows: int, columns: int) -> None:
    both = sample(rows, 2 * columns, dtype=dtype)
    both[0, 0], both[-1, columns - 1] = -300.0, 300.0  # past what exp holds in fp32
    found = between.gated(moved(both, layout), activation, alpha=1.5, limit=2.0)
    expected = plain.gated(both, activation, 1.5, 2.0)
    assert_near(found, expected, expected, 2)


@pytest.mark.parametrize("activation", between.ACTIVATIONS)
def test_gated_in_fp32(activation: str) -> None:
    both = sample(5, 2 * 700)
    gate, up = both.double().chunk(2, dim=-1)
    if activation == "silu":
        expected = functional.silu(gate) * up
    elif activation == "gelu_tanh":
        expected = functional.gelu(gate, approximate="tanh") * up
    else:
        gate, up = gate.clamp(max=2.0), up.clamp(-2.0, 2.0)
        expected = (up + 1) * gate * torch.sigmoid(1.5 * gate)
    found = between.gated(both.to(DEVICE), activation, alpha=1.5, limit=2.0)
    assert found.dtype == FP32
    check_near(activation, found.cpu(), expected, expected.abs() * 2.0**-17 + 1e-6)


def poisoned_cache(fmt: KVFormat, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> PagedCache:
    cache = allocate(fmt, *shape, k_scale=0.02, v_scale=0.03, dtype=dtype, device=device)
    for part in (cache.k, cache.v, cache.k_block_scale, cache.v_block_scale):
        if part is not None:
            part.view(torch.uint8).fill_(BEFORE)
    return cache


def by_slot(part: Tensor) -> Tensor:
    """uint8 [num_pages * page_size, num_kv_heads, bytes of a head] on the CPU."""
    return part.cpu().view(torch.uint8).flatten(0, 1)


@pytest.mark.parametrize("fmt", list(KVFormat))
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("layout", ["dense", "rows", "columns"])
@pytest.mark.parametrize(
    ("dtype", "tokens", "heads", "kv_heads", "size", "turned", "page_size"),
    [
        (BF16, 1, 32, 8, 128, 128, 16),
        (FP16, 70, 9, 3, 64, 64, 32),
        (BF16, 5, 4, 1, 256, 256, 16),
        (BF16, 33, 6, 2, 96, 48, 64),
        (FP16, 3, 2, 2, 80, 32, 16),
        (BF16, 4, 8, 1, 128, 2, 16),
    ],
)
def test_rotary(
    fmt: KVFormat, is_normed: bool, layout: str,
    dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, size: int, turned: int, page_size: int,
) -> None:  # fmt: skip
    x = sample(tokens, heads + 2 * kv_heads, size, dtype=dtype)
    angles = 37.0 * torch.arange(tokens)[:, None, None] * 0.7 ** torch.arange(turned // 2)
    cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    num_slots = 6 * page_size
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(5))[:tokens]
    if tokens > 2:
        slots[0], slots[2] = -1, num_slots
    norms = (sample(size, seed=3), sample(size, seed=4)) if is_normed else None
    shape = 6, page_size, kv_heads, size
    here, there = poisoned_cache(fmt, shape, dtype, "cpu"), poisoned_cache(fmt, shape, dtype, DEVICE)
    expected = plain.rotate_into_cache(x, cos, sin, here, slots, norms, 1e-6)

    norms_there = None if norms is None else (norms[0].to(DEVICE), norms[1].to(DEVICE))
    operands = cos.to(DEVICE), sin.to(DEVICE), there, slots.to(DEVICE), norms_there
    found = between.rotate_into_cache(moved(x, layout), *operands, 1e-6)

    if norms is None:
        check_equal("queries", found.cpu(), expected)
    else:  # a sum is no better known than its terms, however small it is
        positive = norms[0].abs(), norms[1].abs()
        scratch = poisoned_cache(fmt, shape, dtype, "cpu")
        terms = plain.rotate_into_cache(x.abs(), cos.abs(), sin.abs(), scratch, slots, positive, 1e-6)
        assert_near(found, expected, terms, 2)
    is_written = torch.zeros(num_slots, dtype=torch.bool)
    is_written[slots[(slots >= 0) & (slots < num_slots)]] = True
    for name in ("k", "v", "k_block_scale", "v_block_scale"):
        a, b = getattr(there, name), getattr(here, name)
        if a is None:
            continue
        a, b = by_slot(a), by_slot(b)
        assert (a[~is_written] == BEFORE).all()
        if is_normed and name.startswith("k"):
            assert (a[is_written] == b[is_written]).float().mean() > 0.99
        else:
            check_equal(name, a[is_written], b[is_written])


def test_nothing_to_do() -> None:
    weight, cache = torch.ones(64, device=DEVICE), allocate(KVFormat.NVFP4, 1, 16, 1, 64, device=DEVICE)
    total, out = between.add_rms_norm(torch.empty(0, 64, device=DEVICE), None, weight, 1e-5)
    assert total.shape == out.shape == (0, 64)
    assert between.gated(torch.empty(0, 64, device=DEVICE)).shape == (0, 32)
    by = torch.empty(0, 1, 64, device=DEVICE)
    heads, slots = torch.empty(0, 4, 64, dtype=BF16, device=DEVICE), torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert between.rotate_into_cache(heads, by, by, cache, slots).shape == (0, 2, 64)
