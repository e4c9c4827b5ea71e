"""The sweep against every positive E4M3 code, in float64."""

import pytest
import torch
from torch import Tensor

from blockscale.algorithms.scale_sweep import best_block_scale
from blockscale.formats.nvfp4 import block_amax, block_scale_from_amax
from blockscale.quantization.weight import ScaleMethod, global_scale_from_amax

from .exhaustive import BLOCKS, all_errors, blocks, error_of


def headroom_scale(x: Tensor) -> Tensor:
    return global_scale_from_amax(x.abs().amax(), ScaleMethod.SWEEP)


# fp32 squares overflow or vanish at the outer magnitudes
@pytest.mark.parametrize("magnitude", [1.0, 2.0**-100, 2.0**100, 2.0**-126])
@pytest.mark.parametrize("kind", BLOCKS)
def test_as_good_as_every_code(kind: str, magnitude: float) -> None:
    x = blocks(kind, 500, seed=1) * magnitude
    g = headroom_scale(x)
    found = error_of(x, best_block_scale(x, g), g)
    best = all_errors(x, g).amin(-1)
    assert (found <= best * (1 + 1e-6)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs(dtype: torch.dtype) -> None:
    x = blocks("gaussian", 2000, seed=2).to(dtype)
    g = headroom_scale(x)
    found = error_of(x, best_block_scale(x, g), g)
    assert (found <= all_errors(x, g).amin(-1) * (1 + 1e-6)).all()


@pytest.mark.parametrize("headroom", [448.0, 256.0, 1.0, 2.0**-20])
@pytest.mark.parametrize("kind", BLOCKS)
def test_never_worse_than_the_amax_scale(kind: str, headroom: float) -> None:
    """Whatever the global scale: without headroom, and where every block scale is a subnormal."""
    x = blocks(kind, 500, seed=3)
    g = x.abs().amax() / (6 * headroom)
    swept = error_of(x, best_block_scale(x, g), g)
    plain = error_of(x, block_scale_from_amax(block_amax(x), g), g)
    assert (swept <= plain * (1 + 1e-6)).all()


def test_the_bound_is_tight() -> None:
    """Codes from three below to seven above the amax scale are needed, none past them: nine would lose blocks."""
    x = blocks("gaussian", 1500, seed=11)
    g = headroom_scale(x)
    start = block_scale_from_amax(block_amax(x), g).view(torch.uint8).int().squeeze(-1)
    best = all_errors(x, g).argmin(-1).int() + 1  # codes count from 1
    assert ((best - start).min(), (best - start).max()) == (-3, 7)
    assert torch.equal(best_block_scale(x, g).view(torch.uint8).int().squeeze(-1), best)


def test_subnormal_scales_may_need_more_than_seven_codes() -> None:
    """Among E4M3's subnormals half of an odd code is no code, so the way down from a large scale can be blocked."""
    x = torch.cat([blocks("wide range", 4000, seed) for seed in range(2)])
    g = headroom_scale(x)
    start = block_scale_from_amax(block_amax(x), g).view(torch.uint8).int().squeeze(-1)
    low = x[start < 8]
    errors = all_errors(low, g)
    assert (errors.argmin(-1).int() + 1 - start[start < 8]).max() > 7
    assert (error_of(low, best_block_scale(low, g), g) <= errors.amin(-1) * (1 + 1e-6)).all()


def test_zero_blocks_keep_a_scale_of_1() -> None:
    x = torch.zeros(3, 32)
    x[1, 20] = 5.0
    scale = best_block_scale(x, headroom_scale(x)).float()
    assert scale[[0, 0, 1, 2, 2], [0, 1, 0, 0, 1]].tolist() == [1.0] * 5
    assert scale[1, 1] != 1.0


def test_an_exact_block_stays_exact() -> None:
    x = torch.tensor([[0.0, 0.5, 1, 1.5, 2, 3, 4, 6] * 2])
    g = torch.tensor(1.0)
    assert error_of(x, best_block_scale(x, g), g).item() == 0


def test_shapes_and_block_size() -> None:
    x = blocks("gaussian", 2 * 3 * 4, seed=5).view(2, 3, 64)
    g = headroom_scale(x)
    assert best_block_scale(x, g).shape == (2, 3, 4)
    wide = best_block_scale(x, g, block_size=32)
    assert wide.shape == (2, 3, 2)
    found = error_of(x.view(-1, 32), wide.view(-1, 1), g)
    assert (found <= all_errors(x.view(-1, 32), g).amin(-1) * (1 + 1e-6)).all()
