"""Sites with hardly any tokens, dead channels, and matrices that cannot be factored."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blockscale.algorithms.statistics import Moments, add_moments, finish, new_moments
from blockscale.checkpoint.linear import W4A4, W4A16, QuantizedLinear, Scheme
from blockscale.errors import UsageError
from blockscale.quantization.layerwise.method import METHODS
from blockscale.quantization.layerwise.rounding import Judge, choose
from blockscale.quantization.layerwise.site import quantize_site
from blockscale.quantization.weight import quantize_tensor

from .jobs import NAMES, K, correlated, inputs, normal, site_job

METHOD_NAMES = ["best", "gptq", "awq", "svdquant", "best-arc"]
NONE = torch.empty(0, K)


def is_sound(linear: QuantizedLinear, weight: Tensor) -> None:
    """Every scale positive and finite, and the values near the weight's."""
    stored = linear.weight
    assert torch.isfinite(stored.global_scale)
    assert stored.global_scale > 0
    scales = stored.block_scale.float()
    assert torch.isfinite(scales).all()
    assert (scales > 0).all()
    if linear.input_global_scale is not None:
        assert torch.isfinite(1 / linear.input_global_scale)
        assert linear.input_global_scale > 0
    values = stored.dequantize(torch.float32)
    if linear.low_rank is not None:
        values = values + linear.low_rank.up.float() @ linear.low_rank.down.float()
    assert (values - weight).norm() < 0.3 * weight.norm()


@pytest.mark.parametrize("scheme", [W4A4, W4A16], ids=["w4a4", "w4a16"])
@pytest.mark.parametrize("method", METHOD_NAMES)
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_few_or_none(tokens: int, method: str, scheme: Scheme, tmp_path: Path) -> None:
    job = site_job(inputs(tmp_path, [NONE, correlated(tokens, 1)], [NONE]), method=method, scheme=scheme)
    result = quantize_site(job)
    assert result.num_tokens == tokens
    for name in NAMES:
        is_sound(result.linears[name], job.weights[name])
        assert result.choices[name].losses == {}
    if not tokens:
        assert result.input_amax is None
        plain = quantize_tensor(torch.cat([job.weights[m] for m in NAMES]))
        if method == "best":
            assert torch.equal(torch.cat([result.linears[m].weight.packed for m in NAMES]), plain.packed)


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_inputs_of_zeros(method: str, tmp_path: Path) -> None:
    job = site_job(inputs(tmp_path, [torch.zeros(40, K)], [torch.zeros(8, K)]), method=method)
    result = quantize_site(job)
    assert result.input_amax == 0
    for name in NAMES:
        is_sound(result.linears[name], job.weights[name])
        assert result.linears[name].input_global_scale == 1
        assert set(result.choices[name].losses.values()) == {0.0}
    if method == "best":
        assert result.choices[NAMES[0]].name == "nearest", "of equals the plainest"


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_dead_channels(method: str, tmp_path: Path) -> None:
    """Channels that calibration never touched, one whole block among them, keep sound values."""
    dead = [*range(16, 32), 40, 41]
    train, held = correlated(100, 1), correlated(30, 3)
    train[:, dead] = held[:, dead] = 0
    job = site_job(inputs(tmp_path, [train], [held]), method=method)
    for name, linear in quantize_site(job).linears.items():
        is_sound(linear, job.weights[name])
        if linear.low_rank is None:
            values, weight = linear.weight.dequantize(torch.float32)[:, dead], job.weights[name][:, dead]
            assert (values - weight).norm() < 0.3 * weight.norm()


def test_weights_of_zeros(tmp_path: Path) -> None:
    seen = inputs(tmp_path, [correlated(50, 1)], [correlated(10, 3)])
    for method in METHOD_NAMES:
        result = quantize_site(site_job(seen, {"a": torch.zeros(16, K)}, method=method))
        linear = result.linears["a"]
        assert not linear.weight.dequantize(torch.float32).any()
        assert torch.isfinite(1 / linear.weight.global_scale)
        assert result.choices["a"].losses[result.choices["a"].name] == 0


def pooled(*parts: Tensor) -> Moments:
    sums = new_moments(K)
    for part in parts:
        add_moments(sums, part)
    return finish(sums)


def test_an_expert_without_tokens_leans_on_its_siblings(tmp_path: Path) -> None:
    siblings = correlated(300, 1)
    weights = {"m.experts.3.down_proj": 0.1 * normal(32, K, seed=0)}
    empty, few = inputs(tmp_path / "e", [NONE], [NONE]), inputs(tmp_path / "f", [correlated(2, 9)], [NONE])
    lean = quantize_site(site_job(empty, weights, pooled=pooled(siblings), method="gptq"))
    linear = lean.linears["m.experts.3.down_proj"]
    is_sound(linear, weights["m.experts.3.down_proj"])
    assert lean.num_tokens == 0
    assert lean.input_amax == siblings.abs().amax().item()
    assert linear.input_global_scale is not None

    def error(found: QuantizedLinear) -> float:
        change = found.weight.dequantize(torch.float32) - weights["m.experts.3.down_proj"]
        return (siblings @ change.T).square().sum().item()

    alone = quantize_site(site_job(empty, weights, method="gptq")).linears["m.experts.3.down_proj"]
    own = quantize_site(site_job(few, weights, pooled=pooled(siblings), method="gptq"))
    assert error(linear) < 0.8 * error(alone), "their tokens say which channels count"
    assert error(own.linears["m.experts.3.down_proj"]) < 0.8 * error(alone)
    assert own.input_amax == few.train._places[0].abs().amax().item()


def indefinite() -> Moments:
    second = torch.full((K, K), 1e9)
    second.diagonal().fill_(1.0)
    return Moments(100, second, None, torch.ones(K), torch.ones(K))


def test_a_hessian_that_is_not_positive_definite() -> None:
    """It cannot come from tokens. What needs it is passed over, and refused by name where nothing else is tried."""
    weight, held = 0.1 * normal(32, K, seed=1), normal(20, K, seed=2)
    choice = choose(weight, indefinite(), METHODS["best"], Judge(held, held @ weight.T), "layer 3's q_proj")
    assert set(choice.losses) == {"nearest", "sweep"}
    with pytest.raises(UsageError, match="layer 3's q_proj: the Hessian is not positive definite"):
        choose(weight, indefinite(), METHODS["gptq"], None, "layer 3's q_proj")


def test_tokens_of_less_dimensions_than_channels(tmp_path: Path) -> None:
    """Equal tokens, a thousandfold: the Hessian has rank 1 and is damped."""
    train = correlated(1, 1).expand(1000, -1).contiguous() * 1e3
    job = site_job(inputs(tmp_path, [train], []), method=replace(METHODS["gptq"], damp=0.0))
    result = quantize_site(job)
    for name in NAMES:
        found = train[:1] @ (result.linears[name].weight.dequantize(torch.float32) - job.weights[name]).T
        plain = train[:1] @ (quantize_tensor(job.weights[name]).dequantize(torch.float32) - job.weights[name]).T
        assert found.norm() < 0.5 * plain.norm()
