"""Codes and scales of one fused group by each candidate of a method, and which errs least on held-back tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.algorithms.gptq import corrected_target, gptq
from blockscale.algorithms.scale_sweep import best_block_scale
from blockscale.algorithms.statistics import Moments, importance
from blockscale.errors import UsageError
from blockscale.formats.nvfp4 import block_amax, block_scale_from_amax, decode_packed, encode_packed
from blockscale.formats.packing import pack_nibbles
from blockscale.quantization.layerwise.method import Candidate, Method
from blockscale.quantization.weight import ScaleMethod, stored_global_scale

_FEW = 0.01  # of the mean importance, added: channels that a few tokens left silent are not worthless


@dataclass(frozen=True)
class Rounded:
    """A group's rows [N, K] in NVFP4. `packed` uint8 [N, K/2], `block_scale` float8_e4m3fn [N, K/16]."""

    packed: Tensor
    block_scale: Tensor
    global_scale: Tensor

    def decode(self) -> Tensor:
        """fp32 [N, K]"""
        return decode_packed(self.packed, self.block_scale, self.global_scale)


@dataclass(frozen=True)
class Judge:
    """Held-back tokens. x [T, K] as the linear will see it, rounded; `target` [T, N] what it should give."""

    x: Tensor
    target: Tensor

    def loss(self, weight: Tensor) -> float:
        return (self.x @ weight.T - self.target).square().sum(dtype=torch.float64).item()


@dataclass(frozen=True)
class Choice:
    """The candidate that won, and what each lost: sums of squared errors over the held-back tokens."""

    rounded: Rounded
    name: str
    losses: dict[str, float]


def choose(weight: Tensor, moments: Moments, method: Method, judge: Judge | None, name: str) -> Choice:
    """The best of a method's candidates for weight fp32 [N, K]; the last where there is nothing to judge by.

    `moments`: of the inputs as the linear will see them, with `cross` where a candidate corrects its target.

    A candidate whose Hessian cannot be factored is passed over. UsageError if none is left.
    """
    results: dict[str, Rounded] = {}
    failure: UsageError | None = None
    for candidate in method.candidates:
        if candidate.correction and moments.cross is None:
            continue
        try:
            results[candidate.name] = round_by(candidate, weight, moments, method, name)
        except UsageError as e:
            failure = e
    if failure is not None and not results:
        raise failure
    if judge is None or len(results) == 1:
        chosen = list(results)[-1] if moments.count else next(iter(results))
        losses = {} if judge is None else {chosen: judge.loss(results[chosen].decode())}
        return Choice(results[chosen], chosen, losses)
    losses = {found: judge.loss(rounded.decode()) for found, rounded in results.items()}
    best = min(losses, key=lambda found: losses[found])
    return Choice(results[best], best, losses)


def swept(weight: Tensor, importance: Tensor | None) -> Rounded:
    """Rows [N, K] to nearest, on block scales of least error weighted by `importance` [K]."""
    global_scale, block_scale = _swept_scales(weight, importance)
    return Rounded(encode_packed(weight, block_scale, global_scale), block_scale, global_scale)


def _swept_scales(weight: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor]:
    global_scale = stored_global_scale(weight.abs().amax(), ScaleMethod.SWEEP)
    return global_scale, best_block_scale(weight, global_scale, importance=importance)


def round_by(candidate: Candidate, weight: Tensor, moments: Moments, method: Method, name: str) -> Rounded:
    """One candidate's codes and scales."""
    target = weight
    if candidate.correction:
        target = corrected_target(weight, moments, candidate.correction, method.correction_damp, name=name)
    if not candidate.is_swept:
        global_scale = stored_global_scale(target.abs().amax(), ScaleMethod.AMAX)
        block_scale = block_scale_from_amax(block_amax(target), global_scale)
    else:
        weights = importance(moments)
        global_scale, block_scale = _swept_scales(target, weights + _FEW * weights.mean())
    if not candidate.is_sequential or not moments.count:
        return Rounded(encode_packed(target, block_scale, global_scale), block_scale, global_scale)
    codes = gptq(target, moments.second, block_scale, global_scale, damp=method.damp, name=name)
    return Rounded(pack_nibbles(codes), block_scale, global_scale)


def split_rows(rounded: Rounded, sizes: Sequence[int]) -> list[Rounded]:
    """Of the members of a group, which share the global scale."""
    parts = zip(rounded.packed.split(list(sizes)), rounded.block_scale.split(list(sizes)), strict=True)
    return [Rounded(packed.clone(), scale.clone(), rounded.global_scale) for packed, scale in parts]
