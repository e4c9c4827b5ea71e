"""Activation quantizer, in Triton's interpreter, against `formats`: the same bytes."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from blockscale.algorithms.four_over_six import four_or_six_block_scale
from blockscale.errors import FormatError
from blockscale.formats import nvfp4
from blockscale.formats.layout import swizzle
from blockscale.formats.tensor import FLOAT_DTYPES
from blockscale.kernels.triton import quantize as compiled_quantize
from tests.kernels.interpreter import interpreted

kernels = interpreted("blockscale.kernels.triton.quantize")

ALL_BITS16 = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16))


def expected(x: Tensor, global_scale: Tensor, four_over_six: bool = False) -> tuple[Tensor, Tensor]:
    if four_over_six:
        block_scale = four_or_six_block_scale(x, global_scale)
    else:
        block_scale = nvfp4.block_scale_from_amax(nvfp4.block_amax(x), global_scale)
    return nvfp4.encode_packed(x, block_scale, global_scale), block_scale


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    assert got[0].shape == want[0].shape
    assert got[1].shape == want[1].shape
    assert got[1].dtype == torch.float8_e4m3fn
    assert torch.equal(got[1].view(torch.uint8), want[1].view(torch.uint8))
    assert torch.equal(got[0], want[0])


def sample(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0, seed: int = 0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return x.to(dtype)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("four_over_six", [False, True])
@pytest.mark.parametrize("shape", [(1, 16), (3, 5, 272)])
def test_bytes_are_those_of_formats(dtype: torch.dtype, four_over_six: bool, shape: tuple[int, ...]) -> None:
    x = sample(*shape, dtype=dtype)
    for factor in (1.0, 0.2, 100.0):  # also clipped, and lost in E4M3's subnormals
        scale = nvfp4.global_scale_from_amax(x.abs().amax(), 6 * 256.0) * factor
        got = kernels.quantize(x, scale, four_over_six=four_over_six)
        assert_same(got, expected(x, scale, four_over_six))


@pytest.mark.parametrize(
    ("dtype", "exponents"),
    [
        # the branches with and without division, and both ends between them
        (torch.bfloat16, (-140, -24.5, -24, -12.3, 0, 8, 8.5, 60, 120)),
        (torch.float16, (-24.5, -24, 0, 60.5)),
    ],
)
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_every_finite_number_of_16_bits(dtype: torch.dtype, exponents: tuple[float, ...], is_shuffled: bool) -> None:
    x = ALL_BITS16.view(dtype)
    x = x[x.isfinite()]
    if is_shuffled:
        x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))]
    x = x[: len(x) // 16 * 16]
    for exponent in exponents:
        scale = torch.tensor(2.0**exponent)
        assert_same(kernels.quantize(x, scale), expected(x, scale))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_ties_go_to_even(dtype: torch.dtype) -> None:
    """Elements at, just below and just above every rounding boundary of steps that the dtype holds exactly."""
    boundaries = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    steps = torch.tensor([1.0, 0.75, 1.25, 1.5]).repeat_interleave(4)  # block scales: amax / 6
    ulp = torch.finfo(dtype).eps
    rows = []
    for step, shift in itertools.product(steps[::4].tolist(), (-1, 0, 1)):
        near = (boundaries * step).to(dtype) * (1 + shift * ulp)
        row = torch.cat([near, -near, torch.tensor([6.0 * step, -0.0])])
        rows.append(row.to(dtype))
    x = torch.stack(rows)  # [12, 16]
    for scale in (torch.tensor(1.0), torch.tensor(2.0**-10), torch.tensor(0.3)):
        assert_same(kernels.quantize(x, scale), expected(x, scale))
    codes = kernels.quantize(x[1:2], torch.tensor(1.0))[0]
    assert codes.tolist() == expected(x[1:2], torch.tensor(1.0))[0].tolist()
    assert codes[0, 0].item() == 0x20  # .25 -> 0, .75 -> 1 (code 2)


def test_signs_of_zeros() -> None:
    """-0 loses its sign, and a negative number that rounds to zero keeps it."""
    x = torch.zeros(1, 16, dtype=torch.bfloat16)
    x[0, :4] = torch.tensor([6.0, -0.0, -1e-30, 1e-30])
    for scale in (torch.tensor(1.0), torch.tensor(2.0**20)):
        packed, block_scale = kernels.quantize(x, scale)
        assert_same((packed, block_scale), expected(x, scale))
        assert packed[0, 0].item() >> 4 == 0
        assert packed[0, 1].item() & 0xF == 8


@pytest.mark.parametrize("shape", [(2, 3, 80), (130, 64)])
def test_swizzled_scales_with_zero_padding(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "empty_outputs", poisoned_outputs)
    x, scale = sample(*shape), torch.tensor(1e-3)
    packed, block_scale = kernels.quantize(x, scale, swizzled=True)
    want_packed, want_scale = expected(x, scale)
    assert_same((packed, block_scale), (want_packed, swizzle(want_scale.flatten(0, -2))))


def poisoned_outputs(shape: tuple[int, ...], device: torch.device, swizzled: bool = False) -> tuple[Tensor, Tensor]:
    outputs = compiled_quantize.empty_outputs(shape, device, swizzled)
    for output in outputs:
        output.view(torch.uint8).fill_(0x7F)
    return outputs


def test_strided_rows() -> None:
    wide, scale = sample(6, 160), torch.tensor(1e-3)
    narrow = wide[::2, 16:128]
    assert_same(kernels.quantize(narrow, scale), expected(narrow.contiguous(), scale))
    across = wide.t()[:16].t()  # its rows are contiguous only after a copy
    columns = wide[:, ::2]
    repeated = wide[:1].expand(3, 160)
    for x in (across, columns, repeated):
        assert_same(kernels.quantize(x, scale), expected(x.contiguous(), scale))


def test_rows_too_far_apart_for_32_bits_are_copied() -> None:
    far = torch.empty_strided((2, 32), (compiled_quantize.FAR, 1), dtype=torch.bfloat16, device="meta")
    assert compiled_quantize.near_rows(far).stride() == (32, 1)
    near = torch.empty_strided((2, 32), (compiled_quantize.FAR - 1, 1), dtype=torch.bfloat16, device="meta")
    assert compiled_quantize.near_rows(near) is near


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("num_blocks", [1, 128, 129, 256, 1153])
def test_contiguous_tensors_of_any_length(dtype: torch.dtype, num_blocks: int) -> None:
    """Whole and broken tiles, fewer and more than programs, begun at a word and between two."""
    x, scale = sample(16 * num_blocks + 1, dtype=dtype), torch.tensor(1e-3)
    for part in (x[:-1], x[1:]):
        assert_same(kernels.quantize(part, scale), expected(part, scale))
        assert_same(kernels.quantize_dynamic(part)[:2], expected(part, kernels.quantize_dynamic(part)[2]))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_dynamic_scale(dtype: torch.dtype) -> None:
    x = sample(5, 48, dtype=dtype, scale=3.0)
    packed, block_scale, global_scale = kernels.quantize_dynamic(x)
    assert global_scale.shape == ()
    assert torch.equal(global_scale, nvfp4.global_scale_from_amax(x.abs().amax()))
    assert_same((packed, block_scale), expected(x, global_scale))
    _, _, with_headroom = kernels.quantize_dynamic(x, four_over_six=True)
    assert torch.equal(with_headroom, nvfp4.global_scale_from_amax(x.abs().amax(), 6 * 256.0))


def test_dynamic_scale_of_a_view_and_of_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "AMAX_BLOCKS", 4)
    monkeypatch.setattr(kernels, "_FEW", 8)
    monkeypatch.setattr(kernels, "_MANY", 32)
    x = sample(7, 528)
    x[6, 527] = 77.0
    view = x[:, 16:]
    packed, block_scale, global_scale = kernels.quantize_dynamic(view)
    assert torch.equal(global_scale, nvfp4.global_scale_from_amax(torch.tensor(77.0)))
    assert_same((packed, block_scale), expected(view.contiguous(), global_scale))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("scale", [1e-3, 2.0**30])
def test_what_is_not_finite_becomes_nan_and_stays_in_its_block(bad: float, scale: float) -> None:
    x, global_scale = sample(2, 64), torch.tensor(scale)
    x[1, 20] = bad
    packed, block_scale = kernels.quantize(x, global_scale)
    assert block_scale.view(torch.uint8)[1, 1].item() == 0x7F
    assert (packed[1, 8:16] == 0x77).all()
    decoded = nvfp4.decode_packed(packed, block_scale, global_scale)
    assert decoded.isnan().nonzero().tolist() == [[1, i] for i in range(16, 32)]
    rest = x.clone()
    rest[1, 16:32] = 0
    want_packed, _ = expected(rest, global_scale)
    want_packed[1, 8:16] = 0x77
    assert torch.equal(packed, want_packed)
    _, _, dynamic = kernels.quantize_dynamic(x)
    assert dynamic == nvfp4.global_scale_from_amax(x[x.isfinite()].abs().amax())


@pytest.mark.parametrize("scale", [0.0, float("nan"), float("inf"), -1.0, 2.0**-149])
def test_odd_global_scales_give_what_formats_gives(scale: float) -> None:
    x, global_scale = sample(2, 32), torch.tensor(scale)
    x[0, :16] = 0
    assert_same(kernels.quantize(x, global_scale), expected(x, global_scale))


def test_zeros() -> None:
    x = torch.zeros(3, 32, dtype=torch.bfloat16)
    packed, block_scale, global_scale = kernels.quantize_dynamic(x)
    assert global_scale == 1
    assert (packed == 0).all()
    assert (block_scale.float() == 1).all()


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16)
    packed, block_scale, global_scale = kernels.quantize_dynamic(x)
    assert packed.shape == (*shape[:-1], 32)
    assert block_scale.shape == (*shape[:-1], 4)
    assert global_scale == 1
    assert kernels.quantize(x, torch.tensor(1.0), swizzled=True)[1].shape == (0,)


@pytest.mark.parametrize(
    ("x", "scale", "message"),
    [
        (torch.zeros(2, 24), torch.tensor(1.0), "24"),
        (torch.zeros(2, 0), torch.tensor(1.0), "= 0"),
        (torch.zeros(2, 32, dtype=torch.int32), torch.tensor(1.0), "int32"),
        (torch.tensor(1.0), torch.tensor(1.0), "x is"),
        (torch.zeros(2, 32), torch.ones(2), "global_scale"),
        (torch.zeros(2, 32), torch.tensor(1.0, dtype=torch.float64), "float64"),
        (torch.zeros(2, 32), torch.ones((), device="meta"), "different devices"),
    ],
)
def test_operands_that_do_not_fit(x: Tensor, scale: Tensor, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        kernels.quantize(x, scale)
    assert caught.value.hint


def test_a_compiled_kernel_refuses_a_tensor_on_the_cpu() -> None:
    with pytest.raises(FormatError, match="x is on cpu"):
        compiled_quantize.quantize(torch.zeros(2, 32), torch.tensor(1.0))
