"""Scores of gradients against finite differences. Needs nothing."""

import torch
from torch import Tensor

from blockscale.checkpoint.linear import W4A16, QuantizedLinear
from blockscale.host.linear import KeptLinear, PackedLinear
from blockscale.quantization.search.choice_linear import ChoiceLinear, Switch
from blockscale.quantization.weight import quantize_tensor

K, N, OUT, TOKENS = 32, 16, 3, 5


def pack(kept: KeptLinear) -> PackedLinear:
    quantized = quantize_tensor(kept.weight.detach().float())
    return PackedLinear(QuantizedLinear(W4A16, quantized), kept.bias, is_emulating=True)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Perceptron:
    """x -> tanh(x A^T) B^T -> loss, whose first layer's output can be moved."""

    def __init__(self) -> None:
        self.switch = Switch()
        self.first, self.second = (
            ChoiceLinear(KeptLinear(drawn(n, k, seed=n).float(), None, name), name, {"nvfp4": pack}, self.switch)
            for name, n, k in (("a", N, K), ("b", OUT, N))
        )

    def loss(self, x: Tensor, moved: Tensor | None = None) -> Tensor:
        y = self.first(x)
        y = y if moved is None else y + moved
        return self.second(y.tanh() / 4).log_softmax(-1)[:, 0].sum()


def test_the_score_is_the_squared_first_order_change() -> None:
    model, x = Perceptron(), drawn(TOKENS, K, seed=0)
    model.switch.scores = {}
    model.loss(x.clone().requires_grad_()).backward()
    found = model.switch.scores["a", "nvfp4"]
    model.switch.scores = None

    step = 1e-5
    gradient = torch.zeros(TOKENS, N, dtype=torch.float64)
    for place in range(TOKENS * N):
        moved = torch.zeros(TOKENS * N, dtype=torch.float64)
        moved[place] = step
        moved = moved.view(TOKENS, N)
        gradient.view(-1)[place] = (model.loss(x, moved) - model.loss(x, -moved)) / (2 * step)
    y = model.first(x)
    model.switch.chosen = {"a": "nvfp4"}
    change = model.first(x) - y
    expected = (gradient * change).square().sum().item()
    assert expected > 0
    assert abs(found / expected - 1) < 1e-5  # fp32 inside, and the difference's own error


def test_a_choice_runs_the_option_and_only_its_group() -> None:
    model, x = Perceptron(), drawn(TOKENS, K, seed=1).float()
    plain = model.first(x), model.second(x[:, :N])
    model.switch.chosen = {"a": "nvfp4"}
    assert torch.equal(model.first(x), pack(model.first.kept)(x))
    assert not torch.equal(model.first(x), plain[0])
    assert torch.equal(model.second(x[:, :N]), plain[1])
    model.switch.chosen = {"a": "fp8"}  # which it does not have
    assert torch.equal(model.first(x), plain[0])


def test_no_scores_without_gradients() -> None:
    model = Perceptron()
    model.switch.scores = {}
    with torch.no_grad():
        model.loss(drawn(TOKENS, K, seed=2))
    assert model.switch.scores == {}
