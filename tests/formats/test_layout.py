"""The 128x4 layout of block scales."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockscale.errors import FormatError
from blockscale.formats.layout import swizzle, unswizzle

from . import golden

SHAPES = ["128x4", "130x5", "16x3", "1x1", "1x4", "256x8", "300x17"]


def offset(row: int, col: int, num_cols: int) -> int:
    """Byte of scale [row, col], as the cuBLAS documentation words it."""
    tile = (row // 128) * -(-num_cols // 4) + col // 4
    return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + col % 4


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("peer", ["torchao", "vllm", "modelopt_diffusers"])
def test_bytes_of_the_peers(shape: str, peer: str) -> None:
    vectors = golden.load("layouts")
    rowmajor = vectors[f"swizzle_{shape}/rowmajor"]
    theirs = vectors[f"swizzle_{shape}/swizzled_{peer}"]
    assert torch.equal(swizzle(rowmajor), theirs.flatten())
    assert torch.equal(unswizzle(theirs, *rowmajor.shape), rowmajor)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 300), cols=st.integers(1, 20), seed=st.integers(0, 2**32 - 1))
def test_every_scale_lies_where_the_formula_says(rows: int, cols: int, seed: int) -> None:
    scale = torch.randint(1, 256, (rows, cols), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    expected = torch.zeros(-(-rows // 128) * 128 * -(-cols // 4) * 4, dtype=torch.uint8)
    where = torch.tensor([[offset(r, c, cols) for c in range(cols)] for r in range(rows)])
    expected[where] = scale
    assert torch.equal(swizzle(scale), expected)  # the padding is zero, too
    assert torch.equal(unswizzle(expected, rows, cols), scale)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8])
def test_dtype_and_bits_survive(dtype: torch.dtype) -> None:
    scale = torch.arange(256, dtype=torch.uint8).view(32, 8).view(dtype)  # NaN codes among them
    assert swizzle(scale).dtype == dtype
    back = unswizzle(swizzle(scale), 32, 8)
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), scale.view(torch.uint8))


def test_strided_scales() -> None:
    scale = torch.arange(60, dtype=torch.uint8).view(6, 10).t()
    assert torch.equal(swizzle(scale), swizzle(scale.contiguous()))


@pytest.mark.parametrize(
    "scale",
    [
        torch.zeros(16, dtype=torch.uint8),
        torch.zeros(2, 16, 4, dtype=torch.uint8),
        torch.zeros(16, 4),
        torch.zeros(16, 4, dtype=torch.int32),
        torch.zeros((), dtype=torch.uint8),
    ],
    ids=["1-D", "3-D", "float32", "int32", "0-d"],
)
def test_swizzle_refuses_what_is_no_matrix_of_bytes(scale: torch.Tensor) -> None:
    with pytest.raises(FormatError, match="2-D matrix of 1-byte scales"):
        swizzle(scale)


@pytest.mark.parametrize(
    "swizzled",
    [torch.zeros(511, dtype=torch.uint8), torch.zeros(1024, dtype=torch.uint8), torch.zeros(512)],
    ids=["too few", "too many", "float32"],
)
def test_unswizzle_refuses_another_size(swizzled: torch.Tensor) -> None:
    with pytest.raises(FormatError, match="512 1-byte entries"):
        unswizzle(swizzled, 100, 3)
