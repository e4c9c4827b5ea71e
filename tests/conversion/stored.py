"""Stored NVFP4 weights for tests, and what they stand for, computed without the package."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from blockscale.conversion.repair.rescale import ScaledWeight

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
MAX_SCALE_BYTE = 0x7E  # 448


def values(packed: Tensor, block_scale: Tensor) -> Tensor:
    """float64 [..., K]: codes times block scales."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    scale = block_scale.double().repeat_interleave(codes.shape[-1] // block_scale.shape[-1], dim=-1)
    return E2M1[codes.long()] * scale


def decode(weight: ScaledWeight) -> Tensor:
    """float64 [..., K]. Exact for multipliers: 2 + 4 + 24 bits."""
    scale = weight.global_scale.double()
    unscaled = values(weight.packed, weight.block_scale)
    return unscaled / scale if weight.is_divisor else unscaled * scale


def steps(weight: ScaledWeight) -> Tensor:
    """float64 [..., K]: block scale times global scale of each element."""
    ones = torch.full_like(weight.packed, 0x22)
    return decode(ScaledWeight(ones, weight.block_scale, weight.global_scale, weight.is_divisor))


def same_bits(first: Tensor, second: Tensor) -> bool:
    def bits(tensor: Tensor) -> Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(bits(first), bits(second))


def scales_of(content: list[int]) -> Tensor:
    return torch.tensor(content, dtype=torch.uint8).view(torch.float8_e4m3fn)


@st.composite
def weights(
    draw: st.DrawFn, rows: int = 2, blocks: int = 3, *, smallest: int = 1, largest: int = MAX_SCALE_BYTE
) -> ScaledWeight:
    """Any codes, block scales of any byte from `smallest` to `largest`, a global scale of any normal size."""
    size = 16
    codes = draw(st.binary(min_size=rows * blocks * size // 2, max_size=rows * blocks * size // 2))
    scales = draw(st.lists(st.integers(smallest, largest), min_size=rows * blocks, max_size=rows * blocks))
    return ScaledWeight(
        torch.frombuffer(bytearray(codes), dtype=torch.uint8).view(rows, -1),
        scales_of(scales).view(rows, blocks),
        torch.tensor(draw(multipliers()), dtype=torch.float32),
    )


def multipliers() -> st.SearchStrategy[float]:
    return st.floats(2.0**-40, 2.0**20, width=32)
