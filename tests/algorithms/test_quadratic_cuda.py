"""GPTQ, coordinate descent and the searches do on a GPU what they do on the CPU. Needs a GPU."""

import pytest
import torch
from torch import Tensor

from blockscale.algorithms.coordinate_descent import quadratic_error, refine_codes_and_scales
from blockscale.algorithms.gptq import corrected_target, gptq
from blockscale.algorithms.scale_sweep import best_block_scale, best_block_scale_hessian
from blockscale.algorithms.statistics import add_moments, block_hessians, finish, new_moments

from .quadratic import layer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_the_same_errors_as_on_the_cpu() -> None:
    """Sums are taken in another order, so near ties may fall the other way; the error may not change by more."""
    problem = layer(128, 256, 512, seed=1, dead=3)
    g = problem.weight.abs().amax() / 1536

    def run(device: str) -> list[Tensor]:
        weight, hessian, scale = (t.to(device) for t in (problem.weight, problem.hessian, g))
        found = []
        for block_scale in (
            best_block_scale(weight, scale, importance=hessian.diagonal()),
            best_block_scale_hessian(weight, scale, block_hessians(hessian)),
        ):
            codes = gptq(weight, hessian, block_scale, scale)
            refined = refine_codes_and_scales(weight, hessian, codes, block_scale, scale)
            found += [quadratic_error(weight, hessian, codes, block_scale, scale).sum()]
            found += [quadratic_error(weight, hessian, *refined, scale).sum()]
        return [error.cpu() for error in found]

    for here, there in zip(run("cpu"), run("cuda"), strict=True):
        assert there.item() == pytest.approx(here.item(), rel=1e-2)


def test_moments_and_targets() -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(300, 64, generator=generator), torch.randn(8, 64, generator=generator)
    noisy = x + 0.1 * torch.randn(300, 64, generator=generator)
    targets = []
    for device in ("cpu", "cuda"):
        sums = new_moments(64, device)
        add_moments(sums, noisy.to(device), x.to(device))
        targets.append(corrected_target(weight.to(device), finish(sums)).cpu())
    assert torch.allclose(*targets, atol=1e-4)
