"""Error measures, against figures worked out by hand."""

import math

import pytest
import torch

from blockscale.formats.error import block_squared_error, mse, relative_mse, sqnr
from blockscale.formats.spec import NVFP4
from blockscale.formats.tensor import decode, encode


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


def test_block_squared_error_by_hand() -> None:
    # steps of 1 give 6, 0, 6 and 1.5; of 2, whose grid is 0, 1, 2, 3, 4, 6, 8 and 12, the tie at 7 goes to 8 or 6
    magnitude = torch.tensor([[5.4, 0.2, 7.0, 1.5], [5.4, 0.2, 7.0, 1.5]])
    error = block_squared_error(magnitude, torch.tensor([1.0, 2.0]))
    assert error.tolist() == pytest.approx([0.36 + 0.04 + 1, 0.36 + 0.04 + 1 + 0.25])


def test_block_squared_error_is_that_of_the_encoded_block() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    q = encode(x, NVFP4)
    assert q.global_scale is not None
    expected = (x.double() - decode(q).double()).square().unflatten(-1, (-1, 16)).sum(-1)
    step = q.block_scale.float() * q.global_scale
    measured = block_squared_error(x.abs().unflatten(-1, (-1, 16)), step)
    torch.testing.assert_close(measured.double(), expected, rtol=1e-5, atol=1e-9)
