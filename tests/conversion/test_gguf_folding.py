"""Global scales that a norm takes in: exact, or not at all."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockscale.checkpoint.linear import W4A16, QuantizedLinear
from blockscale.conversion.gguf.folding import MIN_FACTOR, find_fold, lowered
from blockscale.formats.nvfp4 import decode_unscaled
from blockscale.formats.packing import pack_nibbles
from blockscale.formats.spec import NVFP4
from blockscale.formats.tensor import QuantizedTensor, encode


def linear(block_scale: torch.Tensor, global_scale: float, codes: torch.Tensor) -> QuantizedLinear:
    rows, columns = codes.shape
    scale = block_scale.to(torch.float8_e4m3fn)
    weight = QuantizedTensor(
        NVFP4, pack_nibbles(codes), scale, torch.tensor(global_scale), (rows, columns), torch.bfloat16
    )
    return QuantizedLinear(W4A16, weight)


@given(seed=st.integers(0, 2**31), global_scale=st.floats(2.0**-17, 3.0, width=32), smallest=st.floats(0.25, 200))
@settings(max_examples=50, deadline=None)
def test_weights_over_the_shift_times_the_factor_are_the_weights(
    seed: int, global_scale: float, smallest: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (4, 64), generator=generator).to(torch.uint8)
    scale = (smallest * 2 ** (6 * torch.rand(4, 4, generator=generator))).clamp(max=448)
    candidate = linear(scale, global_scale, codes)
    fold = find_fold([candidate])
    if fold is None:
        return
    assert fold.factor >= MIN_FACTOR
    assert fold.factor == global_scale * 2.0**fold.shift  # a power of two changes no digit
    new_scale = lowered(candidate, fold.shift)
    assert new_scale is not None
    before = decode_unscaled(candidate.weight.packed, candidate.weight.block_scale)
    after = decode_unscaled(candidate.weight.packed, new_scale)
    assert torch.equal(after * 2.0**fold.shift, before)


def test_a_real_weight_is_folded() -> None:
    weight = encode(torch.randn(64, 256, generator=torch.Generator().manual_seed(1)) * 0.02, NVFP4)
    fold = find_fold([QuantizedLinear(W4A16, weight)])
    assert fold is not None
    assert fold.shift > 0
    assert math.log2(fold.factor) > -8


def test_linears_of_different_global_scales_are_not_folded() -> None:
    codes, scale = torch.ones(1, 16, dtype=torch.uint8), torch.full((1, 1), 100.0)
    assert find_fold([linear(scale, 0.01, codes), linear(scale, 0.02, codes)]) is None
    assert find_fold([linear(scale, 0.01, codes), linear(scale, 0.01, codes)]) is not None


def test_a_scale_at_the_low_end_of_e4m3_leaves_no_room() -> None:
    codes = torch.ones(1, 32, dtype=torch.uint8)
    scale = torch.tensor([[448.0, 2.0**-9]])
    assert find_fold([linear(scale, 1e-4, codes)]) is None


@pytest.mark.parametrize("zero", [0, 8])
def test_a_block_of_zeros_may_have_any_scale(zero: int) -> None:
    codes = torch.ones(1, 32, dtype=torch.uint8)
    codes[:, 16:] = zero  # 0 and -0
    scale = torch.tensor([[448.0, 2.0**-9]])
    assert find_fold([linear(scale, 1e-4, codes)]) is not None
