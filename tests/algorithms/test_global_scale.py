"""The refined global scale: never worse, exact where an exact one exists, and never too small for the block scales."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockscale.algorithms.global_scale import refine_global_scale
from blockscale.algorithms.scale_sweep import best_block_scale
from blockscale.formats.minifloat import encode
from blockscale.formats.spec import E2M1

from .exhaustive import BLOCKS, LEVELS, blocks


def total_error(x: Tensor, block_scale: Tensor, g: Tensor, importance: Tensor, unit: Tensor) -> float:
    """Rounding as formats does, sums in float64, in units of `unit`."""
    codes = encode((x.unflatten(-1, (-1, 16)) / (block_scale.float() * g).unsqueeze(-1)), E2M1)
    levels = LEVELS[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)
    quantized = (levels * block_scale.double().unsqueeze(-1) * g.double()).flatten(-2)
    return (((quantized - x.double()) / unit.double()).square() * importance.double()).sum().item()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(BLOCKS),
    st.sampled_from([2.0**-80, 1.0, 2.0**80]),
    st.floats(1.0, 4.0),
    st.booleans(),
)
def test_never_worse_than_its_start(seed: int, kind: str, magnitude: float, headroom: float, is_weighted: bool) -> None:
    x = blocks(kind, 32, seed).view(8, 64) * magnitude
    generator = torch.Generator().manual_seed(seed)
    importance = 10 ** (4 * torch.rand(64, generator=generator)) if is_weighted else None
    start = (x.abs().amax() / 2688 * headroom).clamp(min=2.0**-120)
    g, block_scale = refine_global_scale(x, start, importance)
    weights = torch.ones(64) if importance is None else importance
    before = total_error(x, best_block_scale(x, start, importance=importance), start, weights, start)
    assert total_error(x, block_scale, g, weights, start) <= before * (1 + 1e-6)
    assert g.dtype == torch.float32
    assert g.shape == ()
    assert (x.abs().amax() / (6 * g)).item() <= 448 * (1 + 1e-6)


def test_an_exact_scale_is_found() -> None:
    """Weights that are levels times 1, their global scale off by 1 %: the codes are right, and one step mends it."""
    generator = torch.Generator().manual_seed(1)
    levels = torch.cat((LEVELS, -LEVELS)).float()[torch.randint(0, 16, (64, 16), generator=generator)]
    levels[:, 0] = 6.0
    g, block_scale = refine_global_scale(levels * 0.75, torch.tensor(0.75 * 1.01))
    assert total_error(levels * 0.75, block_scale, g, torch.ones(16), torch.tensor(1.0)) < 1e-9
    assert (g * block_scale.float().unique()).item() == pytest.approx(0.75, rel=1e-6)


def test_one_round_is_the_least_squares_solution() -> None:
    x = blocks("gaussian", 64, seed=2).view(16, 64)
    importance = torch.linspace(1, 9, 64)
    start = x.abs().amax() / 1536
    block_scale = best_block_scale(x, start, importance=importance)
    codes = encode((x.unflatten(-1, (-1, 16)) / (block_scale.float() * start).unsqueeze(-1)), E2M1)
    levels = LEVELS[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)
    design = (levels * block_scale.double().unsqueeze(-1)).flatten(-2)
    root = importance.double().sqrt()
    solution = torch.linalg.lstsq((design * root).reshape(-1, 1), (x.double() * root).reshape(-1, 1)).solution
    g, _ = refine_global_scale(x, start, importance, rounds=1)
    assert g != start
    assert g.item() == pytest.approx(solution.item(), rel=1e-6)


def test_zero_weights_and_zero_importance() -> None:
    start = torch.tensor(1.0)
    g, block_scale = refine_global_scale(torch.zeros(2, 32), start)
    assert (g.item(), block_scale.float().unique().tolist()) == (1.0, [1.0])
    x = blocks("gaussian", 8, seed=3)
    plain, silent = refine_global_scale(x, start * 0.01), refine_global_scale(x, start * 0.01, torch.zeros(16))
    assert torch.equal(plain[0], silent[0])
    assert torch.equal(plain[1].float(), silent[1].float())
