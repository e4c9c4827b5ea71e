"""GPTQ against the textbook in float64, formats' own rounding, and problems whose answer is known."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockscale.algorithms.column_rounding import earlier_and_later, round_columns
from blockscale.algorithms.damping import damped_cholesky, prepare_hessian
from blockscale.algorithms.gptq import corrected_target, gptq
from blockscale.algorithms.statistics import Moments, add_moments, finish, new_moments
from blockscale.errors import BlockscaleError, FormatError, NonFiniteError, UsageError
from blockscale.formats.nvfp4 import decode_packed, encode_packed
from blockscale.formats.packing import pack_nibbles, unpack_nibbles

from .exhaustive import LEVELS
from .quadratic import SIGNED, Layer, errors_of, layer, values

TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def solve(problem: Layer, **options: object) -> Tensor:
    codes = gptq(problem.weight, problem.hessian, problem.block_scale, problem.global_scale, **options)  # type: ignore[arg-type]
    assert codes.dtype == torch.uint8
    assert codes.shape == problem.weight.shape
    assert codes.max() < 16
    return codes


def nearest(problem: Layer, weight: Tensor | None = None) -> Tensor:
    """Round to nearest, as formats packs it."""
    weight = problem.weight if weight is None else weight
    return unpack_nibbles(encode_packed(weight, problem.block_scale, problem.global_scale))


def textbook(problem: Layer, damp: float, act_order: bool) -> tuple[Tensor, Tensor]:
    """(values float64 [N, K], how near each rounding was to a tie, in levels) with the upper factor of H^-1."""
    hessian = problem.hessian.double()
    columns = len(hessian)
    hessian = hessian + damp * hessian.diagonal().mean() * torch.eye(columns)
    order = hessian.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(columns)
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian[order][:, order]), upper=True)
    weight = problem.weight.double()[:, order].clone()
    step = (problem.block_scale.double() * problem.global_scale.double()).repeat_interleave(16, 1)[:, order]
    result, margin = torch.empty_like(weight), torch.empty_like(weight)
    for i in range(columns):
        scaled = weight[:, i] / step[:, i]
        margin[:, i] = (scaled.abs().unsqueeze(-1) - TIES.double()).abs().amin(-1)
        result[:, i] = SIGNED[(scaled.unsqueeze(-1) - SIGNED).abs().argmin(-1)] * step[:, i]
        error = (weight[:, i] - result[:, i]) / upper[i, i]
        weight[:, i:] -= error.unsqueeze(-1) * upper[i, i:]
    back = order.argsort()
    return result[:, back], margin[:, back]


@pytest.mark.parametrize("block", [1, 16, 128])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("columns", [16, 48, 160])
def test_the_textbook_in_float64(columns: int, act_order: bool, block: int) -> None:
    problem = layer(64, columns, 4 * columns, seed=columns)
    wanted, margin = textbook(problem, 0.01, act_order)
    found = values(solve(problem, act_order=act_order, block=block), problem.block_scale, problem.global_scale)
    # targets are sums of up to K fp32 terms: rows that came nearer to a tie than that may go either way
    is_clear = margin.amin(-1) > columns * 2.0**-20
    assert is_clear.sum() > 32
    assert torch.allclose(found[is_clear], wanted[is_clear], rtol=1e-6, atol=0)


def test_formats_rounding_and_values_to_the_bit() -> None:
    """Ties, their neighbours, signed zeros and overflow, under scales that make the products round."""
    generator = torch.Generator().manual_seed(1)
    points = torch.cat((TIES, LEVELS.float(), torch.tensor([6.5, 7.0, 1e30])))
    points = torch.cat((points, points.nextafter(torch.tensor(torch.inf)), points.nextafter(torch.tensor(0.0))))
    points = torch.cat((points, -points))
    pick = torch.randint(0, len(points), (40, 64), generator=generator)
    block_scale = torch.randint(1, 127, (40, 4), dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)
    for g in (torch.tensor(1.0), torch.tensor(0.0123457)):
        weight = points[pick] * (block_scale.float() * g).repeat_interleave(16, -1)
        weight = torch.where(torch.rand(40, 64, generator=generator) < 0.5, weight, weight.nextafter(torch.tensor(0.0)))
        packed = encode_packed(weight, block_scale, g)
        expanded = block_scale.view(torch.uint8).repeat_interleave(16, -1).view(torch.float8_e4m3fn)
        transposed = weight.T.unsqueeze(0).contiguous()
        codes, errors = round_columns(
            transposed.clone(), transposed, torch.zeros(1, 64, 64), expanded.T.unsqueeze(0), g.view(1, 1), 16
        )
        assert torch.equal(codes[0].T, unpack_nibbles(packed))
        assert torch.equal(errors[0].T, weight - decode_packed(packed, block_scale, g))


def test_what_it_thinks_is_what_decoding_gives() -> None:
    """The targets that were rounded follow from the decoded values alone."""
    problem = layer(8, 32, 64, seed=3)
    codes = solve(problem, act_order=False, block=32)
    decoded = decode_packed(pack_nibbles(codes), problem.block_scale, problem.global_scale)
    hessian = problem.hessian.double()
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(32)
    factor = torch.linalg.cholesky(hessian.flip(0, 1)).flip(0, 1)
    coefficients = factor / factor.diagonal()
    difference = problem.weight.double() - decoded.double()
    targets = problem.weight.double() + difference @ coefficients.triu(1)
    again = unpack_nibbles(encode_packed(targets.float(), problem.block_scale, problem.global_scale))
    assert (again != codes).float().mean() < 0.01  # float64 sums here, fp32 sums there
    # and the triangular form is the error
    form = ((targets - decoded.double()) * factor.diagonal()).square().sum(-1)
    assert torch.allclose(form, ((difference @ hessian) * difference).sum(-1), rtol=1e-9)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("hessian", [torch.eye(32), torch.zeros(32, 32), torch.diag(torch.arange(32.0))])
def test_a_diagonal_hessian_rounds_to_nearest(hessian: Tensor, act_order: bool) -> None:
    problem = layer(20, 32, 64, seed=4)
    flat = Layer(problem.weight, hessian, problem.block_scale, problem.global_scale)
    assert torch.equal(solve(flat, act_order=act_order), nearest(problem))


@pytest.mark.parametrize("columns", [16, 64, 256])
def test_correlated_inputs_gain(columns: int) -> None:
    problem = layer(96, columns, 2 * columns, seed=5)
    # the margin of a seed is far from 1; greedy rounding may lose on single rows, not over all
    assert errors_of(problem, solve(problem)).sum() < 0.8 * errors_of(problem, nearest(problem)).sum()


def test_duplicate_channels_share_their_error() -> None:
    """All inputs equal: only the sum of a row matters, and the last column brings it within half a step."""
    weight = torch.full((1, 16), 0.2)
    scale = torch.ones(1, 1).to(torch.float8_e4m3fn)
    problem = Layer(weight, torch.ones(16, 16), scale, torch.tensor(1.0))
    codes = solve(problem, damp=1e-6)
    assert not nearest(problem).any()
    assert abs(values(codes, scale, problem.global_scale).sum().item() - 3.2) <= 0.25 + 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_the_last_column_is_the_best_given_the_others(seed: int) -> None:
    problem = layer(12, 32, 48, seed)
    codes = solve(problem, damp=0.0, act_order=False)
    found = errors_of(problem, codes)
    for code in range(16):
        other = codes.clone()
        other[:, -1] = code
        assert (found <= errors_of(problem, other) * (1 + 1e-5)).all()


def test_activation_order_is_an_order() -> None:
    """Columns sorted beforehand and taken as they come give the same codes."""
    problem = layer(10, 16, 40, seed=6)
    order = problem.hessian.diagonal().argsort(descending=True, stable=True)
    ordered = Layer(
        problem.weight[:, order], problem.hessian[order][:, order], problem.block_scale, problem.global_scale
    )
    assert torch.equal(solve(problem)[:, order], solve(ordered, act_order=False))


def test_dead_channels_are_rounded_to_nearest_and_move_nothing() -> None:
    problem = layer(16, 64, 200, seed=7, dead=9)
    codes = solve(problem)
    assert torch.equal(codes[:, -9:], nearest(problem)[:, -9:])
    changed = problem.weight.clone()
    changed[:, -9:] = -changed[:, -9:] * 0.3
    other = solve(Layer(changed, problem.hessian, problem.block_scale, problem.global_scale))
    assert torch.equal(other[:, :-9], codes[:, :-9])
    assert torch.equal(other[:, -9:], nearest(problem, changed)[:, -9:])


def test_what_passes_six_saturates() -> None:
    problem = layer(8, 16, 64, seed=8)
    small = (problem.block_scale.float() / 8).to(torch.float8_e4m3fn)
    codes = solve(Layer(problem.weight, problem.hessian, small, problem.global_scale))
    assert {7, 15} <= set(codes.flatten().tolist())
    assert torch.isfinite(values(codes, small, problem.global_scale)).all()


@pytest.mark.parametrize("factor", [2.0**-40, 4.0, 2.0**60])
def test_the_size_of_the_hessian_does_not_matter(factor: float) -> None:
    problem = layer(8, 32, 64, seed=9)
    scaled = Layer(problem.weight, problem.hessian * factor, problem.block_scale, problem.global_scale)
    assert torch.equal(solve(problem), solve(scaled))


def test_a_stack_is_its_members() -> None:
    members = [layer(6, 48, 100, seed, dead=seed) for seed in range(3)]
    g = torch.tensor([1.0, 0.5, 2.0]) * members[0].global_scale
    codes = gptq(
        torch.stack([m.weight for m in members]),
        torch.stack([m.hessian for m in members]),
        torch.stack([m.block_scale.view(torch.uint8) for m in members]).view(torch.float8_e4m3fn),
        g,
        block=16,
    )
    for e, m in enumerate(members):
        assert torch.equal(codes[e], gptq(m.weight, m.hessian, m.block_scale, g[e], block=16))


def test_one_row_sixteen_columns_and_sixteen_bits() -> None:
    problem = layer(1, 16, 32, seed=10)
    half = Layer(problem.weight.bfloat16(), problem.hessian, problem.block_scale, problem.global_scale)
    wide = Layer(half.weight.float(), problem.hessian, problem.block_scale, problem.global_scale)
    assert torch.equal(solve(half), solve(wide))


def test_a_hessian_that_needs_more_damping_gets_it() -> None:
    """Eigenvalues 4 and -2: refused up to a damping of 1 times the diagonal, fine from 10 on."""
    pairs = torch.block_diag(*[torch.tensor([[1.0, 3.0], [3.0, 1.0]])] * 8)
    matrix, is_live = prepare_hessian(pairs, 16, "layer")
    factor, lam = damped_cholesky(matrix, is_live, 0.1, "layer")
    assert lam.item() == pytest.approx(10.0)
    assert torch.allclose(factor[0] @ factor[0].T, pairs.double() + 10 * torch.eye(16))
    problem = layer(4, 16, 32, seed=11)
    solve(Layer(problem.weight, pairs, problem.block_scale, problem.global_scale))


def test_only_the_failing_member_of_a_stack_is_damped_more() -> None:
    pairs = torch.block_diag(*[torch.tensor([[1.0, 3.0], [3.0, 1.0]])] * 8)
    matrix, is_live = prepare_hessian(torch.stack((pairs, torch.eye(16))), 16, "experts")
    assert damped_cholesky(matrix, is_live, 0.01, "experts")[1].tolist() == pytest.approx([10.0, 0.01])


@pytest.mark.parametrize("tokens", [1, 5, 32])
def test_singular_hessians_work_without_damping(tokens: int) -> None:
    """Fewer tokens than channels: a pivot that is only rounding noise counts as a failed factorisation."""
    problem = layer(8, 64, tokens, seed=12)
    matrix, is_live = prepare_hessian(problem.hessian, 64, "layer")
    assert damped_cholesky(matrix, is_live, 0.0, "layer")[1].item() > 0
    assert errors_of(problem, solve(problem, damp=0.0)).sum() < errors_of(problem, nearest(problem)).sum()


def refused(error: type[BlockscaleError], problem: Layer, **options: object) -> None:
    with pytest.raises(error, match=r"layers\.0\.up") as caught:
        solve(problem, name="layers.0.up", **options)
    assert isinstance(caught.value, BlockscaleError)


def test_bad_input_is_named() -> None:
    p = layer(4, 32, 64, seed=13)

    def with_hessian(hessian: Tensor) -> Layer:
        return Layer(p.weight, hessian, p.block_scale, p.global_scale)

    not_a_second_moment = p.hessian.clone()
    not_a_second_moment[0, 1] = not_a_second_moment[1, 0] = 1e9 * p.hessian.diagonal().max()
    refused(UsageError, with_hessian(not_a_second_moment))
    for bad in (torch.nan, torch.inf):
        broken = p.hessian.clone()
        broken[3, 4] = bad
        refused(NonFiniteError, with_hessian(broken))
        weight = p.weight.clone()
        weight[1, 2] = bad
        refused(NonFiniteError, Layer(weight, p.hessian, p.block_scale, p.global_scale))
    refused(FormatError, with_hessian(p.hessian[:16, :16]))
    refused(FormatError, Layer(p.weight, p.hessian, p.block_scale[:, :1], p.global_scale))
    refused(FormatError, Layer(p.weight, p.hessian, p.block_scale.float(), p.global_scale))
    refused(FormatError, Layer(p.weight[:, :24], p.hessian, p.block_scale, p.global_scale))
    refused(UsageError, p, damp=-0.1)
    refused(UsageError, p, damp=torch.nan)
    refused(UsageError, p, block=24)


@pytest.mark.parametrize(("columns", "leaf"), [(6, 1), (48, 16), (100, 32), (160, 16), (128, 128)])
def test_every_pair_of_leaves_is_met_once(columns: int, leaf: int) -> None:
    met = torch.zeros(columns, columns, dtype=torch.int64)
    for end in range(leaf, columns, leaf):
        first, last = earlier_and_later(end, columns)
        met[first:end, end:last] += 1
    index = torch.arange(columns)
    wanted = (index.unsqueeze(1) // leaf) < (index.unsqueeze(0) // leaf)
    assert torch.equal(met, wanted.long())


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.sampled_from([16, 32, 80]), st.integers(1, 60), st.booleans())
def test_within_the_bound_of_nearest_plane(seed: int, rows: int, columns: int, tokens: int, act_order: bool) -> None:
    """Unless something saturates, the damped error is at most sum_j M_jj^2 step_j^2: no gap of E2M1 passes 2 steps."""
    problem = layer(rows, columns, tokens, seed)
    wide = Layer(problem.weight, problem.hessian, problem.block_scale, problem.global_scale * 4)  # room above 6
    codes = solve(wide, act_order=act_order)
    is_free = ((codes & 7) < 7).all(-1)
    hessian = problem.hessian.double()
    hessian = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(columns)
    order = hessian.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(columns)
    diagonal = torch.linalg.cholesky(hessian[order][:, order].flip(0, 1)).flip(0, 1).diagonal()
    step = (wide.block_scale.double() * wide.global_scale.double()).repeat_interleave(16, 1)[:, order]
    difference = wide.weight.double() - values(codes, wide.block_scale, wide.global_scale)
    found = ((difference @ hessian) * difference).sum(-1)
    assert (found <= (diagonal * step).square().sum(-1) * (1 + 1e-4))[is_free].all()


def moments_of(x_quantized: Tensor, x: Tensor) -> Moments:
    sums = new_moments(x.shape[-1])
    add_moments(sums, x_quantized, x)
    return finish(sums)


def inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(200, 32, generator=generator) @ torch.randn(32, 32, generator=generator)
    noisy = x + 0.3 * torch.randn(200, 32, generator=generator)
    return torch.randn(5, 32, generator=generator), noisy, x


def test_the_corrected_target_is_least_squares() -> None:
    weight, noisy, x = inputs(1)
    wanted = torch.linalg.lstsq(noisy.double(), x.double() @ weight.double().T).solution.T
    full = corrected_target(weight, moments_of(noisy, x), damp=0.0)
    assert torch.allclose(full.double(), wanted, atol=1e-3)
    assert not torch.allclose(full, weight, atol=1e-2)
    half = corrected_target(weight, moments_of(noisy, x), strength=0.5, damp=0.0)
    assert torch.allclose(half, (weight + full) / 2, atol=1e-5)
    assert torch.equal(corrected_target(weight, moments_of(noisy, x), strength=0.0), weight)


def test_the_corrected_target_with_damping_is_a_ridge_around_the_weight() -> None:
    weight, noisy, x = inputs(2)
    lam = 0.05 * (noisy.double().square().sum(0) / 200).mean()
    left = torch.cat((noisy.double() / 200**0.5, lam.sqrt() * torch.eye(32)))
    right = torch.cat((x.double() @ weight.double().T / 200**0.5, lam.sqrt() * weight.double().T))
    wanted = torch.linalg.lstsq(left, right).solution.T
    assert torch.allclose(corrected_target(weight, moments_of(noisy, x), damp=0.05).double(), wanted, atol=1e-4)


def test_equal_inputs_and_dead_channels_correct_nothing() -> None:
    weight, noisy, x = inputs(3)
    assert torch.allclose(corrected_target(weight, moments_of(x, x)), weight, atol=1e-4)
    noisy[:, 5] = 0
    corrected = corrected_target(weight, moments_of(noisy, x))
    assert torch.equal(corrected[:, 5], weight[:, 5])
    assert not torch.equal(corrected[:, 6], weight[:, 6])


def test_corrected_target_refuses() -> None:
    weight, noisy, x = inputs(4)
    moments = moments_of(noisy, x)
    with pytest.raises(UsageError, match="q_proj"):
        corrected_target(weight, Moments(1, moments.second, None, moments.amax, moments.mean_abs), name="q_proj")
    for strength in (-0.1, 1.1, torch.nan):
        with pytest.raises(UsageError, match="q_proj"):
            corrected_target(weight, moments, strength, name="q_proj")
    assert moments.cross is not None
    broken = Moments(1, moments.second, moments.cross * torch.nan, moments.amax, moments.mean_abs)
    with pytest.raises(NonFiniteError, match="q_proj"):
        corrected_target(weight, broken, name="q_proj")
