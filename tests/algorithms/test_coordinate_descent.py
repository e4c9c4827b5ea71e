"""Coordinate descent: never worse than its start, never stuck where one more move would help, in float64."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockscale.algorithms.coordinate_descent import (
    coordinate_descent,
    quadratic_error,
    refine_codes_and_scales,
    refit_scales,
)
from blockscale.algorithms.gptq import gptq
from blockscale.errors import FormatError, NonFiniteError, UsageError
from blockscale.formats.nvfp4 import encode_packed
from blockscale.formats.packing import unpack_nibbles

from .exhaustive import SCALES
from .quadratic import SIGNED, Layer, errors_of, layer, row_errors, values

# a move that gains less than this much of a row's error can be lost in fp32 sums
RESOLUTION = 1e-4


def nearest(problem: Layer) -> Tensor:
    return unpack_nibbles(encode_packed(problem.weight, problem.block_scale, problem.global_scale))


def by_gptq(problem: Layer) -> Tensor:
    return gptq(problem.weight, problem.hessian, problem.block_scale, problem.global_scale)


def descend(problem: Layer, codes: Tensor, **options: int) -> Tensor:
    return coordinate_descent(
        problem.weight, problem.hessian, codes, problem.block_scale, problem.global_scale, **options
    )


def refit(problem: Layer, codes: Tensor, **options: int) -> Tensor:
    return refit_scales(problem.weight, problem.hessian, codes, problem.block_scale, problem.global_scale, **options)


def refine(problem: Layer, codes: Tensor, **options: int) -> tuple[Tensor, Tensor]:
    return refine_codes_and_scales(
        problem.weight, problem.hessian, codes, problem.block_scale, problem.global_scale, **options
    )


@pytest.mark.parametrize("columns", [16, 48, 160])
@pytest.mark.parametrize("start", [nearest, by_gptq])
def test_no_sweep_makes_a_row_worse(start: object, columns: int) -> None:
    problem = layer(24, columns, 2 * columns, seed=columns)
    codes = start(problem)  # type: ignore[operator]
    errors = [errors_of(problem, codes)]
    for sweeps in range(1, 6):
        errors.append(errors_of(problem, descend(problem, codes, sweeps=sweeps)))
    for before, after in itertools.pairwise(errors):
        assert (after <= before * (1 + 1e-6)).all()
    assert errors[-1].sum() < 0.99 * errors[0].sum()


def test_it_ends_where_no_single_code_can_be_bettered() -> None:
    problem = layer(6, 48, 100, seed=1)
    codes = descend(problem, by_gptq(problem), sweeps=100)
    found = errors_of(problem, codes)
    for column in range(48):
        for code in range(16):
            other = codes.clone()
            other[:, column] = code
            assert (found <= errors_of(problem, other) * (1 + RESOLUTION)).all()


def tiny(seed: int) -> tuple[Layer, Tensor, Tensor]:
    """Three live channels in one block: (problem, every choice of their values [15^3, 3], their errors [N, 15^3])."""
    problem = layer(12, 16, 40, seed, dead=13)
    choices = torch.cartesian_prod(SIGNED, SIGNED, SIGNED)
    quantized = choices * (problem.block_scale.double() * problem.global_scale.double()).unsqueeze(-1)  # [N, 15^3, 3]
    return problem, choices, row_errors(problem.weight[:, None, :3], problem.hessian[:3, :3], quantized)


@pytest.mark.parametrize("seed", range(5))
def test_the_end_is_one_of_the_enumerated_local_optima(seed: int) -> None:
    problem, _, every = tiny(seed)
    cube = every.view(-1, 15, 15, 15)
    best_along = [cube.amin(axis, keepdim=True) for axis in (1, 2, 3)]
    optima = [(cube <= along * (1 + RESOLUTION)) for along in best_along]
    is_optimum = (optima[0] & optima[1] & optima[2]).flatten(1)
    for start in (nearest(problem), by_gptq(problem)):
        found = errors_of(problem, descend(problem, start, sweeps=50))
        gap = (every / found.unsqueeze(-1) - 1).abs().masked_fill(~is_optimum, torch.inf).amin(-1)
        assert (gap < 1e-9).all()
        assert (found >= every.amin(-1) * (1 - 1e-9)).all()


def test_a_single_local_optimum_is_the_best_of_all() -> None:
    problem, _, every = tiny(7)
    weak = problem.hessian.clone()
    diagonal = weak.diagonal().clone()
    weak = (weak * 0.02).diagonal_scatter(diagonal)
    flat = Layer(problem.weight, weak, problem.block_scale, problem.global_scale)
    choices = torch.cartesian_prod(SIGNED, SIGNED, SIGNED)
    step = (problem.block_scale.double() * problem.global_scale.double()).unsqueeze(-1)
    best = row_errors(problem.weight[:, None, :3], weak[:3, :3], choices * step).amin(-1)
    worst_start = torch.full((12, 16), 7, dtype=torch.uint8)
    assert torch.allclose(errors_of(flat, descend(flat, worst_start, sweeps=50)), best, rtol=1e-9)
    assert every.shape == (12, 15**3)


@pytest.mark.parametrize("seed", range(4))
def test_one_block_gets_the_best_of_all_scales(seed: int) -> None:
    problem = layer(20, 16, 40, seed)
    codes = by_gptq(problem)
    found = errors_of(problem, codes, refit(problem, codes))
    every = torch.stack([errors_of(problem, codes, s.float().expand(20, 1)) for s in SCALES], -1)
    assert (found <= every.amin(-1) * (1 + 1e-6)).all()


def test_many_blocks_end_where_no_single_scale_can_be_bettered() -> None:
    problem = layer(8, 80, 160, seed=5)
    codes = nearest(problem)
    scale = refit(problem, codes, sweeps=50)
    found = errors_of(problem, codes, scale)
    assert found.sum() < 0.99 * errors_of(problem, codes).sum()
    for block in range(5):
        for candidate in SCALES:
            other = scale.float()
            other[:, block] = candidate.float()
            assert (found <= errors_of(problem, codes, other) * (1 + RESOLUTION)).all()


def test_refitting_and_refining_never_make_a_row_worse() -> None:
    problem = layer(24, 96, 200, seed=6)
    codes = by_gptq(problem)
    start = errors_of(problem, codes)
    assert (errors_of(problem, codes, refit(problem, codes)) <= start * (1 + 1e-6)).all()
    errors = [start]
    for rounds in range(1, 7):
        errors.append(errors_of(problem, *refine(problem, codes, rounds=rounds)))
    for before, after in itertools.pairwise(errors):
        assert (after <= before * (1 + 1e-6)).all()
    assert errors[-1].sum() < errors_of(problem, descend(problem, codes, sweeps=6)).sum()


def test_diagonal_hessians_round_to_nearest_from_anywhere() -> None:
    problem = layer(10, 32, 64, seed=8)
    flat = Layer(problem.weight, torch.diag(torch.arange(1.0, 33.0)), problem.block_scale, problem.global_scale)
    wrong = torch.randint(0, 16, (10, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    found = values(descend(flat, wrong, sweeps=1), flat.block_scale, flat.global_scale)
    assert torch.equal(found, values(nearest(flat), flat.block_scale, flat.global_scale))


def test_dead_channels_are_rounded_to_nearest_where_a_row_moves() -> None:
    problem = layer(12, 32, 100, seed=9, dead=5)
    wrong = torch.randint(0, 16, (12, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    assert torch.equal(descend(problem, wrong)[:, -5:], nearest(problem)[:, -5:])


def test_blocks_of_zeros_keep_their_scale() -> None:
    problem = layer(6, 48, 100, seed=10)
    codes = by_gptq(problem)
    codes[:, 16:32] = torch.tensor([0, 8] * 8, dtype=torch.uint8)
    assert torch.equal(refit(problem, codes)[:, 1].float(), problem.block_scale[:, 1].float())


def test_a_hessian_that_is_not_positive_definite_is_descended_too() -> None:
    problem = layer(6, 16, 32, seed=11)
    pairs = torch.block_diag(*[torch.tensor([[1.0, 3.0], [3.0, 1.0]])] * 8)
    bent = Layer(problem.weight, pairs, problem.block_scale, problem.global_scale)
    codes = nearest(bent)
    assert (errors_of(bent, descend(bent, codes)) <= errors_of(bent, codes)).all()
    assert (errors_of(bent, codes, refit(bent, codes)) <= errors_of(bent, codes)).all()


def test_a_stack_is_its_members() -> None:
    members = [layer(6, 48, 100, seed, dead=seed) for seed in range(3)]
    g = torch.tensor([1.0, 0.5, 2.0]) * members[0].global_scale
    codes = torch.stack([nearest(m) for m in members])
    stack = (
        torch.stack([m.weight for m in members]),
        torch.stack([m.hessian for m in members]),
        codes,
        torch.stack([m.block_scale.view(torch.uint8) for m in members]).view(torch.float8_e4m3fn),
        g,
    )
    found_codes, found_scale = refine_codes_and_scales(*stack, rounds=3)
    error = quadratic_error(*stack[:2], found_codes, found_scale, g)
    assert error.shape == (3, 6)
    for e, m in enumerate(members):
        one = refine_codes_and_scales(m.weight, m.hessian, codes[e], m.block_scale, g[e], rounds=3)
        assert torch.equal(found_codes[e], one[0])
        assert torch.equal(found_scale[e].float(), one[1].float())


@pytest.mark.parametrize("damp", [0.0, 0.1])
def test_the_error_is_the_trace(damp: float) -> None:
    problem = layer(7, 32, 20, seed=12, dead=3)
    codes = nearest(problem)
    hessian = problem.hessian.double()
    lam = damp * hessian.diagonal()[:29].mean()
    hessian = hessian + torch.diag(torch.tensor([1.0] * 29 + [0.0] * 3)) * lam
    wanted = row_errors(problem.weight, hessian, values(codes, problem.block_scale, problem.global_scale))
    found = quadratic_error(
        problem.weight, problem.hessian, codes, problem.block_scale, problem.global_scale, damp=damp
    )
    assert found.dtype == torch.float64
    assert torch.allclose(found, wanted, rtol=1e-5)


def test_damping_is_what_is_descended() -> None:
    problem = layer(12, 64, 20, seed=13)  # fewer tokens than channels: the undamped error can be fitted away
    codes = by_gptq(problem)

    def damped_error(found: Tensor) -> float:
        return quadratic_error(
            problem.weight, problem.hessian, found, problem.block_scale, problem.global_scale, damp=1.0
        ).sum()

    plain = descend(problem, codes)
    damped = coordinate_descent(
        problem.weight, problem.hessian, codes, problem.block_scale, problem.global_scale, damp=1.0
    )
    assert damped_error(damped) < damped_error(plain)
    assert errors_of(problem, plain).sum() < errors_of(problem, damped).sum()


def test_bad_input_is_named() -> None:
    p = layer(4, 32, 64, seed=14)
    codes = nearest(p)
    for search in (coordinate_descent, refit_scales, refine_codes_and_scales):
        for error, changed in (
            (FormatError, (p.weight, p.hessian, codes[:, :16], p.block_scale)),
            (FormatError, (p.weight, p.hessian, codes.int(), p.block_scale)),
            (FormatError, (p.weight, p.hessian[:16], codes, p.block_scale)),
            (FormatError, (p.weight, p.hessian, codes, p.block_scale.float())),
            (NonFiniteError, (p.weight, p.hessian * torch.nan, codes, p.block_scale)),
            (NonFiniteError, (p.weight / 0, p.hessian, codes, p.block_scale)),
        ):
            with pytest.raises(error, match="down_proj"):
                search(*changed, p.global_scale, name="down_proj")
        with pytest.raises(UsageError, match="down_proj"):
            search(p.weight, p.hessian, codes, p.block_scale, p.global_scale, damp=-1.0, name="down_proj")


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.sampled_from([16, 32, 80]), st.integers(1, 100), st.integers(0, 16))
def test_never_worse_than_the_start(seed: int, rows: int, columns: int, tokens: int, dead: int) -> None:
    problem = layer(rows, columns, tokens, seed, dead=dead)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=generator)
    found, scale = refine(problem, codes, rounds=3)
    start = errors_of(problem, codes)
    assert (errors_of(problem, found, scale) <= start * (1 + 1e-6)).all()
    assert (scale.float() > 0).all()
    assert torch.isfinite(scale.float()).all()
    assert found.max() < 16
