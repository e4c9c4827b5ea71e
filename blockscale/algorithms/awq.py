"""Activation-aware smoothing: channels that matter are scaled up before rounding, and their inputs down.

For any positive s [K], x W^T = (x / s) (W diag(s))^T. A larger s_j gives channel j's weights finer steps and its
inputs smaller ones. Candidates, with m_j = mean_t |x_tj| and w_j = mean_n |W_nj| / amax(block of n, j):

    s_j = m_j^a / w_j^(1 - a),   s /= sqrt(max(s) min(s)),   clamped to 10^-4 ... 10^4,   a = 0, 0.1, ... 1

and of these (and s = 1) the one of least ||X W^T - Qx(X / s) Qw(W diag(s))^T||^2 is taken, both quantizers on. a = 0 is
not s = 1, so "no smoothing" is a candidate of its own, and the choice is never worse than it on the sample.

1/s is folded into what makes the input: a norm's weight, or the rows of the linear before. Where that is v_proj of a
model with grouped queries, channels that read one row of it share a scale, the geometric mean of theirs.

Source: Lin et al., "AWQ", arXiv 2306.00978; the formula is Model Optimizer's awq_lite.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.errors import FormatError, NonFiniteError

EXPONENTS = tuple(i / 10 for i in range(11))
_MIN_SCALE, _MAX_SCALE = 1e-4, 1e4

# (W diag(s) fp32 [N, K] or x / s fp32 [T, K], and s [K]) -> what the quantized layer holds or sees, fp32
Quantizer = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Smoothing:
    """A chosen scale. Losses are sums of squared output errors over the sample.

    scale           fp32 [K]: multiplies the weight's columns, divides the input's channels
    exponent        the candidate's (its name), or None where nothing beat a scale of 1
    loss            with this scale
    baseline_loss   with a scale of 1
    """

    scale: Tensor
    exponent: float | str | None
    loss: float
    baseline_loss: float


def awq_scales(
    mean_abs: Tensor,
    weight_rows: Tensor,
    exponents: Iterable[float] = EXPONENTS,
    *,
    use_weights: bool = True,
    block_size: int = 16,
) -> dict[float, Tensor]:
    """Exponent -> fp32 [K], by the formula above.

    mean_abs      [K]: mean |x| of each input channel
    weight_rows   [N, K]: the rows of all linears that share the input
    use_weights   False leaves the weights' factor out: s_j = m_j^a

    A channel without input or without weights has a scale of 1 and no say in the others'.
    """
    check_channels(mean_abs, weight_rows)
    if weight_rows.shape[-1] % block_size:
        raise FormatError(
            f"AWQ: weights of {list(weight_rows.shape)} do not divide into blocks of {block_size}",
            hint="keep this layer in 16 bits",
        )
    magnitude = mean_abs.double()
    blocks = weight_rows.float().abs().unflatten(-1, (-1, block_size))
    amax = blocks.amax(-1, keepdim=True)
    relative = torch.where(amax > 0, blocks / amax, 0.0).flatten(-2).double().mean(0)  # [K]
    is_alive = (magnitude > 0) & (relative > 0)
    magnitude, relative = torch.where(is_alive, magnitude, 1.0), torch.where(is_alive, relative, 1.0)
    result = {}
    for exponent in exponents:
        scale = magnitude**exponent
        if use_weights:
            scale = scale / relative ** (1 - exponent)
        result[exponent] = bounded_scale(scale, is_alive)
    return result


def bounded_scale(scale: Tensor, is_alive: Tensor) -> Tensor:
    """fp32 [K]: a positive scale divided by sqrt(max min) of the living channels and clamped; 1 for the others."""
    if not is_alive.any():
        return torch.ones_like(scale, dtype=torch.float32)
    living = scale[is_alive]
    scale = scale / (living.max().sqrt() * living.min().sqrt())
    return torch.where(is_alive, scale.clamp(_MIN_SCALE, _MAX_SCALE), 1.0).float()


def best_smoothing(
    weights: Sequence[Tensor],
    x: Tensor,
    quantize_weight: Quantizer,
    round_input: Quantizer | None,
    candidates: Mapping[float, Tensor] | Mapping[str, Tensor],
) -> Smoothing:
    """The candidate (or none) of least squared output error on the sample, with both quantizers on.

    weights           [N_i, K] each: the linears that share the input; fused ones, which share a global scale, as one
    x                 [T, K]: a sample of the input
    quantize_weight   (W diag(s) fp32 [N_i, K], s) -> as decoded; s tells it how importance changes: E[x^2] / s^2
    round_input       (x / s fp32 [T, K], s) -> as rounded; None where inputs stay in 16 bits
    candidates        exponent (or another name) -> scale [K]: `awq_scales`, `smoothquant_scales`

    NonFiniteError where the sample or a weight is not finite. A candidate whose loss is not finite is passed over.
    """
    x = x.float()
    sources = [w.float() for w in weights]
    targets = [x @ w.T for w in sources]  # [T, N_i]

    def loss_of(scale: Tensor) -> float:
        seen = x / scale
        seen = seen if round_input is None else round_input(seen, scale)
        total = 0.0
        for weight, target in zip(sources, targets, strict=True):
            error = (seen @ quantize_weight(weight * scale, scale).T).sub_(target)
            total += error.square_().sum(-1).double().sum().item()
        return total

    none = torch.ones(x.shape[-1], device=x.device)
    baseline = loss_of(none)
    if baseline != baseline or baseline == float("inf"):
        raise NonFiniteError(
            "smoothing: the layer's output error is not finite on the calibration sample",
            hint="its weights or its inputs hold NaN, Inf or values too large to square in fp32",
        )
    best = Smoothing(none, None, baseline, baseline)
    for exponent, scale in candidates.items():
        loss = loss_of(scale.to(x.device))
        if loss < best.loss:
            best = Smoothing(scale, exponent, loss, baseline)
    return best


def check_channels(statistic: Tensor, weight_rows: Tensor) -> None:
    if weight_rows.dim() != 2 or statistic.shape != weight_rows.shape[-1:]:
        raise FormatError(
            f"input statistics of shape {list(statistic.shape)} do not fit weights of {list(weight_rows.shape)}",
            hint="one entry for each input channel, and weights [N, K]",
        )
    if not (torch.isfinite(statistic).all() and torch.isfinite(weight_rows).all()):
        raise NonFiniteError(
            "smoothing: the weights or the input statistics hold NaN or Inf",
            hint="a layer before this one overflows, or the source checkpoint is damaged",
        )
