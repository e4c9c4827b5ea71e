"""Cells and neighbours of E2M1's grid, code by code."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockscale.algorithms.rounding_cells import levels, local_step, lower_level, place_in_cell, signed_code
from blockscale.formats.minifloat import decode_table, encode
from blockscale.formats.spec import E2M1

CODES = torch.arange(16, dtype=torch.uint8)


def value(codes: torch.Tensor) -> torch.Tensor:
    return decode_table(E2M1)[codes.int()]


def test_levels() -> None:
    assert levels().tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.mark.parametrize("z", [0.0, 0.24, 0.25, 0.26, 0.75, 1.2, 1.75, 2.4, 2.5, 3.5, 4.9, 5.0, 5.1, 6.0, 7.0, 40.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_position_moves_into_the_cell_of_any_code(z: float, sign: int) -> None:
    position = torch.full((16,), sign * z)
    placed = place_in_cell(position, CODES)
    assert torch.equal(value(encode(placed, E2M1)), value(CODES)), "the values, as 0 has two codes"
    # no further than needed: the value half way to the level next to it on the position's side, or nowhere
    nearest = encode(position, E2M1)
    is_own = value(nearest) == value(CODES)
    assert ((placed - position).abs()[is_own] <= 2.0**-10).all()
    edge = (value(CODES) - position).abs() - (placed - position).abs()
    assert (edge[~is_own] <= 1).all(), "never past the level itself by more than half of the widest step"
    assert ((placed - position).abs() <= (value(CODES) - position).abs())[~is_own].all()


@settings(max_examples=100, deadline=None)
@given(st.floats(-20, 20, width=32))
def test_the_levels_around(z: float) -> None:
    position = torch.tensor([z])
    low = lower_level(position)
    lo, hi = levels()[low].item(), levels()[low + 1].item()
    assert lo <= abs(z) < hi or abs(z) >= 6 == hi
    if abs(z) < 6:
        assert local_step(position).item() == hi - lo
        nearest = value(encode(position, E2M1)).abs().item()
        assert nearest in (lo, hi)
    for index in (low, low + 1):
        assert value(signed_code(index, position)).item() == levels()[index].item() * (-1 if z < 0 else 1)


def test_nearest_codes_come_back_byte_for_byte() -> None:
    position = torch.linspace(-8, 8, 20001)
    codes = encode(position, E2M1)
    assert torch.equal(encode(place_in_cell(position, codes), E2M1), codes)
