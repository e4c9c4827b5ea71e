"""Error measures, against figures worked out by hand."""

import math

import pytest
import torch

from blockscale.formats.error import mse, relative_mse, sqnr


def test_by_hand() -> None:
    reference, approximation = torch.tensor([3.0, 4.0, 0.0]), torch.tensor([3.0, 3.0, 2.0])
    assert mse(reference, approximation) == pytest.approx(5 / 3)
    assert relative_mse(reference, approximation) == 5 / 25
    assert sqnr(reference, approximation) == pytest.approx(10 * math.log10(5))


def test_a_tenth_of_the_amplitude_is_twenty_decibels() -> None:
    reference = torch.full((7,), 2.0)
    assert sqnr(reference, reference + 0.2) == pytest.approx(20, abs=1e-5)


def test_exact_copy_and_zero() -> None:
    x, zero = torch.ones(4), torch.zeros(4)
    assert (mse(x, x), relative_mse(x, x), sqnr(x, x)) == (0, 0, math.inf)
    assert (relative_mse(zero, zero), sqnr(zero, zero)) == (0, math.inf)
    assert (relative_mse(zero, x), sqnr(zero, x)) == (math.inf, -math.inf)


def test_sums_in_float64() -> None:
    # in fp32 the squares of 1e30 overflow, those of 1e-30 vanish, and bf16 differences round
    assert relative_mse(torch.full((4,), 1e30), torch.full((4,), 2e30)) == pytest.approx(1)
    assert relative_mse(torch.full((4,), 1e-30), torch.full((4,), 2e-30)) == pytest.approx(1)
    x = torch.full((2**16,), 1.0, dtype=torch.bfloat16)
    assert relative_mse(x, torch.full((2**16,), 1 + 2.0**-20)) == pytest.approx(2.0**-40)
