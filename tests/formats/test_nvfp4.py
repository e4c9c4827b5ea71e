"""NVFP4, byte for byte."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockscale.errors import NonFiniteError
from blockscale.formats.error import sqnr
from blockscale.formats.minifloat import decode_table
from blockscale.formats.nvfp4 import (
    MIN_BLOCK_SCALE,
    block_scale_from_amax,
    decode_packed,
    decode_unscaled,
    global_scale_from_amax,
)
from blockscale.formats.packing import pack_nibbles, unpack_nibbles
from blockscale.formats.spec import E2M1, NVFP4, NVFP4_BLOCK32, Format
from blockscale.formats.tensor import decode, encode

from . import golden
from .exact import magnitudes
from .strategies import tensors

ZERO_CASES = ["all_zero_bf16", "all_zero_fp32", "neg_zero_fp32"]
FINITE_CASES = [case for case in golden.cases("nvfp4_modelopt") if case not in ZERO_CASES]
SUBNORMAL_GLOBAL_SCALE = {"tiny_1e-38_fp32", "tiny_1e-40_fp32", "tiny_1e-43_fp32"}


def as_bytes(t: Tensor) -> Tensor:
    return t.view(torch.uint8)


def exact_values(packed: Tensor, block_scale: Tensor, global_scale: Tensor) -> Tensor:
    """float64: code value * block scale * global scale. 2 + 4 + 24 significant bits: exact."""
    codes = unpack_nibbles(packed)
    signed = torch.cat([magnitudes(E2M1), -magnitudes(E2M1)])[codes.int()]
    block_size = codes.shape[-1] // block_scale.shape[-1]
    return signed * block_scale.double().repeat_interleave(block_size, -1) * global_scale.double()


def test_there_are_enough_cases() -> None:
    assert len(FINITE_CASES) == 37
    assert {golden.source(case).dtype for case in FINITE_CASES} == {torch.bfloat16, torch.float16, torch.float32}


@pytest.mark.parametrize("case", FINITE_CASES)
def test_bytes_of_model_optimizer(case: str) -> None:
    theirs = golden.load("nvfp4_modelopt")
    q = encode(golden.source(case), NVFP4)
    assert torch.equal(q.packed, theirs[f"{case}/packed"])
    assert q.block_scale.dtype == torch.float8_e4m3fn
    assert torch.equal(as_bytes(q.block_scale), as_bytes(theirs[f"{case}/weight_scale"]))
    assert q.global_scale is not None
    assert q.global_scale.dtype == torch.float32
    assert q.global_scale.shape == ()
    assert torch.equal(q.global_scale, theirs[f"{case}/weight_scale_2"])


@pytest.mark.parametrize("case", FINITE_CASES)
def test_values_of_model_optimizer(case: str) -> None:
    theirs = golden.load("nvfp4_modelopt")[f"{case}/dequant_fp32"]
    q = encode(golden.source(case), NVFP4)
    # They round scale * global_scale first: two roundings, each half a unit, against our one.
    assert ((decode(q) - theirs).abs() <= theirs.abs() * 2.0**-22 + 4 * 2.0**-149).all()


@pytest.mark.parametrize("case", FINITE_CASES)
def test_decode_rounds_once(case: str) -> None:
    q = encode(golden.source(case), NVFP4)
    assert q.global_scale is not None
    assert torch.equal(decode(q), exact_values(q.packed, q.block_scale, q.global_scale).float())


@pytest.mark.parametrize("case", ZERO_CASES)
def test_zero_tensor_has_finite_scales_and_zero_codes(case: str) -> None:
    q = encode(golden.source(case), NVFP4)
    assert not q.packed.any()
    assert (q.block_scale.float() == 1).all()
    assert q.global_scale == 1
    assert torch.equal(decode(q), torch.zeros(q.shape))
    # what it is not: Model Optimizer 0.47.0 writes NaN scales here
    assert golden.load("nvfp4_modelopt")[f"{case}/weight_scale"].float().isnan().all()


def test_zero_block_among_others_has_scale_one() -> None:
    x = golden.source("zero_blocks_fp32")
    q = encode(x, NVFP4)
    is_zero = x.unflatten(-1, (-1, 16)).abs().amax(-1) == 0
    assert is_zero.any()
    assert not is_zero.all()
    assert (q.block_scale.float()[is_zero] == 1).all()
    assert not q.packed.unflatten(-1, (-1, 8))[is_zero].any()


@pytest.mark.parametrize(
    ("case", "position"), [("special_inf_fp32", r"inf at \[0, 3\]"), ("special_nan_fp32", r"nan at \[1, 5\]")]
)
def test_non_finite_input_is_named_with_its_position(case: str, position: str) -> None:
    with pytest.raises(NonFiniteError, match=rf"layers\.0\.weight: {position}"):
        encode(golden.source(case), NVFP4, name="layers.0.weight")


def test_global_scale_that_underflows_leaves_finite_values() -> None:
    x = golden.source("tiny_1e-43_fp32")
    q = encode(x, NVFP4)
    assert q.global_scale == 0  # 1e-43 / 2688 lies below the smallest fp32 subnormal
    assert not q.block_scale.float().isnan().any()
    assert not decode(q).any()


def test_zero_block_beside_a_global_scale_that_underflows() -> None:
    q = encode(torch.tensor([[1e-43] * 16 + [0.0] * 16]), NVFP4)
    assert q.block_scale.float().tolist() == [[448.0, 1.0]]
    assert not decode(q).any()


@pytest.mark.parametrize("case", golden.cases("nvfp4_compressed_tensors"))
def test_decodes_compressed_tensors(case: str) -> None:
    theirs = golden.load("nvfp4_compressed_tensors")
    global_scale = 1 / theirs[f"{case}/weight_global_scale"][0]  # they store the divisor
    values = decode_packed(theirs[f"{case}/weight_packed"], theirs[f"{case}/weight_scale"], global_scale)
    assert torch.equal(values.bfloat16(), theirs[f"{case}/dequant_bf16"])


@pytest.mark.parametrize(
    "case",
    # The 4x24 and 4x40 inputs are padded there and refused here; a subnormal amax / 1536 has lost its digits.
    sorted(
        set(golden.cases("nvfp4_fouroversix_mse")) - SUBNORMAL_GLOBAL_SCALE - {"shape_4x24_bf16", "shape_4x40_fp32"}
    ),
)
def test_decodes_four_over_six(case: str) -> None:
    theirs = golden.load("nvfp4_fouroversix_mse")
    global_scale = theirs[f"{case}/amax"] / (6 * 256)
    values = decode_packed(theirs[f"{case}/packed"], theirs[f"{case}/weight_scale"], global_scale)
    expected = theirs[f"{case}/dequant_fp32"]
    # amax / 1536 is one rounding, the product another; they multiply by amax and divide last
    assert ((values - expected).abs() <= expected.abs() * 2.0**-22).all()


def test_element_times_block_scale_is_exact_in_bf16() -> None:
    block_scale = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).unsqueeze(-1)  # [256, 1]
    packed = pack_nibbles(torch.arange(16, dtype=torch.uint8)).expand(256, 8)  # all 16 codes in each block
    is_nan = block_scale.flatten().float().isnan()
    assert is_nan.sum() == 2
    values = decode_unscaled(packed, block_scale)[~is_nan]
    signed = torch.cat([magnitudes(E2M1), -magnitudes(E2M1)])
    assert torch.equal(values.double(), block_scale.double()[~is_nan] * signed)
    assert torch.equal(values.bfloat16().float(), values)


def test_decode_unscaled_of_every_byte() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(32, 8)
    one = torch.ones(32, 1).to(torch.float8_e4m3fn)
    assert torch.equal(decode_unscaled(packed, one), decode_table(E2M1)[unpack_nibbles(packed).long()])


@pytest.mark.parametrize("fmt", [NVFP4, NVFP4_BLOCK32], ids=lambda f: f.name)
@settings(max_examples=40, deadline=None)
@given(x=tensors())
def test_every_code_is_the_nearest(fmt: Format, x: Tensor) -> None:
    q = encode(x, fmt)
    assert q.global_scale is not None
    step = q.block_scale.double().repeat_interleave(fmt.block_size, -1) * q.global_scale.double()
    distance = (x.double().abs().unsqueeze(-1) - magnitudes(E2M1) * step.unsqueeze(-1)).abs()
    chosen = distance.gather(-1, (unpack_nibbles(q.packed) & 7).long().unsqueeze(-1)).squeeze(-1)
    # The step and the quotient are rounded to fp32: a near tie may fall the other way by two units of that.
    assert (chosen - distance.amin(-1) <= x.double().abs() * 2.0**-22).all()


@settings(max_examples=40, deadline=None)
@given(x=tensors())
def test_block_scale_is_the_e4m3_nearest_to_its_definition(x: Tensor) -> None:
    q = encode(x, NVFP4)
    amax = x.double().abs().unflatten(-1, (-1, 16)).amax(-1)
    wanted = (amax / 6 * (2688 / amax.max())).nan_to_num(0).clamp(MIN_BLOCK_SCALE, 448)
    wanted = torch.where(amax == 0, 1.0, wanted)
    table = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    nearest = (wanted.unsqueeze(-1) - table).abs().amin(-1)
    assert ((wanted - q.block_scale.double()).abs() - nearest <= wanted * 2.0**-21).all()


@settings(max_examples=25, deadline=None)
@given(x=tensors(), exponent=st.integers(1, 6))
def test_shared_global_scale_moves_into_the_block_scales(x: Tensor, exponent: int) -> None:
    alone = encode(x, NVFP4)
    assert alone.global_scale is not None
    shared = encode(x, NVFP4, global_scale=alone.global_scale * 2.0**exponent)
    smaller = alone.block_scale.float() * 2.0**-exponent
    is_normal = (smaller >= 2.0**-6) & (x.abs().unflatten(-1, (-1, 16)).amax(-1) > 0)
    assert torch.equal(shared.block_scale.float()[is_normal], smaller[is_normal])
    assert torch.equal(
        decode(shared).unflatten(-1, (-1, 16))[is_normal], decode(alone).unflatten(-1, (-1, 16))[is_normal]
    )


def test_block_scale_is_clamped_to_e4m3() -> None:
    amax = torch.tensor([0.0, 1e-9, 6.0, 1e9])
    scale = block_scale_from_amax(amax, torch.tensor(1.0))
    assert scale.float().tolist() == [1.0, 2.0**-9, 1.0, 448.0]
    # a quotient that underflows to 0 counts as a zero block; Model Optimizer replaces 0 before it clamps
    assert block_scale_from_amax(torch.tensor([1e-45]), torch.tensor(1.0)).float().tolist() == [1.0]


def test_global_scale_by_hand() -> None:
    assert global_scale_from_amax(torch.tensor(2688.0)) == 1
    assert global_scale_from_amax(torch.tensor(0.0)) == 1
    assert global_scale_from_amax(torch.tensor(1.0, dtype=torch.bfloat16)) == torch.tensor(1.0) / 2688


def test_block_of_the_docs() -> None:
    """The worked example in docs/concepts/number-format.md."""
    x = torch.zeros(2, 16)
    x[0, 3] = 0.42
    x[1] = torch.tensor(
        [
            0.1,
            -0.05,
            0.012,
            0.003,
            -0.021,
            0.034,
            -0.0625,
            0,
            0.008,
            -0.0015,
            0.044,
            -0.09,
            0.017,
            0.027,
            -0.003,
            0.0715,
        ]
    )
    q = encode(x, NVFP4)
    assert q.global_scale is not None
    assert float(q.global_scale) == pytest.approx(0.00015625)
    assert q.block_scale.float().flatten().tolist() == [448.0, 104.0]
    assert as_bytes(q.block_scale)[1, 0] == 0x6D
    codes = [7, 13, 1, 0, 11, 4, 14, 0, 1, 8, 5, 15, 2, 3, 8, 6]
    assert unpack_nibbles(q.packed[1]).tolist() == codes
    assert bytes(q.packed[1].tolist()).hex(" ").upper() == "D7 01 4B 0E 81 F5 32 68"
    step = 0.01625
    values = [6, -3, 0.5, 0, -1.5, 2, -4, 0, 0.5, -0.0, 3, -6, 1, 1.5, -0.0, 4]
    assert decode(q)[1].tolist() == pytest.approx([v * step for v in values])
    assert sqnr(x[1], decode(q)[1]) == pytest.approx(22.5, abs=0.05)


def test_one_block_by_hand() -> None:
    # amax 5.25, so the global scale is 5.25/2688 = 2^-9 and the block scale 448: a step of 7/8.
    x = torch.tensor([[0.875, -5.25, 0.4, -0.2, 3.0, 1.75, 0, 2.625, -1.3125, 4.375, 0.65625, 0, 0, 0, 0, 0.21875]])
    q = encode(x, NVFP4)
    assert q.global_scale == 2.0**-9
    assert q.block_scale.float().tolist() == [[448.0]]
    codes = [2, 15, 1, 8, 5, 4, 0, 5, 11, 6, 2, 0, 0, 0, 0, 0]
    assert unpack_nibbles(q.packed).tolist() == [codes]
    assert q.packed.tolist() == [[0xF2, 0x81, 0x45, 0x50, 0x6B, 0x02, 0x00, 0x00]]
    e2m1 = [1, -6, 0.5, -0.0, 3, 2, 0, 3, -1.5, 4, 1, 0, 0, 0, 0, 0]
    assert decode(q).tolist() == [[v * 0.875 for v in e2m1]]
