"""Learned rounding: against every choice there is, its gradients against autograd, and never worse than its start."""

from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockscale.algorithms import autoround, faar
from blockscale.algorithms.learned_rounding import LearnedRounding, RoundingMethod, learn_rounding
from blockscale.algorithms.scale_sweep import best_block_scale
from blockscale.errors import FormatError, NonFiniteError, UsageError
from blockscale.formats.minifloat import decode_table
from blockscale.formats.nvfp4 import decode_packed, encode_packed
from blockscale.formats.packing import pack_nibbles, unpack_nibbles
from blockscale.formats.spec import E2M1

from .exhaustive import LEVELS

each_method = pytest.mark.parametrize("method", RoundingMethod)
each_module = pytest.mark.parametrize("module", [autoround, faar])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def start_of(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, block_scale, global_scale) of round to nearest with swept scales."""
    global_scale = weight.abs().amax() / (6 * 256)
    block_scale = best_block_scale(weight, global_scale)
    return unpack_nibbles(encode_packed(weight, block_scale, global_scale)), block_scale, global_scale


def decoded(result: LearnedRounding, name: str, global_scale: Tensor) -> Tensor:
    codes, block_scale = result.tensors[name]
    return decode_packed(pack_nibbles(codes), block_scale, global_scale)


def correlated_input(tokens: int, k: int, seed: int) -> Tensor:
    """[tokens, k]: all channels follow a few directions, as a transformer's do."""
    return normal(tokens, 2, seed=seed) @ normal(2, k, seed=seed + 1) + 0.3 * normal(tokens, k, seed=seed + 2)


def output_loss(weight: Tensor, name: str = "w") -> Any:
    """Mean squared output error on a batch of inputs [T, K]."""

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return (x @ (weights[name] - weight).T).square().mean()

    return loss


def learn(weight: Tensor, batches: list[Tensor], **options: Any) -> LearnedRounding:
    _, block_scale, global_scale = start_of(weight)
    return learn_rounding(
        output_loss(weight), {"w": weight}, {"w": block_scale}, {"w": global_scale}, batches=batches, **options
    )


def best_of_all(weight: Tensor, x: Tensor) -> float:
    """Least mean squared output error of all 2^16 choices between the levels around each of 16 weights [1, 16]."""
    _, block_scale, global_scale = start_of(weight)
    step = block_scale.double().item() * global_scale.double().item()
    position = weight[0].double() / step
    low = torch.searchsorted(LEVELS[1:-1], position.abs().contiguous(), right=True)
    around = torch.stack((LEVELS[low], LEVELS[low + 1])) * position.sign() * step  # [2, 16]
    choices = (torch.arange(2**16).unsqueeze(1) >> torch.arange(16)) & 1  # [65536, 16]
    error = torch.where(choices == 1, around[1], around[0]) - weight.double()
    second = x.double().T @ x.double() / len(x)
    return ((error @ second) * error).sum(-1).min().item()


@pytest.mark.parametrize(("method", "lr"), [(RoundingMethod.AUTOROUND, 1 / 200), (RoundingMethod.FAAR, 0.01)])
def test_comes_close_to_the_best_of_all_choices(method: RoundingMethod, lr: float) -> None:
    """A local search: it finds the very best now and then, and more than half of what there is to gain on average."""
    closed, num_best = [], 0
    for seed in range(12):
        weight, x = normal(1, 16, seed=seed), correlated_input(256, 16, seed + 50)
        best = best_of_all(weight, x)
        found = learn(weight, [x], method=method, steps=200, lr=lr, num_checks=50, scale_lr=0.0)
        assert best * (1 - 1e-5) <= found.loss <= found.start_loss
        assert found.start_loss > best * (1 + 1e-5), "round to nearest is not the best"
        closed.append((found.start_loss - found.loss) / (found.start_loss - best))
        num_best += found.loss <= best * (1 + 1e-5)
    assert num_best >= 2
    assert sum(closed) / len(closed) > 0.5


@each_module
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**20))
def test_any_codes_come_back_at_the_start(module: ModuleType, seed: int) -> None:
    weight = normal(4, 3, 16, seed=seed) * normal(4, 3, 1, seed=seed + 1).exp()
    codes = torch.randint(0, 16, (4, 3, 16), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    scale = torch.rand(4, 3, 1, generator=torch.Generator().manual_seed(seed)).add(0.1).to(torch.float8_e4m3fn).float()
    found, found_scale = module.chosen(module.start(weight, codes, scale, torch.tensor(0.7)))
    table = decode_table(E2M1)
    assert torch.equal(table[found.int()], table[codes.int()]), "values: 0 has two codes"
    assert torch.equal(found_scale, scale)


@each_module
def test_nearest_codes_come_back_byte_for_byte(module: ModuleType) -> None:
    weight = normal(64, 64, seed=1)
    weight[0, :16] = 0.0
    weight[0, 16:20] = torch.tensor([-0.0, 0.0, -1e-6, 1e-6])
    codes, block_scale, global_scale = start_of(weight)
    state = module.start(weight.view(64, 4, 16), codes.view(64, 4, 16), block_scale.float().unsqueeze(-1), global_scale)
    found, scale = module.chosen(state)
    assert torch.equal(found.view(64, 64), codes)
    assert torch.equal(scale.squeeze(-1), block_scale.float())


def test_faar_gives_minus_zero_one_sign_throughout() -> None:
    codes = torch.zeros(1, 1, 16, dtype=torch.uint8)
    state = faar.start(torch.full((1, 1, 16), -0.0), codes, torch.ones(1, 1, 1), torch.tensor(1.0))
    state.choice.fill_(1.0)
    soft, hard = faar.forward_weight(state, 1.0), decode_table(E2M1)[faar.chosen(state)[0].int()]
    assert torch.allclose(soft, hard, atol=1e-6)
    assert (hard == 0.5).all()


def test_autorounds_steps_are_signs_of_the_straight_through_gradient() -> None:
    weight, scale, global_scale = normal(3, 2, 16, seed=2) * 2, torch.full((3, 2, 1), 0.75), torch.tensor(0.5)
    gradient, lr = normal(3, 2, 16, seed=3), 0.01
    offset = normal(3, 2, 16, seed=4) * 0.1
    state = autoround.AutoRoundState(weight / 0.375, scale, global_scale, offset.clone(), torch.ones(3, 2, 1))
    offset.requires_grad_()
    multiplier = torch.ones(3, 2, 1, requires_grad=True)
    # the same weight, with rounding passed through, for autograd
    moved_scale = scale * multiplier
    base = state.position * scale / moved_scale
    z = (base + offset * autoround.local_step(base).detach()).clamp(-6, 6)
    rounded = decode_table(E2M1)[autoround.chosen(state)[0].int()]
    expected = (z + (rounded - z).detach()) * moved_scale * global_scale
    assert torch.allclose(expected, autoround.forward_weight(state, 0.0))
    assert (z.abs() == 6).any(), "some saturate"
    (expected * gradient).sum().backward()
    autoround.update(state, gradient, lr, lr / 2, 0.0)
    assert torch.allclose(state.offset, offset - lr * offset.grad.sign())
    assert torch.allclose(state.multiplier, 1 - lr / 2 * multiplier.grad.sign())


@pytest.mark.parametrize("progress", [0.0, 0.6])
def test_faars_first_step_follows_the_gradient(progress: float) -> None:
    """Adam's first step is the learning rate against the gradient's sign."""
    weight, scale, global_scale = normal(3, 2, 16, seed=5), torch.full((3, 2, 1), 0.75), torch.tensor(0.5)
    codes = unpack_nibbles(encode_packed(weight.flatten(1), scale.squeeze(-1), global_scale)).view(3, 2, 16)
    gradient, lr = normal(3, 2, 16, seed=6), 0.001
    state = faar.start(weight, codes, scale, global_scale)
    state.choice.copy_(torch.rand(3, 2, 16, generator=torch.Generator().manual_seed(7)) * 0.8 + 0.1)
    before = state.choice.clone()
    choice, multiplier = before.clone().requires_grad_(), torch.ones(3, 2, 1, requires_grad=True)
    index = faar.lower_level(state.position)
    low, high = LEVELS.float()[index], LEVELS.float()[index + 1]
    sharp = faar._sharpness(progress)
    soft = low + torch.sigmoid(sharp * (choice - 0.5)) * (high - low)
    expected = soft * state.position.sign() * scale * multiplier * global_scale
    assert torch.allclose(expected, faar.forward_weight(state, progress))
    (expected * gradient).sum().backward()
    faar.update(state, gradient, lr, lr / 2, progress)
    pull = faar._PULL * choice.grad.abs().mean() * 4 * (1 - 2 * before)
    assert torch.allclose(state.choice, before - lr * (choice.grad + pull).sign(), rtol=0, atol=1e-5)
    assert torch.allclose(state.multiplier, 1 - lr / 2 * multiplier.grad.sign(), rtol=0, atol=1e-5)


@each_method
@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from([0.0, 0.02, 0.5]), st.sampled_from([0.0, 0.01, 3.0]))
def test_never_worse_than_its_start(method: RoundingMethod, seed: int, scale_lr: float, lr: float) -> None:
    weight = normal(5, 32, seed=seed)
    batches = [correlated_input(16, 32, seed + i) for i in range(3)]
    held_back = [correlated_input(16, 32, seed + 9)]
    start, block_scale, global_scale = start_of(weight)
    codes = torch.where(torch.rand(5, 32, generator=torch.Generator().manual_seed(seed)) < 0.1, start ^ 1, start)
    found = learn_rounding(
        output_loss(weight),
        {"w": weight},
        {"w": block_scale},
        {"w": global_scale},
        batches=batches,
        held_back=held_back,
        codes={"w": codes},
        method=method,
        steps=7,
        lr=lr,
        scale_lr=scale_lr,
    )
    loss = output_loss(weight)
    first = loss({"w": decode_packed(pack_nibbles(codes), block_scale, global_scale)}, held_back[0]).item()
    assert found.start_loss == first
    assert found.loss <= found.start_loss
    assert found.loss == loss({"w": decoded(found, "w", global_scale)}, held_back[0]).item()
    if found.best_step == 0:
        assert torch.equal(found.tensors["w"][0], codes)
    if not scale_lr or found.best_step == 0:
        assert torch.equal(found.tensors["w"][1].float(), block_scale.float())


@each_method
def test_what_it_gains_on_correlated_inputs(method: RoundingMethod) -> None:
    weight = normal(32, 64, seed=11)
    inputs = correlated_input(2048, 64, 12)
    found = learn(weight, list(inputs[:1536].split(256)), held_back=[inputs[1536:]], method=method, steps=150)
    assert found.loss < 0.6 * found.start_loss


@each_method
def test_learns_scales_that_start_too_large(method: RoundingMethod) -> None:
    """The codes are right and every scale is one E4M3 code too large: only another scale can help."""
    codes, scale, global_scale = start_of(normal(8, 32, seed=13))
    weight = decode_packed(pack_nibbles(codes), scale, global_scale)
    too_large = (scale.view(torch.uint8) + 1).view(torch.float8_e4m3fn)
    arguments = output_loss(weight), {"w": weight}, {"w": too_large}, {"w": global_scale}
    options: dict[str, Any] = {"batches": [normal(256, 32, seed=14)], "codes": {"w": codes}, "method": method}
    kept, learned = (learn_rounding(*arguments, steps=100, scale_lr=rate, **options) for rate in (0.0, 0.003))
    assert torch.equal(kept.tensors["w"][1].view(torch.uint8), too_large.view(torch.uint8))
    assert learned.loss < 0.1 * learned.start_loss
    assert learned.loss < 0.5 * kept.loss


def two_layers(w: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x @ w["up"].T) @ w["down"].T


@each_method
def test_two_weights_learn_together(method: RoundingMethod) -> None:
    true = {"up": normal(48, 32, seed=15) / 6, "down": normal(16, 48, seed=16) / 7, "spare": normal(2, 16, seed=17)}
    x = correlated_input(512, 32, 18)

    def loss(weights: dict[str, Tensor], batch: Tensor) -> Tensor:
        return (two_layers(weights, batch) - two_layers(true, batch)).square().mean()

    starts = {n: start_of(w) for n, w in true.items()}
    scales, factors = {n: s[1] for n, s in starts.items()}, {n: s[2] for n, s in starts.items()}
    found = learn_rounding(
        loss, true, scales, factors, batches=list(x[:384].split(96)), held_back=[x[384:]], method=method, steps=100
    )
    assert found.loss < 0.9 * found.start_loss
    assert all((found.tensors[n][0] != starts[n][0]).any() for n in ("up", "down"))
    assert torch.equal(found.tensors["spare"][0], starts["spare"][0]), "nothing depends on it"


@each_method
def test_a_seed_settles_everything(method: RoundingMethod) -> None:
    weight = normal(8, 32, seed=20)
    batches = [correlated_input(64, 32, 21)[8 * i : 8 * i + 8] for i in range(5)]
    first, again, other = (
        learn(weight, batches, held_back=[correlated_input(64, 32, 21)], method=method, steps=23, lr=0.02, seed=s)
        for s in (1, 1, 2)
    )
    assert first.loss == again.loss
    assert torch.equal(first.tensors["w"][0], again.tensors["w"][0])
    assert torch.equal(first.tensors["w"][1].view(torch.uint8), again.tensors["w"][1].view(torch.uint8))
    assert (first.loss, first.best_step) != (other.loss, other.best_step)


@each_method
def test_experts_in_one_stack_learn_as_on_their_own(method: RoundingMethod) -> None:
    stack, x = normal(3, 4, 32, seed=40) * torch.tensor([1.0, 3.0, 0.2]).view(3, 1, 1), correlated_input(64, 32, 41)
    starts = [start_of(w) for w in stack]
    scale = torch.stack([s[1].view(torch.uint8) for s in starts]).view(torch.float8_e4m3fn)
    factor = torch.stack([s[2] for s in starts]).view(3, 1, 1)

    def loss(weights: dict[str, Tensor], batch: Tensor) -> Tensor:
        return (batch @ (weights["w"] - stack).transpose(1, 2)).square().sum()

    options: dict[str, Any] = {"batches": [x], "method": method, "steps": 20}
    together = learn_rounding(loss, {"w": stack}, {"w": scale}, {"w": factor}, **options)
    assert together.tensors["w"][0].shape == stack.shape
    assert together.tensors["w"][1].shape == scale.shape
    restored = torch.stack(
        [decode_packed(pack_nibbles(c), s, g) for c, s, g in zip(*together.tensors["w"], factor.flatten(), strict=True)]
    )
    assert loss({"w": restored}, x).item() == together.loss


def test_no_steps_is_round_to_nearest() -> None:
    weight = normal(4, 32, seed=50)
    codes, block_scale, _ = start_of(weight)
    found = learn(weight, [normal(4, 32)], steps=0)
    assert torch.equal(found.tensors["w"][0], codes)
    assert torch.equal(found.tensors["w"][1].float(), block_scale.float())
    assert (found.best_step, found.loss) == (0, found.start_loss)


@each_method
def test_a_zero_weight_stays_zero(method: RoundingMethod) -> None:
    weight = torch.zeros(2, 32)
    one = torch.ones(2, 2).to(torch.float8_e4m3fn)
    found = learn_rounding(
        output_loss(weight),
        {"w": weight},
        {"w": one},
        {"w": torch.tensor(1.0)},
        batches=[normal(8, 32)],
        method=method,
        steps=10,
    )
    assert found.loss == 0
    assert not found.tensors["w"][0].any()


@each_method
def test_inside_inference_mode(method: RoundingMethod) -> None:
    weight, x = normal(4, 32, seed=51), correlated_input(64, 32, 52)
    expected = learn(weight, [x], method=method, steps=10, lr=0.1)
    with torch.inference_mode():
        found = learn(weight, [x], method=method, steps=10, lr=0.1)
    assert torch.equal(found.tensors["w"][0], expected.tensors["w"][0])


@each_method
def test_a_batch_of_nan_moves_nothing(method: RoundingMethod) -> None:
    weight, x = normal(4, 32, seed=53), correlated_input(64, 32, 54)
    bad = torch.full_like(x, torch.nan)
    nothing = learn(weight, [bad], held_back=[x], method=method, steps=5, lr=0.5)
    assert nothing.best_step == 0
    some = learn(weight, [bad, x], held_back=[x], method=method, steps=100)
    assert some.loss < some.start_loss


def test_bad_input_is_named() -> None:
    weight, x = normal(4, 32, seed=55), normal(8, 32)
    _, block_scale, global_scale = start_of(weight)
    with pytest.raises(NonFiniteError, match="before the first step"):
        learn(weight, [x * torch.nan])
    with pytest.raises(UsageError, match="batches"):
        learn(weight, [])
    with pytest.raises(FormatError, match="w: block scales"):
        learn_rounding(output_loss(weight), {"w": weight}, {"w": block_scale[:, :1]}, {"w": global_scale}, batches=[x])
    with pytest.raises(FormatError, match="w: block scales"):
        learn_rounding(output_loss(weight), {"w": weight}, {"w": block_scale.float()}, {"w": global_scale}, batches=[x])
    codes = {"w": torch.zeros(4, 16, dtype=torch.uint8)}
    with pytest.raises(FormatError, match="w: codes"):
        learn(weight, [x], codes=codes)
