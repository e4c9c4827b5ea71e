"""The linear for a few rows: its configurations and refusals without a GPU, its results with one of compute 9.0."""

import dataclasses
import random

import pytest
import torch

from blockscale.errors import FormatError
from blockscale.formats.spec import MXFP4, NVFP4, Format
from blockscale.formats.tensor import QuantizedTensor, decode, encode
from blockscale.kernels.cuda import linear_small
from blockscale.kernels.cuda.linear_small import MAX_ROWS, configure, linear
from blockscale.kernels.device import Device
from blockscale.kernels.layouts import padded_shape, tiles_shape, to_fragments
from blockscale.kernels.prepare import PreparedWeight, row_major

H200 = Device("cuda", (9, 0), "H200", 132, 232448, 50 << 20)
H20 = dataclasses.replace(H200, name="H20", num_sms=78)
SHAPES = (
    (57344, 8192), (8192, 28672), (28672, 4096), (8192, 8192), (4096, 14336), (4096, 4096),
    (1, 16), (100, 53248), (128256, 2048), (262144, 3072), (2880, 2880), (77, 2064), (16384, 53248),
)  # fmt: skip

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no GPU of compute 9.0"
)


@pytest.mark.parametrize("device", [H200, H20], ids=lambda d: d.name)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_shape_has_a_configuration_that_fits(n, k, device):
    for m in range(1, MAX_ROWS + 1):
        c = configure(m, n, k, device)
        assert c.shared_bytes(m, n, k) <= device.shared_memory_bytes // c.blocks_per_sm
        assert 8 * (c.column_blocks - 1) < m <= 8 * c.column_blocks
        assert 1 <= c.split <= c.num_steps(k)
        assert c.cluster in (1, c.split) or (c.split == 1 and c.groups % c.cluster == 0)
        assert c.split * c.groups <= device.num_sms * c.blocks_per_sm or c.groups == c.cluster
        assert tiles_shape(n, k)[1] % c.column_units == 0
        assert c.num_tiles(n) * c.epilogue_warps <= padded_shape(n, k)[0] // 16  # counters that the weight brings


@pytest.mark.parametrize(("n", "k"), SHAPES[:6])
def test_shapes_of_models_keep_every_multiprocessor_busy(n, k):
    for m in (1, 8, 16, 32):
        c = configure(m, n, k, H200)
        work = c.num_tiles(n) * c.split
        rounds = c.tiles_per_block(n)
        assert work / (rounds * H200.num_sms * c.blocks_per_sm) > 0.8


def _weight(n: int, k: int, fmt: Format = NVFP4, device: str = "cpu") -> PreparedWeight:
    return to_fragments(row_major(encode(torch.randn(n, k, device=device), fmt)))


def test_operands_that_would_be_misread_are_refused():
    weight = _weight(32, 64)
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    with pytest.raises(FormatError, match="row_major"):
        linear(x, row_major(encode(torch.randn(32, 64), NVFP4)))
    with pytest.raises(FormatError, match=r"\[3, 32, 64\]"):
        linear(x, to_fragments(row_major(encode(torch.randn(3, 32, 64), NVFP4))))
    with pytest.raises(FormatError, match="float32"):
        linear(x.float(), weight)
    with pytest.raises(FormatError, match=r"\[2, 32\]"):
        linear(x[:, :32], weight)
    with pytest.raises(FormatError, match="bias"):
        linear(x, weight, torch.zeros(31, dtype=torch.bfloat16))
    with pytest.raises(FormatError, match=r"9\.0") as error:
        linear(x, weight)
    assert error.value.hint


def test_rows_that_begin_at_odd_addresses_are_copied():
    x = torch.zeros(4, 72, dtype=torch.bfloat16)
    assert linear_small._aligned_rows(x).data_ptr() == x.data_ptr()
    assert linear_small._aligned_rows(x[:, 8:]).data_ptr() == x[:, 8:].data_ptr()
    for y in (x[:, 1:65], torch.zeros(4, 68, dtype=torch.bfloat16)[:, :64], x.T[:64, :2].T):
        aligned = linear_small._aligned_rows(y)
        assert aligned.data_ptr() % 16 == 0
        assert aligned.stride(0) % 8 == 0
        assert aligned.stride(1) == 1
        assert torch.equal(aligned, y)


# ---- with a GPU


def _exact(n: int, k: int, fmt: Format, g: torch.Generator) -> QuantizedTensor:
    """A weight whose products with small integers, and their sums, are fp32 numbers."""
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda", generator=g)
    if fmt is MXFP4:
        scale = torch.randint(126, 129, (n, k // 32), dtype=torch.uint8, device="cuda", generator=g)
        return QuantizedTensor(fmt, packed, scale, None, (n, k), torch.bfloat16)
    choice = torch.tensor([0, 0x30, 0x38, 0x40], dtype=torch.uint8, device="cuda")
    scale = choice[torch.randint(0, 4, (n, k // 16), device="cuda", generator=g)].view(torch.float8_e4m3fn)
    return QuantizedTensor(fmt, packed, scale, torch.tensor(0.25, device="cuda"), (n, k), torch.bfloat16)


@needs_hopper
@pytest.mark.parametrize("seed", range(40))
def test_exactly_representable_products_are_exact(seed):
    rnd, g = random.Random(seed), torch.Generator("cuda").manual_seed(seed)
    fmt, dtype = rnd.choice((NVFP4, MXFP4)), rnd.choice((torch.bfloat16, torch.float16))
    n, m = rnd.choice((1, 16, 31, 100, 513, 4096)), rnd.choice((1, 2, 5, 8, 9, 16, 17, 24, 31, 33, 64))
    k = rnd.choice((32, 96, 416, 1024, 2880, 6144)) + (16 if fmt is NVFP4 and rnd.random() < 0.3 else 0)
    q = _exact(n, k, fmt, g)
    around = torch.full((m, k + 24), torch.nan, dtype=dtype, device="cuda")  # what lies beside x must not be read
    x = around[:, 8 : 8 + k]
    x.copy_(torch.randint(-2, 3, (m, k), device="cuda", generator=g))
    bias = torch.randint(-4, 5, (n,), device="cuda", generator=g).to(rnd.choice((dtype, torch.float32)))
    expected = (x.double() @ decode(q).double().T + bias).to(dtype)
    for is_programmatic in (False, True):
        torch.full((m, n), torch.nan, dtype=dtype, device="cuda")  # poisons what y is likely to be given
        y = linear(x, to_fragments(row_major(q)), bias, is_programmatic=is_programmatic)
        assert torch.equal(y, expected)


@needs_hopper
@pytest.mark.parametrize("m", [1, 7, 16, 29])
def test_every_split_gives_the_exact_result(m):
    n, k = 192, 2800
    q = _exact(n, k, NVFP4, torch.Generator("cuda").manual_seed(m))
    weight = to_fragments(row_major(q))
    x = torch.randint(-2, 3, (m, k), device="cuda").bfloat16()
    expected = (x.double() @ decode(q).double().T).bfloat16()
    for shape in linear_small._SHAPES[-(-m // 8)]:
        for split, cluster in linear_small._SPLITS[:8]:
            c = linear_small.configuration(shape, split, cluster, m, n, H200)
            if c is None or not linear_small.fits(c, m, n, k, H200):
                continue
            y = torch.full((m, n), torch.nan, dtype=torch.bfloat16, device="cuda")
            linear_small.run(c, x, weight, None, y)
            assert torch.equal(y, expected), c
            assert not weight.block_scale.any(), c


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_errors_are_those_of_fp32_sums_and_one_rounding(dtype):
    q = encode(torch.randn(1000, 4096, device="cuda"), NVFP4)
    x = torch.randn(13, 4096, dtype=dtype, device="cuda")
    w = decode(q).double()
    expected = x.double() @ w.T
    # 4096 / 16 instructions and 17 addends each, every addend cut at 2^-24 of the largest; then half a unit of y
    sums = (x.double().abs() @ w.abs().T) * 256 * 17 * 2.0**-24 / 16
    bound = sums + expected.abs() * torch.finfo(dtype).eps / 2
    assert torch.all((linear(x, to_fragments(row_major(q))).double() - expected).abs() <= bound)


@needs_hopper
def test_batches_strides_and_no_rows():
    q = _exact(96, 128, NVFP4, torch.Generator("cuda").manual_seed(1))
    weight = to_fragments(row_major(q))
    x = torch.randint(-2, 3, (2, 3, 128), device="cuda").bfloat16()
    expected = (x.double() @ decode(q).double().T).bfloat16()
    assert torch.equal(linear(x, weight), expected)
    assert torch.equal(linear(x.transpose(0, 1), weight), expected.transpose(0, 1))
    assert torch.equal(linear(x.flip(-1).flip(-1)[0, 0], weight), expected[0, 0])
    assert linear(x[:0], weight).shape == (0, 3, 96)


@needs_hopper
def test_what_is_not_finite_stays_in_its_row():
    q = encode(torch.randn(64, 256, device="cuda"), NVFP4)
    weight = to_fragments(row_major(q))
    x = torch.randn(6, 256, dtype=torch.bfloat16, device="cuda")
    y = linear(x, weight)
    x[1, 3], x[4, 200] = torch.nan, torch.inf
    z = linear(x, weight)
    assert z[1].isnan().all()
    assert torch.equal(z[4].isnan(), (x[4:5].double() @ decode(q).double().T)[0].isnan())
    assert not z[4].isfinite().any()
    keep = [0, 2, 3, 5]
    assert torch.equal(z[keep], y[keep])


@needs_hopper
def test_a_thousand_replays_of_a_graph_are_identical():
    for m, n, k in ((1, 4096, 4096), (8, 1024, 28672), (16, 4096, 14336)):
        weight = _weight(n, k, NVFP4, "cuda")
        x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
        first = linear(x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = linear(x, weight, is_programmatic=False)
            y = linear(x, weight)
        differing = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            y.fill_(torch.nan)
            graph.replay()
            differing += (y != first).sum()
        assert int(differing) == 0
