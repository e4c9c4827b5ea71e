"""Values of the rounded tensor, gradients of the other one."""

import pytest
import torch
from torch import Tensor

from blockscale.algorithms.fake_quantize import ActivationScale, round_activation
from blockscale.algorithms.straight_through import straight_through
from blockscale.formats.spec import FP8, FP8_TOKEN, MXFP4, NVFP4, Format


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rounded_values_come_out_bit_for_bit(dtype: torch.dtype) -> None:
    x, rounded = normal(4, 32).to(dtype).requires_grad_(), normal(4, 32, seed=1)
    rounded[0, :2] = torch.tensor([-0.0, 3e38])
    found = straight_through(x, rounded)
    assert torch.equal(found.detach().view(torch.int32), rounded.view(torch.int32))


def test_the_gradient_is_that_of_a_division() -> None:
    x = normal(4, 32).bfloat16().requires_grad_()
    rounded, factor, upstream = normal(4, 32, seed=1), normal(4, 1, seed=2).abs(), normal(4, 32, seed=3)
    straight_through(x, rounded, factor).backward(upstream)
    assert x.grad is not None
    assert torch.equal(x.grad, (upstream / factor).bfloat16())


def test_without_gradients_nothing_is_made() -> None:
    x, rounded = normal(4), normal(4, seed=1)
    assert straight_through(x, rounded) is rounded
    with torch.no_grad():
        assert straight_through(x.clone().requires_grad_(), rounded) is rounded


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4, FP8, FP8_TOKEN], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("method", ActivationScale)
def test_rounded_activations_are_the_same_with_a_gradient(fmt: Format, method: ActivationScale) -> None:
    x, scale, upstream = normal(3, 64) * 4, torch.tensor(0.01), normal(3, 64, seed=1)
    scale = scale if fmt in (NVFP4, FP8) else None
    plain, factor = round_activation(x, fmt, scale, method)
    learning = x.clone().requires_grad_()
    values, same = round_activation(learning, fmt, scale, method)
    assert torch.equal(values, plain)
    assert torch.equal(same, factor)
    values.backward(upstream)
    assert learning.grad is not None
    assert torch.equal(learning.grad, upstream / factor)
