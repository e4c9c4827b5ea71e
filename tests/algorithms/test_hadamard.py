"""The block Hadamard rotation: its matrix, and that products survive it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockscale.algorithms.hadamard import SIZES, rotate
from blockscale.errors import FormatError

each_size = pytest.mark.parametrize("size", SIZES)


def sylvester(size: int) -> torch.Tensor:
    """By the parity of common bits, float64."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return torch.tensor(signs, dtype=torch.float64) / size**0.5


@each_size
def test_rotates_by_sylvesters_matrix(size: int) -> None:
    assert torch.allclose(rotate(torch.eye(size, dtype=torch.float64), size), sylvester(size), rtol=0, atol=1e-15)


@each_size
def test_each_block_on_its_own(size: int) -> None:
    x = torch.zeros(3, 4 * size, dtype=torch.float64)
    x[1, 2 * size + 5] = 1.0
    rotated = rotate(x, size)
    assert torch.allclose(rotated[1, 2 * size : 3 * size], sylvester(size)[5], rtol=1e-15, atol=0)
    rotated[1, 2 * size : 3 * size] = 0
    assert not rotated.any()


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SIZES), st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_products_and_lengths_stay(size: int, seed: int, num_blocks: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(n, num_blocks * size, generator=generator, dtype=torch.float64) for n in (5, 7))
    assert torch.allclose(rotate(x, size) @ rotate(w, size).T, x @ w.T, rtol=1e-12, atol=1e-12)
    assert torch.allclose(rotate(x, size).norm(dim=-1), x.norm(dim=-1), rtol=1e-12)
    assert torch.allclose(rotate(rotate(x, size), size), x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_sums_are_fp32(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    rotated = rotate(x, 32)
    assert rotated.dtype == torch.float32
    # 5 rounds of one rounding each, of values no larger than sqrt(32) times the block's norm
    bound = 6 * 2.0**-24 * x.double().unflatten(-1, (-1, 32)).norm(dim=-1).max() * 32**0.5
    assert (rotated.double() - rotate(x.double(), 32)).abs().max() <= bound


def test_the_input_is_left_alone() -> None:
    x = torch.randn(4, 32)
    before = x.clone()
    rotate(x, 16)
    assert torch.equal(x, before)


@pytest.mark.parametrize(("size", "shape"), [(8, (2, 16)), (0, (2, 16)), (48, (2, 48)), (32, (2, 48)), (16, ())])
def test_sizes_that_do_not_fit(size: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(FormatError) as error:
        rotate(torch.zeros(shape), size)
    assert str(size) in str(error.value)
    assert error.value.hint
