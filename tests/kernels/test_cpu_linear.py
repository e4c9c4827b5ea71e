"""The CPU's linears against float64, at every instruction set that this machine has. Needs a C compiler.

A sum of K products in fp32, in any order, is off by at most K * 2^-23 of the sum of their magnitudes.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockscale.errors import FormatError, UsageError
from blockscale.formats import mx, nvfp4
from blockscale.formats.packing import unpack_nibbles
from blockscale.formats.spec import E2M1, MXFP4, NVFP4, Format
from blockscale.formats.tensor import QuantizedTensor, encode
from blockscale.kernels.cpu.layout import from_groups, group_bytes
from blockscale.kernels.cpu.library import DTYPE_CODES, FORMAT_CODES, Level, Linear, can_run, library
from blockscale.kernels.cpu.linear import Activations, linear, linear_int8, linear_w4a4, prepare
from blockscale.kernels.prepare import Layout, PreparedWeight, row_major
from blockscale.kernels.reference import linear as reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMATS = (NVFP4, MXFP4)
EPSILON = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}  # half a unit in the last place
SUBNORMAL = {torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25, torch.float32: 2.0**-150}
ONE = {NVFP4: 56, MXFP4: 127}  # the byte of a scale of 1


@pytest.fixture(params=Level, ids=lambda level: level.value)
def level(request: pytest.FixtureRequest) -> Level:
    if not can_run(request.param):
        pytest.skip(f"this machine lacks {request.param.value}")
    return request.param


def weight_of(packed: Tensor, scale: Tensor, global_scale: float, fmt: Format) -> PreparedWeight:
    n, half = packed.shape
    if fmt == NVFP4:
        scale = scale.view(torch.float8_e4m3fn)
    scalar = torch.tensor(global_scale) if fmt == NVFP4 else None
    return row_major(QuantizedTensor(fmt, packed, scale, scalar, (n, 2 * half), torch.bfloat16))


def random_weight(n: int, k: int, fmt: Format, seed: int = 0) -> PreparedWeight:
    """All codes, scales over some binades, NVFP4's with subnormals."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    low, high = (1, 80) if fmt == NVFP4 else (120, 130)
    scale = torch.randint(low, high, (n, k // fmt.block_size), dtype=torch.uint8, generator=generator)
    return weight_of(packed, scale, 0.375, fmt)


def values(weight: PreparedWeight) -> Tensor:
    """fp64 [N, K] of a row-major weight, global scale included."""
    if weight.format == NVFP4:
        plain = nvfp4.decode_unscaled(weight.packed, weight.block_scale.view(torch.float8_e4m3fn))
    else:
        plain = mx.decode_codes(unpack_nibbles(weight.packed), weight.block_scale, E2M1)
    return plain.double() * weight.global_scale.double()


def randn(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(y: Tensor, exact: Tensor, summed: Tensor) -> None:
    """`summed`: what may have been lost before the rounding to y's dtype."""
    allowed = summed + (exact.abs() + summed) * EPSILON[y.dtype] + SUBNORMAL[y.dtype]
    excess = (y.double() - exact).abs() - allowed
    assert excess.max() <= 0, f"off by {(y.double() - exact).abs().max()} where {allowed.max()} is explained"


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 64), (1, 45, 96), (3, 1, 32), (8, 33, 160), (21, 50, 224)])
def test_exact_products(level: Level, fmt: Format, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    weight, x, bias = random_weight(n, k, fmt), randn(m, k, dtype=dtype), randn(n, dtype=dtype, seed=2)
    w = values(weight)
    y = linear(x, prepare(weight), bias, level=level)
    exact = x.double() @ w.T + bias.double()
    magnitudes = x.double().abs() @ w.abs().T + bias.double().abs()
    assert y.dtype == dtype
    assert_near(y, exact, magnitudes * (k + 2) * 2.0**-23)


@pytest.mark.parametrize("k", [16, 48, 80])
def test_blocks_that_do_not_fill_a_tile(level: Level, k: int) -> None:
    weight, x = random_weight(20, k, NVFP4), randn(5, k, dtype=torch.float32)
    w = values(weight)
    for y in (linear(x, prepare(weight), level=level), linear_int8(x, prepare(weight), level=level)):
        steps = x.double().unflatten(-1, (-1, 16)).abs().amax(-1) / 127  # int8 is off by half a step; exact by less
        lost = (steps * 0.5001) @ w.abs().unflatten(-1, (-1, 16)).sum(-1).T + x.double().abs() @ w.abs().T * k * 2**-22
        assert_near(y, x.double() @ w.T, lost)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_representable_inputs_give_every_bit(level: Level, fmt: Format, dtype: torch.dtype) -> None:
    """Small whole activations, scales that are powers of two: no sum rounds, so every bit is known."""
    n, k = 40, 288
    generator = torch.Generator().manual_seed(3)
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    powers = torch.randint(-2, 2, (n, k // fmt.block_size), generator=generator)
    scale = (ONE[fmt] + (8 if fmt == NVFP4 else 1) * powers).to(torch.uint8)
    weight = weight_of(packed, scale, 0.125, fmt)
    bias = torch.randint(-8, 9, (n,), generator=generator).to(dtype)
    for m in (1, 2, 3, 4, 5, 6, 7, 8, 13):
        x = torch.randint(-3, 4, (m, k), generator=generator).to(dtype)
        expected = (x.double() @ values(weight).T + bias.double()).to(dtype)
        assert torch.equal(linear(x, prepare(weight), bias, level=level), expected)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_int8_is_off_by_what_its_steps_explain(level: Level, fmt: Format) -> None:
    n, k, size = 37, 416, fmt.block_size
    weight = random_weight(n, k, fmt)
    w = values(weight)
    x = randn(11, k, dtype=torch.float32) * torch.logspace(-30, 30, 11).unsqueeze(1)
    y = linear_int8(x, prepare(weight), level=level)
    step = x.double().unflatten(-1, (-1, size)).abs().amax(-1) / 127
    lost = (step * 0.5001) @ w.abs().unflatten(-1, (-1, size)).sum(-1).T
    assert_near(y, x.double() @ w.T, lost + x.double().abs() @ w.abs().T * k * 2.0**-22)


def test_int8_is_exact_on_its_own_grid(level: Level) -> None:
    """Blocks of whole numbers whose largest is 127 are not rounded."""
    weight = weight_of(torch.randint(0, 256, (24, 64), dtype=torch.uint8), torch.full((24, 8), 56).byte(), 1.0, NVFP4)
    x = torch.randint(-127, 128, (4, 128)).float()
    x[:, ::16] = 127
    assert torch.equal(linear_int8(x, prepare(weight), level=level), (x.double() @ values(weight).T).float())


@pytest.mark.parametrize("run", [linear, linear_int8])
def test_not_a_number_and_infinity_go_through(level: Level, run: Callable[..., Tensor]) -> None:
    weight = random_weight(32, 128, NVFP4)
    for dtype in DTYPES:
        x = randn(6, 128, dtype=dtype)
        x[1, 5], x[2, 100], x[3, 7], x[4, 3], x[4, 90] = torch.nan, torch.inf, -torch.inf, torch.inf, -torch.inf
        y = run(x, prepare(weight), level=level)
        expected = (x.double() @ values(weight).T).to(dtype)
        assert torch.equal(torch.isnan(y), torch.isnan(expected))
        assert torch.equal(y[torch.isinf(expected)], expected[torch.isinf(expected)])
        assert torch.isinf(expected).any()
        alone = run(x[[0, 5]], prepare(weight), level=level)
        assert torch.equal(y[[0, 5]], alone)  # a bad row leaves its neighbours as they are


def test_scales_of_zero_and_nan(level: Level) -> None:
    """0x7F is NaN in its row alone; 0 and 0x80 give zeros; a negative scale negates."""
    weight = random_weight(20, 96, NVFP4)
    scale = weight.block_scale.clone()
    scale[0], scale[1, 2], scale[2, 1], scale[3] = 0, 0x7F, 0x80, scale[3] | 0x80
    weight = replace(weight, block_scale=scale)
    x = randn(3, 96, dtype=torch.float32)
    y, w = linear(x, prepare(weight), level=level), values(weight)
    assert (y[:, 0] == 0).all()
    assert torch.isnan(y).any(0).tolist() == [i == 1 for i in range(20)]
    keep = [0, *range(2, 20)]
    assert_near(y[:, keep], x.double() @ w[keep].T, x.double().abs() @ w[keep].abs().T * 98 * 2.0**-23)


def test_scales_of_mxfp4_at_the_ends(level: Level) -> None:
    """2^-127 is a subnormal of fp32, 255 is NaN."""
    weight = random_weight(18, 64, MXFP4)
    scale = weight.block_scale.clone()
    scale[0], scale[1, 0], scale[2], scale[3] = 0, 255, 1, 254
    weight = replace(weight, block_scale=scale)
    x = torch.full((2, 64), 2.0**20)
    y, w = linear(x, prepare(weight), level=level), values(weight)
    assert torch.isnan(y).any(0).tolist() == [i == 1 for i in range(18)]
    assert y[:, 0].abs().max() > 0
    rows = [0, 2]  # row 3 overflows
    assert_near(y[:, rows], x.double() @ w[rows].T, x.double().abs() @ w[rows].abs().T * 66 * 2.0**-23)


def test_zero_rows_and_no_rows(level: Level) -> None:
    weight = prepare(random_weight(32, 64, NVFP4))
    for run in (linear, linear_int8, linear_w4a4):
        assert (run(torch.zeros(3, 64), weight, level=level) == 0).all()
        assert run(torch.empty(0, 64), weight, level=level).shape == (0, 32)
        assert run(torch.empty(2, 0, 64), weight, level=level).shape == (2, 0, 32)


def test_w4a4_multiplies_the_bytes_of_the_format(level: Level) -> None:
    """Block sums are exact, so what remains is the order of at most K/16 fp32 additions."""
    n, k = 35, 352
    weight = random_weight(n, k, NVFP4)
    for dtype in DTYPES:
        x = randn(9, k, dtype=dtype)
        for scale in (None, torch.tensor(2.0**-7)):
            q = encode(x, NVFP4, global_scale=scale)
            decoded = nvfp4.decode_unscaled(q.packed, q.block_scale).double() * q.global_scale.double()
            w = values(weight)
            y = linear_w4a4(x, prepare(weight), input_global_scale=scale, level=level)
            assert_near(y, decoded @ w.T, decoded.abs() @ w.abs().T * (k / 16 + 4) * 2.0**-23)


def test_w4a4_carries_not_a_number(level: Level) -> None:
    weight, x = random_weight(16, 64, NVFP4), randn(3, 64, dtype=torch.float32)
    x[1, 20], x[2, 3] = torch.nan, torch.inf
    for scale in (None, torch.tensor(0.01)):
        y = linear_w4a4(x, prepare(weight), input_global_scale=scale, level=level)
        assert torch.isnan(y).all(-1).tolist() == [False, True, True]
        assert not torch.isnan(y[0]).any()


@pytest.mark.parametrize("run", [linear, linear_int8, linear_w4a4])
def test_threads_and_batches_change_no_byte(level: Level, run: Callable[..., Tensor]) -> None:
    weight, x = prepare(random_weight(520, 576, NVFP4)), randn(37, 576, dtype=torch.bfloat16)
    options = {"input_global_scale": torch.tensor(0.002)} if run is linear_w4a4 else {}
    whole = run(x, weight, level=level, **options)
    alone = torch.cat([run(x[i : i + 1], weight, level=level, **options) for i in range(0, 37, 4)])
    assert torch.equal(whole[::4], alone)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert all(torch.equal(run(x, weight, level=level, **options), whole) for _ in range(5))
        assert all(torch.equal(run(x[:2], weight, level=level, **options), whole[:2]) for _ in range(5))
    finally:
        torch.set_num_threads(before)


def test_a_narrow_weight_shares_out_the_rows_of_x(level: Level) -> None:
    weight, x = random_weight(5, 1024, NVFP4), randn(200, 1024, dtype=torch.float32)
    once = linear(x, prepare(weight), level=level)
    assert_near(once, x.double() @ values(weight).T, x.double().abs() @ values(weight).abs().T * 1026 * 2.0**-23)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(linear(x, prepare(weight), level=level), once)
    finally:
        torch.set_num_threads(before)


def test_callers_at_the_same_time() -> None:
    weight, x = prepare(random_weight(512, 512, NVFP4)), randn(4, 512, dtype=torch.bfloat16)
    expected = linear(x, weight)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda _: linear(x, weight), range(30)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(y, expected) for y in found)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_process_has_threads_of_its_own() -> None:
    weight, x = prepare(random_weight(512, 512, NVFP4)), randn(2, 512, dtype=torch.bfloat16)
    y, call = torch.empty(2, 512, dtype=torch.bfloat16), raw_call(x, weight, torch.empty(2, 512, dtype=torch.bfloat16))
    call.y, call.threads = y.data_ptr(), 3
    built = library()
    assert built is not None
    assert built.blockscale_linear(byref(call)) == 0
    expected = y.view(torch.int16).tolist()
    child = os.fork()
    if child == 0:  # nothing but C: a fork of torch's own threads is not under test
        y.fill_(0)
        right = built.blockscale_linear(byref(call)) == 0 and y.view(torch.int16).tolist() == expected
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def raw_call(x: Tensor, weight: PreparedWeight, y: Tensor) -> Linear:
    return Linear(
        groups=weight.packed.data_ptr(),
        x=x.data_ptr(),
        y=y.data_ptr(),
        n=weight.n,
        k=weight.k,
        m=x.shape[0],
        x_stride=x.stride(0),
        global_scale=float(weight.global_scale),
        x_global_scale=1.0,
        format=FORMAT_CODES[weight.format],
        dtype=DTYPE_CODES[x.dtype],
        activation=Activations.EXACT.value,
        threads=1,
    )


def test_nothing_is_written_outside_the_result(level: Level) -> None:
    built = library()
    assert built is not None
    for n in (1, 15, 17, 33):
        weight, x = prepare(random_weight(n, 80, NVFP4)), randn(3, 80, dtype=torch.float16)
        memory = torch.full((3 * n + 64,), 0x7F7F, dtype=torch.int16)
        y = memory[32 : 32 + 3 * n]
        call = raw_call(x, weight, y.view(torch.float16))
        call.level = level.value.encode()
        assert built.blockscale_linear(byref(call)) == 0
        assert torch.equal(y.view(torch.float16).view(3, n), linear(x, weight, level=level))
        assert (memory[:32] == 0x7F7F).all()
        assert (memory[32 + 3 * n :] == 0x7F7F).all()


def test_batched_and_strided_activations() -> None:
    weight = prepare(random_weight(48, 96, NVFP4))
    x = randn(4, 3, 200, dtype=torch.bfloat16)[..., 50:146]
    assert torch.equal(linear(x, weight), linear(x.contiguous(), weight))
    turned = randn(96, 5, dtype=torch.bfloat16).T
    assert torch.equal(linear_int8(turned, weight), linear_int8(turned.contiguous(), weight))
    assert linear(x[0, 0], weight).shape == (48,)
    bias = torch.randn(96)[::2]
    assert torch.equal(linear(x, weight, bias), linear(x, weight, bias.contiguous()))


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 40), blocks=st.integers(1, 9), fmt=st.sampled_from(FORMATS), seed=st.integers(0, 999))
def test_the_layout_keeps_the_values(n: int, blocks: int, fmt: Format, seed: int) -> None:
    weight = random_weight(n, blocks * fmt.block_size, fmt, seed)
    prepared = prepare(weight)
    back = from_groups(prepared)
    assert prepared.packed.shape == (-(-n // 16), group_bytes(fmt, weight.k))
    assert torch.equal(values(back), values(weight))
    assert torch.equal(back.packed, weight.packed)


def test_the_layout_keeps_every_scale() -> None:
    for fmt, count in ((NVFP4, 256), (MXFP4, 256)):
        codes = torch.full((count, fmt.block_size // 2), 0xA7, dtype=torch.uint8)
        weight = weight_of(codes, torch.arange(count, dtype=torch.uint8).view(-1, 1), 1.0, fmt)
        assert torch.equal(values(from_groups(prepare(weight))).nan_to_num(9e9), values(weight).nan_to_num(9e9))
    size = library().blockscale_group_bytes  # type: ignore[union-attr]
    assert all(size(FORMAT_CODES[f], k) == group_bytes(f, k) for f in FORMATS for k in range(32, 700, 32))


def test_operands_that_do_not_fit() -> None:
    weight = prepare(random_weight(32, 64, NVFP4))
    x = torch.randn(2, 64)
    for bad in (torch.randn(2, 48), x.double(), torch.zeros(2, 64, dtype=torch.int32), torch.tensor(1.0)):
        for run in (linear, linear_int8, linear_w4a4):
            with pytest.raises(FormatError, match="linear"):
                run(bad, weight)
    with pytest.raises(FormatError, match="bias"):
        linear(x, weight, torch.randn(31))
    with pytest.raises(FormatError, match="devices"):
        linear(torch.randn(2, 64, device="meta"), weight)
    with pytest.raises(FormatError, match="the weight"):
        linear(x, replace(weight, shape=(64, 64)))
    with pytest.raises(FormatError, match="strides"):
        linear(x, replace(weight, packed=torch.cat([weight.packed] * 2, 1)[:, ::2]))
    with pytest.raises(FormatError, match="layout"):
        linear(x, replace(weight, layout=Layout.FRAGMENTS))
    with pytest.raises(FormatError, match="mxfp4"):
        linear_w4a4(x, prepare(random_weight(32, 64, MXFP4)))
    with pytest.raises(FormatError, match="global_scale"):
        linear_w4a4(x, weight, input_global_scale=torch.ones(2))
    stack = row_major(encode(torch.randn(2, 16, 32), NVFP4))
    with pytest.raises(FormatError, match="cannot lay out"):
        prepare(stack)


def test_a_level_that_the_processor_lacks_is_refused() -> None:
    lacking = [level for level in Level if not can_run(level)]
    weight, x = prepare(random_weight(16, 64, NVFP4)), torch.randn(1, 64)
    for level in lacking:
        with pytest.raises(UsageError, match=level.value):
            linear(x, weight, level=level)
    built = library()
    assert built is not None
    assert built.blockscale_level(b"sse9") is None


def test_a_row_major_weight_goes_through_torch() -> None:
    weight, x = random_weight(16, 64, NVFP4), torch.randn(3, 64)
    assert torch.equal(linear(x, weight), reference.linear_w4a16(x, weight))
    assert torch.equal(linear_w4a4(x, weight), reference.linear_w4a4(x, weight))
