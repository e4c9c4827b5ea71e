"""Choosing input scales for a layer's sites, and folding them into what comes before.

Scales are searched on a sample of the layer's own inputs, before anything of it is quantized, from the last site to
the first: folding a site's scale changes the rows of the linear before, whose own site then sees them as they are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from blockscale.algorithms.activation_scale import ActivationScale
from blockscale.algorithms.awq import awq_scales, best_smoothing, bounded_scale
from blockscale.algorithms.fake_quantize import round_activation
from blockscale.algorithms.smoothquant import smoothquant_scales
from blockscale.formats.spec import NVFP4
from blockscale.host.linear import KeptLinear
from blockscale.host.weights import HostedWeights
from blockscale.quantization.folds import Fold, apply_fold, effective_scale, scale_columns
from blockscale.quantization.layerwise.rounding import swept
from blockscale.quantization.plan import PlannedLinear
from blockscale.quantization.sites import Site
from blockscale.quantization.units import input_scale

_SAMPLE = 1024  # tokens
_EXPONENTS = (0.2, 0.4, 0.6, 0.8)
_POWERS = ((0.45, 0.3), (0.3, 0.45), (0.45, 0.6), (0.45, 0.15), (0.3, 0.3), (0.6, 0.3))


def _awq(x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    return {f"awq {a}": s for a, s in awq_scales(x.abs().mean(0), weights, _EXPONENTS).items()}


def _smoothquant(x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    scales = smoothquant_scales(x.abs().amax(0), weights, (0.3, 0.45, 0.6, 0.75))
    return {f"smoothquant {a}": s for a, s in scales.items()}


def _rms(x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Powers of each channel's root mean square over powers of the weights' own, the best of a wide grid: about where
    an input's error and a weight's, as the output sees them, are equal in every channel."""
    rms, rows = x.double().square().mean(0).sqrt(), weights.double().square().mean(0).sqrt()
    is_alive = (rms > 0) & (rows > 0)
    rms, rows = torch.where(is_alive, rms, 1.0), torch.where(is_alive, rows, 1.0)
    return {f"rms {a} {b}": bounded_scale(rms**a / rows**b, is_alive) for a, b in _POWERS}


FAMILIES: dict[str, Callable[[Tensor, Tensor], dict[str, Tensor]]] = {
    "awq": _awq,
    "smoothquant": _smoothquant,
    "rms": _rms,
}


@dataclass(frozen=True)
class Smoothed:
    """`scale` [K] divides the site's input, None where it is 1; `name`: of the candidate; `gain`: share of the sample's
    loss that it removed; `tensors`: stored tensors that the fold changed."""

    scale: Tensor | None
    name: str
    gain: float
    tensors: Mapping[str, Tensor]


def smooth_site(
    layer: nn.Module,
    site: Site,
    fold: Fold,
    x: Tensor,
    families: Sequence[str],
    linears: Mapping[str, PlannedLinear],
    activation_scale: ActivationScale,
    *,
    path: str,
    weights: HostedWeights,
) -> Smoothed:
    """Searches the scale on a sample x [T, K] of the site's input, for those of its linears that are NVFP4, and folds
    it. The layer changes, unless 1 is best."""
    sample = x[:: max(1, len(x) // _SAMPLE)][:_SAMPLE].float()
    nvfp4 = [(m, h) for m, h in zip(site.members, site.hosted, strict=True) if linears[m].scheme.weight is NVFP4]
    rows = torch.cat([rows_of(layer, hosted) for _, hosted in nvfp4])
    scheme = linears[nvfp4[0][0]].scheme
    importance = x.float().square().mean(0)

    def quantize_weight(weight: Tensor, scale: Tensor) -> Tensor:
        return swept(weight, importance / scale.square()).decode()

    def round_input(seen: Tensor, scale: Tensor) -> Tensor:
        assert scheme.activation is not None
        amax = (x.float() / scale).abs().amax().item()
        global_scale = input_scale(amax, scheme.activation, activation_scale).to(x.device)
        values, factor = round_activation(seen, scheme.activation, global_scale, activation_scale)
        return values * factor

    candidates: dict[str, Tensor] = {}
    for family in families:
        for name, scale in FAMILIES[family](sample, rows).items():
            # a norm stored in 16 bits as 1 + w may be far from holding what was asked for
            candidates[name] = effective_scale(layer, fold, fold.shared(scale), path=path, weights=weights)
    found = best_smoothing(
        [rows], sample, quantize_weight, round_input if scheme.activation is NVFP4 else None, candidates
    )
    if found.exponent is None:
        return Smoothed(None, "none", 0.0, {})
    applied = apply_fold(layer, fold, found.scale, path=path, weights=weights)
    scale_columns(layer, site, applied.scale)
    gain = 1 - found.loss / found.baseline_loss
    return Smoothed(applied.scale, str(found.exponent), gain, applied.tensors)


def rows_of(layer: nn.Module, hosted: str) -> Tensor:
    """fp32 [N, K], the rows of all experts of a stack one below the other."""
    module = layer.get_submodule(hosted)
    assert isinstance(module, KeptLinear)
    return module.weight.float().flatten(0, -2)
