"""The kernel for many tokens on a Hopper GPU: against float64, and bit for bit where nothing is rounded."""

import itertools

import pytest
import torch
from torch import Tensor

from blockscale.formats.spec import MXFP4, NVFP4, Format
from blockscale.formats.tensor import QuantizedTensor
from blockscale.kernels.cuda.linear_large import TILINGS, Tiling, linear, plan
from blockscale.kernels.device import describe
from blockscale.kernels.layouts import to_fragments
from blockscale.kernels.prepare import row_major

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HAS_HOPPER, reason="needs a GPU of compute capability 9.0")

SHAPES = [(1, 32, 32), (64, 128, 128), (65, 96, 160), (130, 257, 256), (300, 4096, 2048), (700, 2048, 1024)]


def weight(n: int, k: int, fmt: Format = NVFP4, *, is_exact: bool = False) -> QuantizedTensor:
    random = torch.Generator("cuda").manual_seed(n + k)
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda", generator=random)
    if fmt == MXFP4:
        scale = torch.randint(120, 132, (n, k // 32), device="cuda", generator=random).to(torch.uint8)
        return QuantizedTensor(fmt, packed, scale, None, (n, k), torch.bfloat16)
    exponents = torch.randint(-2, 3, (n, k // 16), device="cuda", generator=random)
    scale = 2.0**exponents if is_exact else torch.rand(n, k // 16, device="cuda", generator=random) * 448
    scale[0, 0] = 0.0
    global_scale = torch.tensor(1.0 if is_exact else 0.0123, device="cuda")
    return QuantizedTensor(fmt, packed, scale.to(torch.float8_e4m3fn), global_scale, (n, k), torch.bfloat16)


def expected(x: Tensor, q: QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    y = x.double() @ q.dequantize(torch.float32).double().T
    return y if bias is None else y + bias.double()


def poison(num_elements: int, dtype: torch.dtype) -> None:
    """Leaves NaN where the next allocation of that size is likely to be."""
    torch.full((num_elements,), float("nan"), dtype=dtype, device="cuda")


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_agrees_with_float64(tiling: Tiling, m: int, n: int, k: int) -> None:
    for fmt, dtype in itertools.product((NVFP4, MXFP4), (torch.bfloat16, torch.float16)):
        q = weight(n, k, fmt)
        tiles = to_fragments(row_major(q))
        wide = torch.full((m, k + 16), float("nan"), dtype=dtype, device="cuda")  # rows of x lie apart, NaN between
        x = wide[:, 8 : k + 8].normal_()
        bias = torch.randn(n, device="cuda", dtype=dtype if m % 2 else torch.float32)
        poison(m * n, dtype)
        y, reference = linear(x, tiles, bias, tiling=tiling), expected(x, q, bias)
        # rounding of y, and of fp32 sums of k products
        unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
        magnitude = x.double().abs() @ q.dequantize(torch.float32).double().abs().T
        bound = unit * reference.abs() + k * 2.0**-23 * magnitude + 2.0**-24
        assert ((y.double() - reference).abs() <= bound).all()


@pytest.mark.parametrize("tiling", TILINGS)
def test_exact_where_sums_are_exact(tiling: Tiling) -> None:
    q = weight(512, 1024, is_exact=True)
    x = torch.randint(-2, 3, (200, 1024), device="cuda").bfloat16()
    assert torch.equal(linear(x, to_fragments(row_major(q)), tiling=tiling), expected(x, q).bfloat16())


@pytest.mark.parametrize("tiling", TILINGS)
def test_split_tiles_do_not_depend_on_timing(tiling: Tiling) -> None:
    q = weight(640, 4096)
    tiles, x = to_fragments(row_major(q)), torch.randn(tiling.tokens, 4096, device="cuda").bfloat16()
    assert plan(len(x), 640, 4096, describe(x.device), tiling).is_split
    first = linear(x, tiles, tiling=tiling)
    for _ in range(100):
        assert torch.equal(linear(x, tiles, tiling=tiling), first)


def test_a_graph_replays_the_same() -> None:
    q = weight(640, 4096)
    tiles, x = to_fragments(row_major(q)), torch.randn(128, 4096, device="cuda").bfloat16()
    first = linear(x, tiles)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(x, tiles)
    for _ in range(1000):
        graph.replay()
    assert torch.equal(y, first)


def test_nan_and_infinity_go_where_a_product_takes_them() -> None:
    q = weight(256, 256)
    x = torch.randn(70, 256, device="cuda").bfloat16()
    x[3, 7], x[68, 250] = float("nan"), float("inf")
    y, plain = linear(x, to_fragments(row_major(q))), x @ q.dequantize(torch.bfloat16).T
    assert torch.equal(y.isnan(), plain.isnan())
    assert torch.equal(y.isinf(), plain.isinf())


def test_batches_and_no_rows() -> None:
    q = weight(96, 128)
    tiles, x = to_fragments(row_major(q)), torch.randn(3, 50, 128, device="cuda").bfloat16()
    flat = linear(x.reshape(150, 128), tiles)
    assert torch.equal(linear(x, tiles), flat.view(3, 50, 96))
    swapped = x.transpose(0, 1)
    assert torch.equal(linear(swapped, tiles), linear(swapped.contiguous(), tiles))
    assert linear(x[:0], tiles).shape == (0, 50, 96)
