"""The CPU's activation quantizer: the bytes of formats/, at every instruction set of this machine. Needs a compiler."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.formats.spec import NVFP4
from blockscale.formats.tensor import encode
from blockscale.kernels.cpu.library import Level, can_run
from blockscale.kernels.cpu.quantize import amax, quantize_nvfp4
from blockscale.kernels.reference import quantize as reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(params=Level, ids=lambda level: level.value)
def level(request: pytest.FixtureRequest) -> Level:
    if not can_run(request.param):
        pytest.skip(f"this machine lacks {request.param.value}")
    return request.param


def assert_same(x: Tensor, global_scale: Tensor | None, level: Level | None) -> None:
    for found, expected in zip(
        quantize_nvfp4(x, global_scale, level=level), reference.quantize_nvfp4(x, global_scale)[:3], strict=True
    ):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        bits = torch.int32 if found.dtype == torch.float32 else torch.uint8
        assert torch.equal(found.view(bits), expected.view(bits))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bytes_of_the_format(level: Level, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for m, k in ((1, 16), (3, 176), (17, 640)):
        binades = torch.randint(-12, 13, (m, k // 16, 1), generator=generator).float()
        x = (torch.randn(m, k // 16, 16, generator=generator) * torch.exp2(binades)).view(m, k).to(dtype)
        assert_same(x, None, level)
        assert_same(x, torch.tensor(0.0037), level)
        q = encode(x, NVFP4)
        packed, block_scale, global_scale = quantize_nvfp4(x, level=level)
        assert torch.equal(packed, q.packed)
        assert torch.equal(block_scale.view(torch.uint8), q.block_scale.view(torch.uint8))
        assert torch.equal(global_scale, q.global_scale)


def test_every_bf16_number(level: Level) -> None:
    """Each of the 65536, NaN and Inf too, as a block's largest and among zeros; ties of e2m1 and e4m3 among them."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    x = torch.zeros(2**15 // 16, 32, 16, dtype=torch.bfloat16)
    x[..., 3] = every.view(-1, 32)
    x[..., 7] = every.view(-1, 32).flip(0)
    for scale in (1.0, 2.0**-10, 3e-39, 1e30):
        assert_same(x.view(-1, 512), torch.tensor(scale), level)


def test_ties_go_to_the_even_code(level: Level) -> None:
    """6 in each block makes its scale 1, so that the others meet the halfway points as they are."""
    halves = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -0.0])
    packed, _, _ = quantize_nvfp4(halves.view(1, 16), torch.tensor(1.0), level=level)
    codes = [code for byte in packed[0].tolist() for code in (byte & 15, byte >> 4)]
    assert codes == [7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14, 0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=16, max_size=16),
    st.floats(width=32, min_value=2.0**-140, max_value=2.0**100),
)
def test_any_block_and_any_static_scale(block: list[float], scale: float) -> None:
    assert_same(torch.tensor(block).view(1, 16), torch.tensor(scale), None)


def test_empty_zero_and_batched(level: Level) -> None:
    assert_same(torch.zeros(2, 32), None, level)
    assert_same(torch.empty(0, 32), None, level)
    assert_same(torch.randn(2, 3, 64), None, level)
    assert_same(torch.randn(4, 200)[:, 8:136], None, level)


def test_amax(level: Level) -> None:
    for dtype in DTYPES:
        x = torch.randn(9, 80).to(dtype)
        assert amax(x, level=level) == x.abs().amax().float()
        largest = x.abs().amax().float()
        x[3, 79], x[8, 0] = -torch.inf, torch.nan
        x[0, 0] = largest
        assert amax(x, level=level) == largest
    assert amax(torch.empty(0, 16), level=level) == 0


def test_threads_change_no_byte() -> None:
    x = torch.randn(64, 256)
    before = torch.get_num_threads()
    expected = quantize_nvfp4(x)
    try:
        torch.set_num_threads(2)
        for _ in range(5):
            for a, b in zip(quantize_nvfp4(x), expected, strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.dim() else a == b
    finally:
        torch.set_num_threads(before)


def test_what_cannot_be_quantized() -> None:
    for bad in (torch.randn(2, 24), torch.tensor(1.0), torch.randn(2, 0), torch.randn(2, 16).double()):
        with pytest.raises(FormatError, match="quantize_nvfp4"):
            quantize_nvfp4(bad)
    with pytest.raises(FormatError, match="global_scale"):
        quantize_nvfp4(torch.randn(2, 16), torch.ones(2))
