"""What a weight was before it was scaled and rounded, found again from the 16-bit model's."""

import torch
from torch import Tensor

from blockscale.formats.nvfp4 import block_amax, block_scale_from_amax, decode_packed, encode_packed
from blockscale.quantization.learning.starting_points import unrounded_weight


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(weight: Tensor) -> Tensor:
    global_scale = weight.abs().amax() / (6 * 448)
    block_scale = block_scale_from_amax(block_amax(weight), global_scale)
    return decode_packed(encode_packed(weight, block_scale, global_scale), block_scale, global_scale)


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def test_scales_of_rows_and_columns_are_found_again() -> None:
    source = normal(256, 512)
    scaled = source * (normal(256, 1, seed=1) / 2).exp() * (normal(1, 512, seed=2) / 2).exp()
    stored = rounded(scaled)
    found = unrounded_weight(stored, source)
    assert found is not None
    # errors of hundreds of weights cancel: what is left lies far inside a rounding cell
    assert relative(found, scaled) < 0.15 * relative(stored, scaled)


def test_without_scales_the_source_comes_back() -> None:
    source = normal(256, 512, seed=3)
    stored = rounded(source)
    found = unrounded_weight(stored, source)
    assert found is not None
    assert relative(found, source) < 0.15 * relative(stored, source)


def test_experts_have_scales_of_their_own() -> None:
    source = normal(3, 64, 128, seed=4)
    scaled = source * normal(3, 1, 128, seed=5).exp()
    stored = torch.stack([rounded(expert) for expert in scaled])
    found = unrounded_weight(stored, source)
    assert found is not None
    alone = unrounded_weight(stored[1], source[1])
    assert alone is not None
    assert torch.allclose(found[1], alone, rtol=1e-5, atol=0)


def test_rows_and_columns_of_zeros_stay_zero() -> None:
    source = normal(64, 64, seed=6)
    source[3], source[:, 5] = 0.0, 0.0
    found = unrounded_weight(rounded(source), source)
    assert found is not None
    assert not found[3].any()
    assert not found[:, 5].any()
    assert torch.isfinite(found).all()


def test_another_weight_is_not_taken_for_it() -> None:
    stored = rounded(normal(64, 64, seed=7))
    assert unrounded_weight(stored, normal(64, 64, seed=8)) is None
    assert unrounded_weight(stored, normal(64, 32, seed=8)) is None
    assert unrounded_weight(stored, torch.zeros(64, 64)) is None
