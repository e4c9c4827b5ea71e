"""Latents: their steps are Adam's along the straight-through gradient, and they may leave the cell they start in."""

import torch
from torch import Tensor

from blockscale.algorithms import latent, learned_vectors
from blockscale.formats.minifloat import decode_table
from blockscale.formats.spec import E2M1


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def state_at(latents: Tensor, scale: float = 0.75, global_scale: float = 0.5) -> latent.LatentState:
    block_scale = torch.full((*latents.shape[:-1], 1), scale)
    codes = torch.zeros(latents.shape, dtype=torch.uint8)
    state = latent.start(latents * scale * global_scale, codes, block_scale, torch.tensor(global_scale))
    state.latent.copy_(latents)
    return state


def test_the_first_step_is_the_learning_rate_against_the_gradient() -> None:
    state, gradient = state_at(normal(3, 2, 16) * 2), normal(3, 2, 16, seed=1)
    before = state.latent.clone()
    # the same weight, with rounding passed through, for autograd
    u, m = before.clone().requires_grad_(), torch.ones(3, 2, 1, requires_grad=True)
    scale = 0.75 * m
    z = u * 0.75 / scale
    rounded = decode_table(E2M1)[latent.chosen(state)[0].int()]
    weight = (z + (rounded - z).detach()) * scale * 0.5
    assert torch.allclose(weight, latent.forward_weight(state, 0.0))
    (weight * gradient).sum().backward()
    assert u.grad is not None
    assert m.grad is not None
    latent.update(state, gradient, 0.01, 0.002, 0.0)
    # Adam's first step is the sign, of whatever size the gradient is
    assert torch.allclose(state.latent, before - 0.01 * u.grad.sign(), rtol=0, atol=1e-6)
    assert torch.allclose(state.multiplier, 1 - 0.002 * m.grad.sign(), rtol=0, atol=1e-6)


def test_gradients_that_disagree_move_less_than_those_that_agree() -> None:
    agreeing, disagreeing = state_at(torch.zeros(1, 1, 16)), state_at(torch.zeros(1, 1, 16))
    for step in range(20):
        latent.update(agreeing, torch.ones(1, 1, 16), 0.01, 0.0, 0.0)
        latent.update(disagreeing, torch.full((1, 1, 16), (-1.0) ** step), 0.01, 0.0, 0.0)
    assert torch.allclose(agreeing.latent, torch.tensor(-0.2), atol=1e-5)
    assert (disagreeing.latent.abs() < 0.02).all()
    assert torch.equal(agreeing.multiplier, torch.ones(1, 1, 1)), "no learning rate, no step"


def test_a_latent_passes_through_cells_and_stops_beyond_the_last() -> None:
    state = state_at(torch.full((1, 1, 16), -5.9))
    seen = set()
    for _ in range(200):
        latent.update(state, -torch.ones(1, 1, 16), 0.1, 0.0, 0.0)
        seen |= set(decode_table(E2M1)[latent.chosen(state)[0].int()].flatten().tolist())
    assert seen == {-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0}
    assert (state.latent == 7).all()


def test_a_tiny_gradient_counts_as_much_as_a_large_one() -> None:
    """The mean over many tokens, by one of very many weights."""
    state = state_at(torch.zeros(1, 1, 16))
    latent.update(state, torch.full((1, 1, 16), 1e-12), 0.01, 0.0, 0.0)
    assert torch.allclose(state.latent, torch.tensor(-0.01), rtol=0.05)


def test_vectors_are_seen_as_they_will_be_stored() -> None:
    vector = normal(64).bfloat16()
    state = learned_vectors.start(vector)
    assert torch.equal(learned_vectors.chosen(state), vector)
    learned_vectors.update(state, torch.ones(64), 0.01)
    size = vector.float().square().mean().sqrt()
    assert torch.allclose(state.latent, vector.float() - 0.01 * size, rtol=0, atol=1e-6)
    assert torch.equal(learned_vectors.forward_vector(state), state.latent.bfloat16().float())
    assert learned_vectors.chosen(state).dtype == torch.bfloat16


def test_small_steps_add_up_although_each_is_lost_in_16_bits() -> None:
    state = learned_vectors.start(torch.ones(4, dtype=torch.bfloat16))
    for _ in range(10):
        learned_vectors.update(state, torch.ones(4), 1e-3)
    assert (learned_vectors.chosen(state) < 1).all()


def test_what_was_chosen_stays_as_it_was() -> None:
    state = learned_vectors.start(torch.ones(4))
    chosen = learned_vectors.chosen(state)
    learned_vectors.update(state, torch.ones(4), 0.1)
    assert torch.equal(chosen, torch.ones(4))
