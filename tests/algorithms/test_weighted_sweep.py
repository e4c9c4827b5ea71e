"""The sweep with weighted and correlated errors, against every positive E4M3 code in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockscale.algorithms.scale_sweep import HESSIAN_OFFSETS, best_block_scale, best_block_scale_hessian
from blockscale.algorithms.statistics import block_hessians
from blockscale.errors import FormatError
from blockscale.formats.minifloat import encode
from blockscale.formats.spec import E2M1
from blockscale.quantization.weight import ScaleMethod, global_scale_from_amax

from .exhaustive import BLOCKS, LEVELS, SCALES, blocks
from .quadratic import layer


def headroom_scale(x: Tensor) -> Tensor:
    return global_scale_from_amax(x.abs().amax(), ScaleMethod.SWEEP)


def weighted_errors(x: Tensor, importance: Tensor, steps: Tensor) -> Tensor:
    """[B, S] for blocks [B, 16], float64 steps [S] or [B, S]."""
    steps = steps.expand(len(x), -1)
    found = []
    for step in steps.unbind(-1):
        ratio = (x.double().abs() / step.unsqueeze(-1)).unsqueeze(-1)
        error = (ratio - LEVELS).abs().amin(-1) * step.unsqueeze(-1)
        found.append((error.square() * importance.double()).sum(-1))
    return torch.stack(found, -1)


def random_importance(seed: int, decades: float) -> Tensor:
    return 10 ** (decades * torch.rand(16, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("decades", [1.0, 4.0, 8.0])
@pytest.mark.parametrize("kind", BLOCKS)
def test_weighted_as_good_as_every_code(kind: str, decades: float) -> None:
    x, importance = blocks(kind, 200, seed=1), random_importance(2, decades)
    g = headroom_scale(x)
    found = best_block_scale(x, g, importance=importance).double() * g.double()
    best = weighted_errors(x, importance, SCALES * g.double()).amin(-1)
    noise = (importance * (x * 1e-6).square()).amax(-1).double()  # differences that fp32 cannot tell from 0
    assert (weighted_errors(x, importance, found).squeeze(-1) <= best * (1 + 1e-5) + noise).all()


def test_a_silent_channel_with_a_large_weight_is_clipped() -> None:
    """31 codes below the amax scale, as in real layers with one massive activation: no fixed window reaches it."""
    x = torch.tensor([[96.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0]])
    importance = torch.tensor([1e-6] + [1.0] * 15)
    g = torch.tensor(0.25)
    assert best_block_scale(x, g, importance=importance).item() == 4.0
    assert best_block_scale(x, g).item() > 32


def test_equal_importance_changes_no_byte() -> None:
    x = blocks("gaussian", 400, seed=3)
    g = headroom_scale(x)
    plain = best_block_scale(x, g).view(torch.uint8)
    for level in (1.0, 1e-20, 1e20):
        assert torch.equal(best_block_scale(x, g, importance=torch.full((16,), level)).view(torch.uint8), plain)


def test_a_block_without_importance_is_swept_unweighted() -> None:
    x = blocks("gaussian", 20, seed=4).view(10, 32)
    g = headroom_scale(x)
    importance = torch.cat((torch.zeros(16), random_importance(5, 3.0)))
    assert torch.equal(
        best_block_scale(x, g, importance=importance)[:, 0].float(), best_block_scale(x, g)[:, 0].float()
    )


def test_importance_of_a_stack_broadcasts() -> None:
    x = blocks("laplace", 24, seed=6).view(2, 6, 32)
    g = headroom_scale(x)
    importance = torch.stack((random_importance(7, 4.0).repeat(2), random_importance(8, 4.0).repeat(2)))
    together = best_block_scale(x, g, importance=importance.unsqueeze(1))
    for e in range(2):
        assert torch.equal(together[e].float(), best_block_scale(x[e], g, importance=importance[e]).float())
    with pytest.raises(FormatError, match="importance"):
        best_block_scale(x, g, importance=torch.ones(31))


def hessian_errors(x: Tensor, hessian: Tensor, steps: Tensor) -> Tensor:
    """[B, S], the codes' own rounding, everything else float64."""
    found = []
    for step in steps.unbind(-1):
        codes = encode(x / step.float().unsqueeze(-1), E2M1)
        levels = LEVELS[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)
        d = levels * step.unsqueeze(-1) - x.double()
        found.append(((d @ hessian.double()) * d).sum(-1))
    return torch.stack(found, -1)


def correlated(seed: int) -> Tensor:
    """[16, 16] of 24 tokens, far from diagonal."""
    return layer(1, 16, 24, seed).hessian


def all_steps(x: Tensor, g: Tensor) -> Tensor:
    return (SCALES.float() * g).double().expand(len(x), -1)


@pytest.mark.parametrize("seed", range(6))
def test_hessian_search_against_its_window_and_all_codes(seed: int) -> None:
    x, hessian = blocks("gaussian" if seed % 2 else "student", 300, seed), correlated(seed)
    g = headroom_scale(x)
    chosen = best_block_scale_hessian(x, g, hessian.unsqueeze(0)).view(torch.uint8).long()
    every = hessian_errors(x, hessian, all_steps(x, g))  # code c at c - 1
    found = every.gather(-1, chosen - 1).squeeze(-1)
    centre = best_block_scale(x, g, importance=hessian.diagonal()).view(torch.uint8).long()
    window = torch.stack([every.gather(-1, (centre + o).clamp(1, 126) - 1).squeeze(-1) for o in HESSIAN_OFFSETS], -1)
    assert (found <= window.amin(-1) * (1 + 1e-4)).all()
    assert found.sum() <= every.amin(-1).sum() * 1.01
    assert (found <= every.gather(-1, centre - 1).squeeze(-1) * (1 + 1e-4)).all()


def test_a_diagonal_hessian_is_an_importance() -> None:
    x, importance = blocks("gaussian", 300, seed=9), random_importance(10, 2.0)
    g = headroom_scale(x)
    by_hessian = best_block_scale_hessian(x, g, importance.diag().unsqueeze(0))
    steps = by_hessian.double() * g.double()
    best = weighted_errors(x, importance, best_block_scale(x, g, importance=importance).double() * g.double())
    assert (weighted_errors(x, importance, steps) <= best * (1 + 1e-5)).all()


def test_hessians_of_blocks_and_stacks_do_not_mix() -> None:
    problem = layer(5, 48, 60, seed=11)
    g = headroom_scale(problem.weight)
    by_block = block_hessians(problem.hessian)
    whole = best_block_scale_hessian(problem.weight, g, by_block).float()
    for b in range(3):
        part = best_block_scale_hessian(problem.weight[:, b * 16 : b * 16 + 16], g, by_block[b : b + 1])
        assert torch.equal(whole[:, b : b + 1], part.float())
    stack = torch.stack((problem.weight, problem.weight.flip(-1)))
    both = best_block_scale_hessian(stack, g, torch.stack((by_block, by_block.flip(0))))
    assert torch.equal(both[0].float(), whole)
    assert torch.equal(both[1].float(), best_block_scale_hessian(stack[1], g, by_block.flip(0)).float())
    with pytest.raises(FormatError, match="block Hessians"):
        best_block_scale_hessian(problem.weight, g, by_block[:2])


def test_zero_hessians_and_zero_blocks() -> None:
    x = blocks("gaussian", 20, seed=12)
    x[3] = 0
    g = headroom_scale(x)
    found = best_block_scale_hessian(x, g, torch.zeros(1, 16, 16))
    plain = best_block_scale(x, g)
    assert found[3].item() == 1.0
    assert torch.equal(found.float(), plain.float())


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(BLOCKS),
    st.floats(0, 12),
    st.sampled_from([2.0**-100, 2.0**-9, 1.0, 2.0**90]),
)
def test_weighted_never_worse_than_unweighted_whatever_the_magnitude(
    seed: int, kind: str, decades: float, magnitude: float
) -> None:
    x, importance = blocks(kind, 8, seed) * magnitude, random_importance(seed, decades)
    g = headroom_scale(x)
    scales = [best_block_scale(x, g, importance=importance), best_block_scale(x, g)]
    unit = x.double() / g.double()
    weighted, plain = (weighted_errors(unit, importance, s.double()).squeeze(-1) for s in scales)
    assert (weighted <= plain * (1 + 1e-5) + 1e-12 * importance.max().double()).all()
    assert torch.isfinite(scales[0].float()).all()
    assert (scales[0].float() > 0).all()
