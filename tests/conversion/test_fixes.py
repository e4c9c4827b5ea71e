"""Each fix gives back, bit for bit, what the fault took away."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockscale.conversion.repair import fixes
from blockscale.conversion.repair.rescale import ScaledWeight
from blockscale.errors import FormatError
from blockscale.formats.layout import swizzle

from .stored import E2M1, decode, multipliers, same_bits, scales_of, values, weights

SIGN = torch.tensor([0x80, 0], dtype=torch.uint8)


@given(weights(smallest=0), st.lists(st.booleans(), min_size=6, max_size=6))
def test_signs_of_block_scales_go_into_the_codes(weight: ScaledWeight, is_negative: list[bool]) -> None:
    bits = weight.block_scale.view(torch.uint8) | SIGN[[0 if n else 1 for n in is_negative]].view(2, 3)
    signed = bits.view(torch.float8_e4m3fn)
    packed, scale = fixes.unsign_block_scales(weight.packed, signed)
    assert same_bits(values(packed, scale), values(weight.packed, signed))  # the sign of zeros too
    assert not (scale.view(torch.uint8) & 0x80).any()


def test_blocks_without_a_sign_keep_their_bytes() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(2, 128)
    scale = scales_of([i % 127 for i in range(32)]).view(2, 16)
    assert same_bits(fixes.unsign_block_scales(packed, scale)[0], packed)
    assert same_bits(fixes.unsign_block_scales(packed, scale)[1], scale)


@given(weights(), st.booleans())
def test_the_sign_of_a_global_scale_goes_into_the_codes(weight: ScaledWeight, is_divisor: bool) -> None:
    negative = ScaledWeight(weight.packed, weight.block_scale, -weight.global_scale, is_divisor)
    packed, scale = fixes.unsign_global_scale(negative.packed, negative.global_scale)
    fixed = ScaledWeight(packed, weight.block_scale, scale, is_divisor)
    assert same_bits(decode(fixed), decode(negative))
    assert scale > 0
    assert same_bits(fixes.unsign_global_scale(weight.packed, weight.global_scale)[0], weight.packed)


def test_the_sign_of_an_fp8_scale_goes_into_the_codes() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(16, 16)
    packed, scale = fixes.unsign_global_scale(codes, torch.tensor([-0.3]))
    is_number = ~codes.float().isnan()
    assert same_bits((packed.double() * scale.double())[is_number], (codes.double() * -scale.double())[is_number])
    assert torch.equal(packed.float().isnan(), ~is_number)
    assert same_bits(fixes.unsign_global_scale(codes, scale)[0], codes)


def test_nibbles_change_places() -> None:
    packed = torch.arange(256, dtype=torch.uint8)
    swapped = torch.tensor([(byte % 16) * 16 + byte // 16 for byte in range(256)], dtype=torch.uint8)
    assert same_bits(fixes.swap_nibbles(swapped), packed)


def offset(row: int, col: int, cols: int) -> int:
    """Of a scale in the tensor core's order, from the formula."""
    num_col_tiles = -(-cols // 4)
    tile = (row // 128) * num_col_tiles + col // 4
    return tile * 512 + (row % 32) * 16 + ((row % 128) // 32) * 4 + col % 4


@pytest.mark.parametrize("shape", [(128, 4), (256, 8), (64, 8), (100, 5), (130, 2), (3, 1)])
def test_swizzled_scales_come_back_in_row_order(shape: tuple[int, int]) -> None:
    rows, cols = shape
    padded = (-(-rows // 128) * 128, -(-cols // 4) * 4)
    stored = torch.zeros(padded[0] * padded[1], dtype=torch.uint8)
    right = torch.randint(1, 127, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    for row in range(rows):
        for col in range(cols):
            stored[offset(row, col, cols)] = right[row, col]
    swizzled = stored.view(padded).view(torch.float8_e4m3fn)
    found = fixes.unswizzle_scales(swizzled, rows, cols)
    assert same_bits(found, right.view(torch.float8_e4m3fn))
    assert fixes.has_swizzled_zero_padding(swizzled, rows, cols)
    if padded != shape:
        assert not fixes.has_zero_padding(swizzled, rows, cols)


def test_stacks_of_swizzled_scales() -> None:
    right = torch.randint(1, 127, (3, 96, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    stored = torch.stack([swizzle(tile).view(128, 8) for tile in right])
    assert same_bits(fixes.unswizzle_scales(stored, 96, 6), right)


def test_padded_rows_are_cut_off() -> None:
    right = torch.randint(1, 127, (64, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    stored = torch.zeros(128, 8, dtype=torch.uint8)
    stored[:64, :6] = right
    assert fixes.has_zero_padding(stored, 64, 6)
    assert not fixes.has_swizzled_zero_padding(stored, 64, 6)
    assert same_bits(fixes.crop_scales(stored, 64, 6), right)


def test_scales_that_do_not_fit_are_refused() -> None:
    with pytest.raises(FormatError, match="no padded"):
        fixes.crop_scales(torch.zeros(64, 4, dtype=torch.uint8), 64, 6)
    with pytest.raises(FormatError, match="1-byte entries"):
        fixes.unswizzle_scales(torch.zeros(64, 4, dtype=torch.uint8), 64, 6)


def test_zeros_that_became_nan() -> None:
    packed, nan = torch.full((4, 32), 0x77, dtype=torch.uint8), scales_of([0xFF] * 16).view(4, 4)
    assert fixes.is_zero_as_nan(nan, torch.tensor(0.0))
    assert not fixes.is_zero_as_nan(nan, torch.tensor(1.0))
    assert not fixes.is_zero_as_nan(scales_of([0xFF] * 15 + [1]).view(4, 4), torch.tensor(0.0))
    fixed = ScaledWeight(*fixes.zero_weight(packed, nan, torch.tensor([0.0])))
    assert same_bits(decode(fixed), torch.zeros(4, 64, dtype=torch.float64))
    assert fixed.global_scale.tolist() == [1.0]
    assert fixed.block_scale.float().unique().tolist() == [1.0]


@given(multipliers())
def test_a_reversed_scale_is_within_an_ulp(value: float) -> None:
    right = torch.tensor(value, dtype=torch.float32)
    found = fixes.reverse(fixes.reverse(right))
    assert abs(found.view(torch.int32).item() - right.view(torch.int32).item()) <= 1


def test_a_power_of_two_is_reversed_exactly() -> None:
    assert fixes.reverse(torch.tensor([0.25])).tolist() == [4.0]


def test_the_widest_scale_keeps_its_bytes() -> None:
    scales = [torch.tensor(v) for v in (0.1, 0.3, 0.2)]
    assert fixes.widest(scales, is_divisor=False) is scales[1]
    assert fixes.widest(scales, is_divisor=True) is scales[0]


@pytest.mark.parametrize(
    ("value", "is_usable"),
    [(1.0, True), (2.0**-126, True), (0.0, False), (-1.0, False), (1e-40, False), (3e38, False), (float("inf"), False),
     (float("nan"), False)],
)  # fmt: skip
def test_usable_scales(value: float, is_usable: bool) -> None:
    assert fixes.is_usable(torch.tensor([value])) == is_usable


def test_the_table_of_codes() -> None:
    """The tests' own decoding is that of the format."""
    from blockscale.formats.minifloat import decode_table
    from blockscale.formats.spec import E2M1 as ELEMENT

    assert torch.equal(E2M1, decode_table(ELEMENT).double())
