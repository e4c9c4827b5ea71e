"""One site: the same job gives the same bytes, and what is chosen is the best of what was tried, as the linear runs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blockscale.algorithms.activation_scale import ActivationScale
from blockscale.checkpoint.linear import W4A4, W4A16, W8A8, W8A8_DYNAMIC, QuantizedLinear
from blockscale.formats.nvfp4 import decode_packed, encode_packed
from blockscale.formats.packing import pack_nibbles
from blockscale.host.linear import PackedLinear
from blockscale.quantization.layerwise.method import METHODS
from blockscale.quantization.layerwise.site import SiteJob, quantize_site
from blockscale.quantization.weight import quantize_tensor

from .jobs import NAMES, K, correlated, inputs, normal, site_job
from .running import is_equal


def run_linear(linear: QuantizedLinear, x: Tensor) -> Tensor:
    """As the host does."""
    return PackedLinear(linear, None, is_emulating=True, activation_scale=ActivationScale.FOUR_OVER_SIX)(x)


def squared_error(found: Tensor, expected: Tensor) -> float:
    return (found - expected).double().square().sum().item()


@pytest.fixture
def job(tmp_path: Path) -> SiteJob:
    return site_job(inputs(tmp_path, [correlated(96, 1), correlated(80, 3)], [correlated(40, 5)]))


@pytest.mark.parametrize("method", ["best", "gptq", "svdquant", "best-arc"])
def test_the_same_job_gives_the_same_bytes(method: str, tmp_path: Path) -> None:
    """With its tokens in memory, on disk, or the first of them in memory."""
    train, held = [correlated(96, 1), correlated(80, 3)], [correlated(40, 5)]
    results = []
    for limit in (1 << 30, 0, 96 * K * 4):
        seen = inputs(tmp_path / str(limit), train, held, limit)
        results.append(quantize_site(site_job(seen, method=method)))
    assert len(list(tmp_path.rglob("train/*"))) == 3, "some did go to disk"
    for other in results[1:]:
        for name in NAMES:
            assert is_equal(results[0].linears[name], other.linears[name])
            assert results[0].choices[name].losses == other.choices[name].losses


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("has_reference", [False, True])
def test_what_is_chosen_errs_least_on_held_back_tokens(seed: int, has_reference: bool, tmp_path: Path) -> None:
    """The losses are those of the linears as they run, and none is below the one that was chosen."""
    held = correlated(40, 50 + seed)
    seen = inputs(tmp_path / "seen", [correlated(200, 10 * seed)], [held])
    other = None
    wanted = held
    if has_reference:
        wanted = held + 0.2 * normal(40, K, seed=seed)
        other = inputs(tmp_path / "other", [correlated(200, 10 * seed) + 0.2 * normal(200, K, seed=7)], [wanted])
    job = site_job(seen, reference=other)
    result = quantize_site(job)
    choice = result.choices[NAMES[0]]
    candidates = METHODS["best"].candidates if has_reference else METHODS["best"].candidates[:3]
    assert set(choice.losses) == {c.name for c in candidates}
    assert choice.losses[choice.name] == min(choice.losses.values())
    error = sum(squared_error(run_linear(result.linears[m], held), wanted @ job.weights[m].T) for m in NAMES)
    assert error == pytest.approx(choice.losses[choice.name], rel=1e-4)
    # and "nearest" is what round to nearest gives
    nearest = quantize_tensor(torch.cat([job.weights[m] for m in NAMES]))
    plain = replace(result.linears[NAMES[0]], weight=nearest)
    target = torch.cat([wanted @ job.weights[m].T for m in NAMES], -1)
    assert squared_error(run_linear(plain, held), target) == pytest.approx(choice.losses["nearest"], rel=1e-4)


def test_a_way_that_only_fits_its_own_text_is_not_taken(tmp_path: Path) -> None:
    """A few tokens of a few dimensions, and others to judge by: making up for errors among the few ruins the others."""
    train = torch.zeros(64, K)
    train[:, :16] = normal(64, 2, seed=1) @ normal(2, 16, seed=2) * 10
    held = normal(200, K, seed=3)
    held[:, :16] *= 10
    choice = quantize_site(site_job(inputs(tmp_path, [train], [held]), scheme=W4A16)).choices[NAMES[0]]
    assert choice.losses["gptq"] > 1.5 * choice.losses["nearest"]
    assert choice.name != "gptq"


def on_grid(rows: int, seed: int) -> Tensor:
    """Weights that NVFP4 holds exactly, with a global scale of 1: a 6 in every block, and a block scale of 448."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(16, (rows, K), generator=generator, dtype=torch.uint8)
    codes[:, ::16] = 7
    scale = 2.0 ** torch.randint(-3, 4, (rows, K // 16), generator=generator).float()
    scale[0, 0] = 448
    return decode_packed(pack_nibbles(codes), scale.to(torch.float8_e4m3fn), torch.ones(()))


def test_a_smoothed_input_is_held_against_the_16_bit_one(tmp_path: Path) -> None:
    """x / s through W diag(s) is x through W, so weights on the grid and inputs of 16 bits lose nothing."""
    smoothing = 2.0 ** torch.arange(K).remainder(5).sub(2)
    x, held = normal(60, K, seed=1), normal(20, K, seed=2)
    seen = inputs(tmp_path / "seen", [x / smoothing], [held / smoothing])
    other = inputs(tmp_path / "other", [x], [held])
    weights = {name: on_grid(8, i) for i, name in enumerate(NAMES)}
    exact = quantize_site(site_job(seen, weights, reference=other, smoothing=smoothing, scheme=W4A16))
    for name in NAMES:
        assert exact.choices[name].losses["nearest"] == pytest.approx(0, abs=1e-4)
        assert exact.choices[name].losses[exact.choices[name].name] <= exact.choices[name].losses["nearest"]
        assert exact.linears[name].input_global_scale is None
    only_nearest = replace(METHODS["best"], candidates=METHODS["best"].candidates[:1])
    job = site_job(seen, weights, reference=other, smoothing=smoothing, scheme=W4A16, method=only_nearest)
    for name, linear in quantize_site(job).linears.items():
        assert torch.equal(linear.weight.dequantize(torch.float32), weights[name])
    unlike = quantize_site(site_job(seen, weights, reference=other, scheme=W4A16, method=only_nearest))
    assert unlike.choices[NAMES[0]].losses["nearest"] > 1


def test_fused_members_share_scales(job: SiteJob) -> None:
    weights = {**job.weights, "a.0.other": 5 * normal(16, K, seed=8)}
    result = quantize_site(site_job(job.inputs, weights))
    scales = {name: linear.weight.global_scale for name, linear in result.linears.items()}
    assert len({scales[name].item() for name in NAMES}) == 1
    assert scales["a.0.other"].item() > 2 * scales[NAMES[0]].item()
    assert len({linear.input_global_scale.item() for linear in result.linears.values()}) == 1, "one input"
    assert result.choices["a.0.other"].losses != result.choices[NAMES[0]].losses


def test_linears_of_one_site_in_different_formats(job: SiteJob) -> None:
    """As where attention and MLP run side by side, and a rule stores one of them in FP8."""
    schemes = {**dict.fromkeys(NAMES, W4A4), "a.0.gate_proj": W8A8, "a.0.c": W8A8_DYNAMIC, "a.0.d": W4A16}
    weights = {name: 0.1 * normal(32, K, seed=i) for i, name in enumerate(schemes)}
    result = quantize_site(site_job(job.inputs, weights, scheme=schemes, method="best-arc"))
    amax = torch.cat([*job.inputs.train, *job.inputs.held]).abs().amax().item()
    assert result.input_amax == amax
    found = result.linears
    assert {name: linear.scheme for name, linear in found.items()} == schemes
    assert found["a.0.gate_proj"].input_global_scale.item() == pytest.approx(amax / 448)
    assert found[NAMES[0]].input_global_scale.item() == pytest.approx(1.75 * amax / 2688), "room for searched scales"
    assert found["a.0.c"].input_global_scale is found["a.0.d"].input_global_scale is None
    for name in ("a.0.gate_proj", "a.0.c"):
        plain = quantize_tensor(weights[name], schemes[name].weight)
        assert torch.equal(found[name].weight.packed.view(torch.uint8), plain.packed.view(torch.uint8))
        assert torch.equal(found[name].weight.block_scale, plain.block_scale)
    alone = quantize_site(site_job(job.inputs, {n: weights[n] for n in NAMES}, method="best-arc"))
    assert all(is_equal(found[name], alone.linears[name]) for name in NAMES)
    has_residual = {name for name, linear in found.items() if linear.residual is not None}
    assert has_residual == set(NAMES), "only inputs in 4 bits have something to correct"


def test_residual_channels_correct_the_input(job: SiteJob) -> None:
    """The linear with them errs less than the same one without, on tokens that it has not seen."""
    result = quantize_site(replace(job, method=replace(METHODS["best-arc"], residual_channels=32)))
    held = correlated(100, 77)
    for name in NAMES:
        linear, target = result.linears[name], held @ job.weights[name].T
        assert linear.residual is not None
        assert linear.residual.channels.shape == (32,)
        assert 5 in linear.residual.channels, "the channel of large values"
        without = replace(linear, residual=None)
        assert squared_error(run_linear(linear, held), target) < 0.8 * squared_error(run_linear(without, held), target)


def test_a_low_rank_branch_is_judged_with_the_weight(job: SiteJob) -> None:
    result = quantize_site(replace(job, method=replace(METHODS["svdquant"], rank=8)))
    held = job.inputs.held_tokens()
    assert held is not None
    error = 0.0
    for name in NAMES:
        linear = result.linears[name]
        assert linear.low_rank is not None
        assert linear.low_rank.up.shape == (32, 8)
        assert linear.low_rank.up.dtype == torch.bfloat16
        error += squared_error(run_linear(linear, held), held @ job.weights[name].T)
    (loss,) = result.choices[NAMES[0]].losses.values()
    assert error == pytest.approx(loss, rel=1e-4)
    plain = quantize_site(replace(job, method=replace(METHODS["svdquant"], rank=0)))
    assert loss < next(iter(plain.choices[NAMES[0]].losses.values()))


def test_codes_decode_to_what_was_judged(job: SiteJob) -> None:
    result = quantize_site(job)
    rows = torch.cat([result.linears[m].weight.dequantize(torch.float32) for m in NAMES])
    assert torch.equal(rows, result.choices[NAMES[0]].rounded.decode())
    again = encode_packed(
        rows, result.choices[NAMES[0]].rounded.block_scale, result.linears[NAMES[0]].weight.global_scale
    )
    assert torch.equal(
        decode_packed(
            again, result.choices[NAMES[0]].rounded.block_scale, result.linears[NAMES[0]].weight.global_scale
        ),
        rows,
    )
