"""Sharing a global scale: exact where E4M3 can say so, else within half a step of codes."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from blockscale.conversion.repair.rescale import Rescaled, ScaledWeight, fill_range, share_global_scale
from blockscale.formats.nvfp4 import decode_packed

from .stored import MAX_SCALE_BYTE, decode, same_bits, scales_of, steps, values, weights

NORMAL = 8  # E4M3's smallest normal number, 2^-6


def as_divisor(weight: ScaledWeight) -> ScaledWeight:
    return replace(weight, global_scale=weight.global_scale.reciprocal().reshape(1), is_divisor=True)


def exact_values(weight: ScaledWeight, shared: torch.Tensor) -> torch.Tensor:
    """Codes and block scales in units of 1 / (old divisor * new divisor), or as products: integers that fp64 holds."""
    other = shared if weight.is_divisor else torch.ones(1)
    factor = other.double() if weight.is_divisor else weight.global_scale.double()
    return values(weight.packed, weight.block_scale) * factor


def assert_exact(before: ScaledWeight, result: Rescaled) -> None:
    after = result.weight
    first = exact_values(before, after.global_scale)
    second = exact_values(after, before.global_scale)
    assert same_bits(first, second)
    assert result.squared_error == 0
    assert result.num_inexact == 0
    assert result.relative_error == 0


@given(weights(), st.booleans())
def test_members_that_agree_stay_as_they_are(weight: ScaledWeight, is_divisor: bool) -> None:
    weight = as_divisor(weight) if is_divisor else weight
    other = replace(weight, packed=weight.packed.flip(0))
    results = share_global_scale([weight, other])
    assert results[0].weight is weight
    assert results[1].weight is other


@given(weights(smallest=NORMAL + 40), weights(smallest=NORMAL + 40), st.integers(-5, 5), st.booleans())
def test_powers_of_two_are_exact(first: ScaledWeight, second: ScaledWeight, power: int, is_divisor: bool) -> None:
    """Scales from 2^-1 up have room for 2^-5 without a subnormal number."""
    second = replace(second, global_scale=first.global_scale * 2.0**power)
    members = [as_divisor(m) if is_divisor else m for m in (first, second)]
    results = share_global_scale(members)
    assert len({r.weight.global_scale.item() for r in results}) == 1
    for before, result in zip(members, results, strict=True):
        assert_exact(before, result)


@given(weights(), weights(), st.booleans())
def test_any_ratio_stays_within_half_a_step(first: ScaledWeight, second: ScaledWeight, is_divisor: bool) -> None:
    members = [as_divisor(m) if is_divisor else m for m in (first, second)]
    results = share_global_scale(members)
    assert same_bits(results[0].weight.global_scale, results[1].weight.global_scale)
    for before, result in zip(members, results, strict=True):
        assert result.weight.block_scale.view(torch.uint8).max() <= MAX_SCALE_BYTE
        right, found = decode(before), decode(result.weight)
        smallest = 2.0**-9 * result.weight.multiplier
        # the gap between codes is 2 steps at most; a step moves by 1/16, or to the smallest that E4M3 has
        slack = torch.maximum(steps(before) * (1 + 1 / 16), torch.full_like(right, 3 * smallest))
        assert ((found - right).abs() <= slack + 1e-12 * right.abs()).all()
        assert not ((right != 0) & (found != 0) & (right.sign() != found.sign())).any()
        norm = right.norm().item()
        relative = (found - right).norm().item() / norm if norm else 0.0
        assert math.isclose(result.relative_error, relative, rel_tol=1e-6, abs_tol=1e-12)


@given(weights(smallest=NORMAL + 40, largest=MAX_SCALE_BYTE), st.floats(1.0, 4.0, width=32))
def test_normal_scales_round_by_a_sixteenth_and_keep_their_codes(weight: ScaledWeight, ratio: float) -> None:
    wide = replace(weight, global_scale=weight.global_scale * ratio)
    assume(torch.isfinite(wide.global_scale))
    narrow, same = share_global_scale([weight, wide])
    assert same_bits(narrow.weight.packed, weight.packed)
    old, new = steps(weight), steps(narrow.weight)
    assert ((new - old).abs() <= old / 16 * (1 + 1e-9)).all()
    assert narrow.relative_error <= 1 / 16
    assert same.squared_error == 0


def test_other_ratios_are_exact_where_e4m3_can_say_so() -> None:
    """Two thirds of 1.5, 3 and 384 are E4M3 numbers; of 1 and 1.25 not."""
    packed = torch.full((1, 40), 0x72, dtype=torch.uint8)
    narrow = ScaledWeight(packed, scales_of([0x3C, 0x44, 0x7C, 0x38, 0x3A]).view(1, 5), torch.tensor(0.25))
    wide = ScaledWeight(packed, scales_of([0x7E] * 5).view(1, 5), torch.tensor(0.375))
    result, same = share_global_scale([narrow, wide])
    assert (decode(narrow) == decode(result.weight)).view(5, 16).all(-1).tolist() == [True] * 3 + [False] * 2
    assert result.num_inexact == 2
    assert result.weight.block_scale.float().tolist() == [[1.0, 2.0, 256.0, 0.6875, 0.8125]]
    assert_exact(wide, same)


def test_room_above_is_used_before_anything_is_lost() -> None:
    """Block scales far below 448 under a large global scale: in its own units, the other's would be subnormal."""
    packed = torch.full((1, 16), 0x72, dtype=torch.uint8)
    wide = ScaledWeight(packed, scales_of([0x08, 0x09]).view(1, 2), torch.tensor(1.0))  # 2^-6: 15 binades of room
    narrow = ScaledWeight(packed, scales_of([0x7E, 0x61]).view(1, 2), torch.tensor(2.0**-12))
    for before, result in zip([wide, narrow], share_global_scale([wide, narrow]), strict=True):
        assert_exact(before, result)


def test_a_member_of_zeros_takes_the_others_scale() -> None:
    zeros = ScaledWeight(
        torch.full((1, 16), 0x80, dtype=torch.uint8), scales_of([0x38] * 2).view(1, 2), torch.tensor(1.0)
    )
    small = ScaledWeight(
        torch.full((1, 16), 0x72, dtype=torch.uint8), scales_of([0x7E, 1]).view(1, 2), torch.tensor(1e-6)
    )
    results = share_global_scale([zeros, small])
    assert [r.weight.global_scale.item() for r in results] == [small.global_scale.item()] * 2
    assert same_bits(results[1].weight.block_scale, small.block_scale)
    assert same_bits(results[0].weight.packed, zeros.packed)
    assert same_bits(results[0].weight.block_scale, zeros.block_scale)
    assert all(r.relative_error == 0 for r in results)


def test_blocks_that_underflow_keep_the_smallest_scale() -> None:
    packed = torch.full((1, 16), 0x77, dtype=torch.uint8)
    narrow = ScaledWeight(packed, scales_of([0x38, 0x7E]).view(1, 2), torch.tensor(2.0**-20))
    wide = ScaledWeight(packed, scales_of([0x7E, 0x7E]).view(1, 2), torch.tensor(1.0))
    result = share_global_scale([narrow, wide])[0]
    assert result.weight.block_scale.view(torch.uint8).tolist() == [[1, 1]]
    assert result.num_inexact == 2
    assert 0 < result.relative_error <= 1


def test_an_underflow_that_would_saturate_takes_the_scale_above() -> None:
    """1.4 of the smallest step: at 1 the largest code is short by a third, at 2 no code is off by more than a step."""
    packed = torch.full((1, 8), 0x77, dtype=torch.uint8)
    narrow = ScaledWeight(packed, scales_of([0x7E]).view(1, 1), torch.tensor(1.4 * 2.0**-9 / 448))
    wide = ScaledWeight(packed, scales_of([0x7E]).view(1, 1), torch.tensor(1.0))
    result = share_global_scale([narrow, wide])[0]
    assert result.weight.block_scale.view(torch.uint8).tolist() == [[2]]
    assert result.relative_error < 0.06


@given(weights(smallest=0), st.booleans())
def test_filling_the_range_changes_no_value(weight: ScaledWeight, is_divisor: bool) -> None:
    weight = as_divisor(weight) if is_divisor else weight
    filled = fill_range(weight)
    assert same_bits(decode(filled), decode(weight))
    used = (decode(weight).unflatten(-1, (-1, 16)) != 0).any(-1)
    if used.any():
        assert 224 < filled.block_scale.float()[used].amax() <= 448
    assert same_bits(filled.block_scale[~used], weight.block_scale[~used])
    assert same_bits(filled.packed, weight.packed)


@pytest.mark.parametrize("is_divisor", [False, True])
def test_one_level_of_scales_becomes_two(is_divisor: bool) -> None:
    """Global scale 1 over subnormal block scales: the largest fills E4M3, and none is subnormal that need not be."""
    scale = scales_of([1, 2, 3, 4, 5, 6, 7, 7]).view(1, 8)
    weight = ScaledWeight(torch.full((1, 64), 0x52, dtype=torch.uint8), scale, torch.tensor([1.0]), is_divisor)
    filled = fill_range(weight)
    assert same_bits(decode(filled), decode(weight))
    assert (filled.block_scale.view(torch.uint8) >= NORMAL).all()


def test_a_global_scale_stays_a_normal_number() -> None:
    weight = ScaledWeight(
        torch.full((1, 8), 0x22, dtype=torch.uint8), scales_of([1]).view(1, 1), torch.tensor(2.0**-125)
    )
    filled = fill_range(weight)
    assert filled.global_scale.item() == 2.0**-126
    assert filled.block_scale.float().item() == 2.0**-8


def test_16_bit_global_scales_keep_their_dtype() -> None:
    packed = torch.full((1, 8), 0x22, dtype=torch.uint8)
    first = ScaledWeight(packed, scales_of([0x38]).view(1, 1), torch.tensor(0.5, dtype=torch.bfloat16))
    second = replace(first, global_scale=torch.tensor(0.25, dtype=torch.bfloat16))
    results = share_global_scale([first, second])
    assert [r.weight.global_scale.dtype for r in results] == [torch.bfloat16] * 2
    for before, result in zip((first, second), results, strict=True):
        assert_exact(before, result)


def test_slices_of_rows_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(6)
    packed = torch.randint(256, (40, 32), dtype=torch.uint8, generator=generator)
    scale = torch.randint(1, 127, (40, 4), dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)
    members = [ScaledWeight(packed, scale, torch.tensor(0.01)), ScaledWeight(packed, scale, torch.tensor(0.013))]
    whole = share_global_scale(members)
    monkeypatch.setattr("blockscale.conversion.repair.rescale._SLICE_ELEMENTS", 192)
    sliced = share_global_scale(members)
    for first, second in zip(whole, sliced, strict=True):
        assert same_bits(first.weight.packed, second.weight.packed)
        assert same_bits(first.weight.block_scale, second.weight.block_scale)
        assert math.isclose(first.squared_error, second.squared_error, rel_tol=1e-12)
        assert first.num_inexact == second.num_inexact


def test_the_package_reads_the_same_values() -> None:
    """fp32 decoding of an exact rescale is bit for bit what it was."""
    generator = torch.Generator().manual_seed(7)
    packed = torch.randint(256, (8, 32), dtype=torch.uint8, generator=generator)
    scale = torch.randint(64, 127, (8, 4), dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)
    members = [ScaledWeight(packed, scale, torch.tensor(0.0123)), ScaledWeight(packed, scale, torch.tensor(0.0123) * 4)]
    for before, result in zip(members, share_global_scale(members), strict=True):
        after = result.weight
        assert same_bits(
            decode_packed(after.packed, after.block_scale, after.global_scale),
            decode_packed(before.packed, before.block_scale, before.global_scale),
        )
