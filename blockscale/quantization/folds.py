"""Where the inverse of a smoothing scale can go, and putting it there.

    x W^T = (x / s) (W diag(s))^T

x / s costs nothing at run time if what makes x can be divided by s: a norm's weight (w, or 1 + w), or the rows of the
linear before, where nothing but a product by channel lies between. A norm is stored in 16 bits, so dividing it rounds:
the scale that was really made is what the site's columns are multiplied by, and the two cancel exactly. Biases are
divided as well, and round in what they are stored in.

Which fold a site has is found by `fold_search`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor, nn

from blockscale.errors import FormatError
from blockscale.host.linear import KeptLinear
from blockscale.host.weights import HostedWeights
from blockscale.quantization.sites import Site


class FoldKind(StrEnum):
    NORM = "norm"  # into a norm's weight
    ROWS = "rows"  # into rows of the linear before
    PRE_QUANT_SCALE = "pre_quant_scale"  # into nothing: stored, and multiplied in at run time


@dataclass(frozen=True, eq=False)
class Fold:
    """What precedes a site. Channel j of the site's input is channel `index[j]` of the source, so a scale must be
    equal wherever `index` is: between query heads that read one value head, between heads that share a norm.

    source   the norm's or the linear's name inside the layer; empty for a stored scale
    index    int64 [K]
    rows     ROWS: int64 [n], the linear's rows that are the source's channels
    offset   NORM: its gain is weight + offset, 0 or 1
    degree   ROWS: dividing the rows by r divides the input by r^degree (2: a squared ReLU lies between)
    """

    kind: FoldKind
    source: str
    index: Tensor
    rows: Tensor | None = None
    offset: float = 0.0
    degree: int = 1

    def shared(self, scale: Tensor) -> Tensor:
        """fp32 [K]: `scale` made equal where it must be, by the geometric mean."""
        channels = self.by_channel(scale)
        return channels[self.index.to(scale.device)]

    def by_channel(self, scale: Tensor) -> Tensor:
        """fp32 [K] -> the source's channels, fp32 [n]"""
        index = self.index.to(scale.device)
        num_channels = int(index.max()) + 1
        if num_channels == index.numel():
            return torch.empty_like(scale).index_copy_(0, index, scale).float()
        logs = torch.zeros(num_channels, dtype=torch.float64, device=scale.device)
        logs.index_add_(0, index, scale.double().log())
        return (logs / torch.bincount(index, minlength=num_channels)).exp().float()


@dataclass(frozen=True)
class NoFold:
    """`reason`: a sentence about the site. `has_room_for_scale`: modelopt's dialect could store the scale instead."""

    reason: str
    has_room_for_scale: bool


@dataclass(frozen=True)
class AppliedFold:
    """What became of a scale.

    scale            fp32 [K]: the site's input is divided by it, so its weights' columns must be multiplied by it
    tensors          stored tensor name -> what it is now, in the dtype that it is stored in
    pre_quant_scale  a stored scale's [K], in the checkpoint's dtype: each member multiplies its input by it
    """

    scale: Tensor
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    pre_quant_scale: Tensor | None = None


def apply_fold(layer: nn.Module, fold: Fold, scale: Tensor, *, path: str, weights: HostedWeights) -> AppliedFold:
    """Divides the source in `layer` by `scale` [K], positive, and says what that made of it. The site's columns are
    left to `scale_columns`.

    A norm gets the values that are stored from now on. A linear, which is quantized later, becomes an fp32 master copy
    and is not among the returned tensors; its bias, stored as it is, is. FormatError for a scale that is no scale.
    """
    applied, changed = _fold(layer, fold, scale, path, weights)
    module = layer.get_submodule(fold.source)
    for name, value in changed.items():
        if name in module._buffers:
            setattr(module, name, value)
        else:
            setattr(module, name, nn.Parameter(value, requires_grad=False))
    return applied


def effective_scale(layer: nn.Module, fold: Fold, scale: Tensor, *, path: str, weights: HostedWeights) -> Tensor:
    """fp32 [K]: what `apply_fold` would make of `scale`, without doing it."""
    return _fold(layer, fold, scale, path, weights)[0].scale


def scale_columns(layer: nn.Module, site: Site, scale: Tensor) -> None:
    """Multiplies the columns of the site's weights by `scale` [K]; they become fp32 master copies."""
    for name in site.hosted:
        module = layer.get_submodule(name)
        assert isinstance(module, KeptLinear)
        module.weight = nn.Parameter(module.weight.float() * scale.to(module.weight.device), requires_grad=False)


def _fold(
    layer: nn.Module, fold: Fold, scale: Tensor, path: str, weights: HostedWeights
) -> tuple[AppliedFold, dict[str, Tensor]]:
    """The result, and the source's own tensors as they become, by their names in it."""
    if scale.shape != fold.index.shape or not torch.isfinite(scale).all() or (scale <= 0).any():
        raise FormatError(
            f"a smoothing scale of shape {list(scale.shape)} does not fit {fold.source or 'an input'} "
            f"of {fold.index.numel()} channels, or is not positive and finite"
        )
    if fold.kind is FoldKind.PRE_QUANT_SCALE:
        stored = (1 / scale.float()).to(weights.checkpoint.dtype)
        stored = torch.where(torch.isfinite(stored) & (stored > 0), stored, torch.ones_like(stored))
        return AppliedFold(1 / stored.float(), pre_quant_scale=stored), {}
    divide = _divide_norm if fold.kind is FoldKind.NORM else _divide_rows
    return divide(layer.get_submodule(fold.source), fold, fold.by_channel(scale), f"{path}.{fold.source}", weights)


def _divide_norm(
    module: nn.Module, fold: Fold, divisor: Tensor, full: str, weights: HostedWeights
) -> tuple[AppliedFold, dict[str, Tensor]]:
    """divisor [n]. A channel whose gain is 0, or would round to 0, is left as it is."""
    old = module.weight
    assert isinstance(old, Tensor)
    source = weights.kept[f"{full}.weight"]
    gain = old.float() + fold.offset
    made = (gain / divisor.to(gain.device) - fold.offset).to(source.dtype)
    ratio = gain.double() / (made.float() + fold.offset).double()
    is_made = torch.isfinite(ratio) & (ratio > 0)
    made = torch.where(is_made, made, old.to(source.dtype))
    ratio = torch.where(is_made, ratio, 1.0).float()
    tensors = {source.name: made}
    changed = {"weight": made.to(old.dtype)}
    bias = getattr(module, "bias", None)
    if isinstance(bias, Tensor):
        source = weights.kept[f"{full}.bias"]
        tensors[source.name] = (bias.float() / ratio).to(source.dtype)
        changed["bias"] = tensors[source.name].to(bias.dtype)
    return AppliedFold(ratio[fold.index.to(ratio.device)], tensors), changed


def _divide_rows(
    module: nn.Module, fold: Fold, divisor: Tensor, full: str, weights: HostedWeights
) -> tuple[AppliedFold, dict[str, Tensor]]:
    """divisor [n]. Weights [N, K], or a stack [E, N, K] whose experts share it."""
    assert isinstance(module, KeptLinear)
    assert fold.rows is not None
    device = module.weight.device
    rows, divisor = fold.rows.to(device), divisor.to(device)
    factor = divisor ** (1 / fold.degree)
    weight = module.weight.float().clone()
    weight[..., rows, :] /= factor[:, None]
    changed = {"weight": weight}
    tensors = {}
    if module.bias is not None:
        bias_name = f"{full}.bias"
        source = weights.kept[bias_name if bias_name in weights.kept else f"{full}_bias"]
        bias = module.bias.clone()
        bias[..., rows] /= factor
        tensors[source.name] = bias.to(source.dtype)
        changed["bias"] = tensors[source.name].to(bias.dtype)
    return AppliedFold(divisor[fold.index.to(device)], tensors), changed
