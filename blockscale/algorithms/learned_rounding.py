"""Codes and block scales of several weights learned together from the loss of what they are part of.

The loss is the caller's: the output error of one decoder layer on what the quantized model feeds it, or the divergence
of the whole model. Each step shows it one batch and the weights as decoded, takes the gradient by them, and moves the
parameters of `autoround`, `faar` or `latent`, with a learning rate that falls linearly to 0. Vectors, such as the gains
of norms, may learn along. Now and then, and at the end, the codes as they then stand are judged on the held-back
batches; the best are returned, and those given at the start are among them, so the result is never worse than its start
there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor

from blockscale.algorithms import autoround, faar, latent, learned_vectors
from blockscale.errors import FormatError, NonFiniteError, UsageError
from blockscale.formats.minifloat import decode_table, encode
from blockscale.formats.spec import E2M1, NVFP4


class RoundingMethod(Enum):
    """AUTOROUND: signs of straight-through gradients. FAAR: a sigmoid between two levels, sharpened. LATENT: a weight
    behind each code, moved by Adam."""

    AUTOROUND = "autoround"
    FAAR = "faar"
    LATENT = "latent"


_METHOD: dict[RoundingMethod, ModuleType] = {
    RoundingMethod.AUTOROUND: autoround,
    RoundingMethod.FAAR: faar,
    RoundingMethod.LATENT: latent,
}
# what the learning rates of all steps add up to
_TRAVEL = {RoundingMethod.AUTOROUND: 0.125, RoundingMethod.FAAR: 0.5, RoundingMethod.LATENT: 0.5}
_SCALE_SHARE = 0.2


@dataclass(frozen=True)
class LearnedRounding:
    """What was learned. Losses are means over the held-back batches.

    tensors      name -> (codes uint8 [..., K], block_scale float8_e4m3fn [..., K/16])
    loss         of these tensors
    start_loss   of the codes and scales at the start
    best_step    how many steps had been taken when they were found; 0: nothing was better than the start
    vectors      name -> what was given, learned, in its dtype
    num_skipped  steps that moved nothing, because the loss or a gradient was not finite
    """

    tensors: dict[str, tuple[Tensor, Tensor]]
    loss: float
    start_loss: float
    best_step: int
    vectors: dict[str, Tensor]
    num_skipped: int


def learn_rounding(
    forward: Callable[[dict[str, Tensor], Any], Tensor],
    weights: Mapping[str, Tensor],
    block_scales: Mapping[str, Tensor],
    global_scales: Mapping[str, Tensor],
    *,
    batches: Sequence[Any],
    held_back: Sequence[Any] = (),
    codes: Mapping[str, Tensor] | None = None,
    method: RoundingMethod = RoundingMethod.AUTOROUND,
    steps: int = 200,
    lr: float | None = None,
    scale_lr: float | None = None,
    vectors: Mapping[str, Tensor] = MappingProxyType({}),
    vector_lr: float = 1e-3,
    warmup_steps: int = 0,
    num_checks: int = 20,
    seed: int = 0,
    on_step: Callable[[int], None] = lambda step: None,
) -> LearnedRounding:
    """Learns the rounding of `weights` together.

    forward         (name -> decoded weight fp32 [..., K], a batch) -> 0-d loss, differentiable by the weights; the
                    vectors, fp32, are among them under their names
    weights         name -> fp32 [..., K]
    block_scales    name -> float8_e4m3fn [..., K/16] to start from
    global_scales   name -> fp32, 0-d or broadcasting against block_scales; they stay
    batches         what `forward` is shown, one a step, in an order drawn from `seed`
    held_back       judges; where empty, `batches` do
    codes           name -> uint8 [..., K] to start from (GPTQ's, say); round to nearest where not given
    lr              of the first step; by default what lets parameters travel the distance found best (`_TRAVEL`) in all
    scale_lr        likewise of the block scales' multipliers; by default a fifth of lr, 0 keeps the scales
    vectors         name -> 16- or 32-bit tensor that is learned as well, and rounded to its dtype in `forward`
    vector_lr       of the first step, in units of each vector's root mean square
    warmup_steps    over which the learning rates rise
    num_checks      how often the codes are judged; each costs a forward pass of `held_back`
    on_step         told how many steps were taken

    The same inputs and seed give the same result, as far as `forward` does. FormatError for shapes or dtypes that do
    not fit, NonFiniteError if the loss at the start is not finite. A step whose loss or gradient is not finite moves
    nothing.
    """
    if steps < 0 or not batches:
        raise UsageError(f"learned rounding needs batches and steps, got {len(batches)} and {steps}")
    rate = lr if lr is not None else 2 * _TRAVEL[method] / max(steps, 1)
    scale_rate = scale_lr if scale_lr is not None else _SCALE_SHARE * rate
    tools = _METHOD[method]
    # a caller's no_grad or inference mode would leave the weights without gradients
    with torch.inference_mode(False), torch.enable_grad():
        best = {n: _starting_point(n, w, block_scales, global_scales, codes) for n, w in weights.items()}
        best_vectors = {n: v.detach() for n, v in vectors.items()}
        factors = {n: _blockwise(global_scales[n].to(w.device), block_scales[n]) for n, w in weights.items()}
        judges = held_back or batches
        start_loss = best_loss = _judge(forward, best, best_vectors, factors, judges)
        if not isfinite(start_loss):
            raise NonFiniteError(
                f"learned rounding: the loss before the first step is {start_loss}",
                hint="the layer's inputs or weights hold NaN, Inf or values too large to square",
            )
        states = {
            n: tools.start(_blocks(w.detach().float()), _blocks(best[n][0]), _column(best[n][1]), factors[n])
            for n, w in weights.items()
        }
        vector_states = {n: learned_vectors.start(v) for n, v in vectors.items()}
        best_step = num_skipped = 0
        generator = torch.Generator().manual_seed(seed)
        order: list[int] = []
        check_every = max(1, steps // max(1, num_checks))
        for step in range(steps):
            order = order or torch.randperm(len(batches), generator=generator).tolist()
            progress = step / steps
            left = (1 - progress) * min(1.0, (step + 1) / (warmup_steps + 1))
            leaves = {n: tools.forward_weight(s, progress).flatten(-2) for n, s in states.items()}
            leaves |= {n: learned_vectors.forward_vector(s) for n, s in vector_states.items()}
            gradients = _gradients(forward, leaves, batches[order.pop()])
            num_skipped += gradients is None
            for n, gradient in (gradients or {}).items():
                if n in states:
                    tools.update(states[n], _blocks(gradient), rate * left, scale_rate * left, progress)
                else:
                    learned_vectors.update(vector_states[n], gradient, vector_lr * left)
            del leaves, gradients  # before the judges bring their own
            if (step + 1) % check_every == 0 or step + 1 == steps:
                found = {n: _stored(*tools.chosen(s)) for n, s in states.items()}
                found_vectors = {n: learned_vectors.chosen(s) for n, s in vector_states.items()}
                held_back_loss = _judge(forward, found, found_vectors, factors, judges)
                if held_back_loss < best_loss:
                    best, best_vectors, best_loss, best_step = found, found_vectors, held_back_loss, step + 1
            on_step(step + 1)
    return LearnedRounding(best, best_loss, start_loss, best_step, best_vectors, num_skipped)


def _starting_point(
    name: str,
    weight: Tensor,
    block_scales: Mapping[str, Tensor],
    global_scales: Mapping[str, Tensor],
    codes: Mapping[str, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """(codes, block_scale), checked."""
    scale, size = block_scales[name], NVFP4.block_size
    if (
        weight.dim() == 0
        or scale.dtype != torch.float8_e4m3fn
        or (*scale.shape[:-1], scale.shape[-1] * size) != (*weight.shape,)
    ):
        raise FormatError(
            f"{name}: block scales {scale.dtype} {list(scale.shape)} do not fit a weight of shape {list(weight.shape)}",
            hint=f"float8_e4m3fn, one for every {size} weights of a row",
        )
    if codes is None:
        step = _column(scale) * _blockwise(global_scales[name].to(weight.device), scale)
        return encode(_blocks(weight.detach().float()) / step, E2M1).flatten(-2), scale
    if codes[name].shape != weight.shape or codes[name].dtype != torch.uint8:
        raise FormatError(
            f"{name}: codes {codes[name].dtype} {list(codes[name].shape)} do not fit a weight of {list(weight.shape)}",
            hint="one uint8 code for each weight",
        )
    return codes[name], scale


def _gradients(
    forward: Callable[[dict[str, Tensor], Any], Tensor], leaves: dict[str, Tensor], batch: Any
) -> dict[str, Tensor] | None:
    """Of the loss by those leaves that it depends on; None if anything is not finite."""
    for leaf in leaves.values():
        leaf.requires_grad_()
    loss = forward(leaves, batch)
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    gradients = {n: g for n, g in zip(leaves, found, strict=True) if g is not None}
    is_finite = isfinite(loss.item()) and all(bool(torch.isfinite(g).all()) for g in gradients.values())
    return gradients if is_finite else None


def _judge(
    forward: Callable[[dict[str, Tensor], Any], Tensor],
    tensors: dict[str, tuple[Tensor, Tensor]],
    vectors: dict[str, Tensor],
    factors: dict[str, Tensor],
    judges: Sequence[Any],
) -> float:
    """Mean loss of the weights and vectors as stored."""
    with torch.no_grad():
        decoded = {n: _decode(*pair, factors[n]) for n, pair in tensors.items()}
        decoded |= {n: vector.float() for n, vector in vectors.items()}
        return sum(forward(decoded, batch).item() for batch in judges) / len(judges)


def _decode(codes: Tensor, block_scale: Tensor, factor: Tensor) -> Tensor:
    """fp32 [..., K], in the order of operations of `formats.nvfp4`."""
    elements = decode_table(E2M1, codes.device)[codes.int()]
    return _blocks(elements).mul_(_column(block_scale)).mul_(factor).flatten(-2)


def _blocks(x: Tensor) -> Tensor:
    """[..., K] -> [..., K/16, 16]"""
    return x.unflatten(-1, (-1, NVFP4.block_size))


def _column(block_scale: Tensor) -> Tensor:
    """float8_e4m3fn [..., B] -> fp32 [..., B, 1]"""
    return block_scale.float().unsqueeze(-1)


def _blockwise(global_scale: Tensor, block_scale: Tensor) -> Tensor:
    """fp32, broadcasting against [..., B, 16]"""
    return global_scale.float() if global_scale.dim() == 0 else global_scale.float().unsqueeze(-1)


def _stored(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return codes.flatten(-2), scale.squeeze(-1).to(torch.float8_e4m3fn)
