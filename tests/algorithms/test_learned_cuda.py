"""Smoothing, rotation, branches and learned rounding do on a GPU what they do on the CPU. Needs a GPU."""

from functools import partial

import pytest
import torch
from torch import Tensor

from blockscale.algorithms.awq import awq_scales, best_smoothing
from blockscale.algorithms.fake_quantize import round_activation
from blockscale.algorithms.hadamard import rotate
from blockscale.algorithms.learned_rounding import RoundingMethod, learn_rounding
from blockscale.algorithms.residual_channels import augment_input, choose_channels, residual_energy
from blockscale.algorithms.scale_sweep import best_block_scale
from blockscale.algorithms.svdquant import low_rank_branch
from blockscale.formats.nvfp4 import global_scale_from_amax
from blockscale.formats.spec import NVFP4
from blockscale.formats.tensor import decode, encode

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICES = ("cpu", "cuda")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def round_weight(weight: Tensor, scale: Tensor | None = None) -> Tensor:
    return decode(encode(weight, NVFP4))


def outlier_input() -> Tensor:
    """[512, 128]"""
    return normal(512, 128, seed=1) * normal(128, seed=2).exp()


def test_rotation() -> None:
    x = normal(7, 256)
    assert torch.equal(rotate(x, 128), rotate(x.cuda(), 128).cpu())


def test_smoothing() -> None:
    x, weight = outlier_input(), normal(64, 128, seed=3)

    def search(device: str) -> tuple[float, float]:
        seen, w = x.to(device), weight.to(device)

        def round_input(t: Tensor, scale: Tensor) -> Tensor:
            values, factor = round_activation(t, NVFP4, global_scale_from_amax(t.abs().amax()))
            return values * factor

        found = best_smoothing([w], seen, round_weight, round_input, awq_scales(seen.abs().mean(0), w))
        assert found.scale.device == seen.device
        return found.loss, found.baseline_loss

    here, there = (search(d) for d in DEVICES)
    assert there == pytest.approx(here, rel=1e-3)


def test_low_rank_branch() -> None:
    x, weight = outlier_input(), normal(64, 128, seed=4) + 3 * normal(64, 2, seed=5) @ normal(2, 128, seed=6)
    second = x.T @ x / len(x)
    here, there = (
        low_rank_branch(weight.to(d), 8, round_weight, second=second.to(d), input_error=second.to(d) * 0.01)
        for d in DEVICES
    )
    assert there.up.device.type == "cuda"
    assert there.baseline_loss == pytest.approx(here.baseline_loss, rel=1e-6)
    assert there.loss == pytest.approx(here.loss, rel=1e-2)


def test_residual_channels() -> None:
    x, weight = outlier_input(), normal(64, 128, seed=7)

    def augmented(device: str) -> Tensor:
        seen = x.to(device)
        round_input = partial(round_activation, fmt=NVFP4, scale=global_scale_from_amax(seen.abs().amax()))
        values, factor = round_input(seen)
        energy = residual_energy((seen - values * factor).square().mean(0), weight.to(device))
        return augment_input(seen, choose_channels(energy, 32), round_input)[0].cpu()

    here, there = (augmented(d) for d in DEVICES)
    assert torch.equal(here, there)


@pytest.mark.parametrize("method", RoundingMethod)
def test_learned_rounding(method: RoundingMethod) -> None:
    """Gradients' sums differ in their last bits and so do the paths; both must gain, and by about the same."""
    x, weight = normal(512, 3, seed=8) @ normal(3, 128, seed=9) + 0.3 * normal(512, 128, seed=10), normal(64, 128)
    global_scale = weight.abs().amax() / 1536
    block_scale = best_block_scale(weight, global_scale)
    gains = []
    for device in DEVICES:
        w, seen = weight.to(device), x.to(device)
        found = learn_rounding(
            lambda weights, batch, w=w: (batch @ (weights["w"] - w).T).square().mean(),
            {"w": w},
            {"w": block_scale.to(device)},
            {"w": global_scale},  # on the CPU, as recipes hold it
            batches=list(seen[:384].split(128)),
            held_back=[seen[384:]],
            method=method,
            steps=100,
        )
        assert found.tensors["w"][0].device.type == device
        gains.append(1 - found.loss / found.start_loss)
    assert min(gains) > 0.3
    assert gains[1] == pytest.approx(gains[0], abs=0.1)
