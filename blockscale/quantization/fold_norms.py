"""Norms that can be divided by a smoothing scale: found by what they give, not by name."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from blockscale.quantization.fold_probe import FoldProbe, NormCall, holds, is_close, norm_weight, random_factors
from blockscale.quantization.folds import Fold, FoldKind, NoFold
from blockscale.quantization.layer_probe import is_same
from blockscale.quantization.sites import Site


def norm_fold(
    probe: FoldProbe, site: Site, norm: str, given: Sequence[Tensor], no: Callable[[str], NoFold]
) -> Fold | NoFold:
    """Of a site whose input is what `norm` gives; `given`: that input, once for each call."""
    calls = probe.norms[norm]
    weight = norm_weight(probe.layer.get_submodule(norm))
    assert weight is not None
    if len(calls) > 1 or len(given) > 1:
        return no(f"{norm} is used more than once")
    for name, theirs in probe.given.items():
        has_weights = any(True for _ in probe.layer.get_submodule(name).parameters())
        if name not in site.hosted and has_weights and any(is_same(x, given[0]) for x in theirs):
            return no(f"{norm} feeds {name} as well")
    offset = _offset(probe.layer.get_submodule(norm), weight, calls[0])
    if offset is None:
        return no(f"{norm} does not multiply by its weight, or by 1 + its weight, last")
    index = torch.arange(site.in_features) % weight.numel()
    fold = Fold(FoldKind.NORM, norm, index, offset=offset)
    return fold if holds(probe, site, fold) else no(f"the layer uses what {norm} gives elsewhere too")


def _offset(module: nn.Module, weight: Tensor, call: NormCall) -> float | None:
    """0 if the norm multiplies by its weight, 1 if by 1 + weight, None if a divided weight (and bias) does not divide
    the output. In fp32, for 1 + weight does not commute with rounding."""
    args = [x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in call.args]
    kwargs = {k: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in call.kwargs.items()}
    bias = getattr(module, "bias", None)
    bias = torch.zeros_like(weight) if not isinstance(bias, Tensor) else bias

    def run(new_weight: Tensor, new_bias: Tensor) -> Tensor:
        new = {"weight": new_weight.float(), "bias": new_bias.float()}
        own = {name: new[name] for name, _ in module.named_parameters()}
        with torch.inference_mode():
            return functional_call(module, own, tuple(args), kwargs).float()

    zero = torch.zeros_like(weight)
    offset = float(run(zero, zero).any())
    divisor = random_factors(weight.numel(), weight.device)
    divided = run((weight.float() + offset) / divisor - offset, bias.float() / divisor)
    return offset if is_close(divided, run(weight, bias) / divisor) else None
