"""A decoder layer as it is, and what it takes for a fold to be one.

A fold holds if the layer's output stays when what its source gives is divided, and what its site is given multiplied,
by one scale. All factors are powers of two, which commute with rounding: a true fold is exact in any dtype, and
nothing in the layer is changed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blockscale.host.linear import KeptLinear
from blockscale.quantization.folds import Fold
from blockscale.quantization.layer_probe import CallLayer, check_output, run_probe
from blockscale.quantization.sites import Site

TOLERANCE = 1e-5  # of fp32 sums that may differ in their order
_SPREAD = 4  # factors are 2^-4 ... 2^4


@dataclass(frozen=True)
class NormCall:
    """A call of a module with a weight [n]: its arguments and what it gave."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor


@dataclass(frozen=True)
class FoldProbe:
    """The layer as it is, on random hidden states.

    given    innermost module -> what it was given, in the order of first calls
    norms    module with a weight [n] -> its calls
    planned  all sites' linears
    """

    layer: nn.Module
    call_layer: CallLayer
    hidden: Tensor
    output: Tensor
    given: Mapping[str, Sequence[Tensor]]
    norms: Mapping[str, Sequence[NormCall]]
    planned: frozenset[str]

    def lead(self, site: Site) -> str | None:
        """The first of the site's linears that the layer runs."""
        return next((name for name in site.hosted if self.given.get(name)), None)


def look(layer: nn.Module, sites: Sequence[Site], call_layer: CallLayer, hidden: Tensor) -> FoldProbe:
    norms: dict[str, list[NormCall]] = {}

    def note(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if isinstance(output, Tensor):
                norms.setdefault(name, []).append(NormCall(args, kwargs, output.clone()))

        return hook

    innermost = {name: module for name, module in layer.named_modules() if name and not any(module.children())}
    weighted = {name: module for name, module in innermost.items() if norm_weight(module) is not None}
    handles = [m.register_forward_hook(note(name), with_kwargs=True) for name, m in weighted.items()]
    try:
        output, given = run_probe(layer, call_layer, hidden, watch=innermost)
    finally:
        for handle in handles:
            handle.remove()
    planned = frozenset(name for site in sites for name in site.hosted)
    return FoldProbe(layer, call_layer, hidden, check_output(output), given, norms, planned)


def norm_weight(module: nn.Module) -> Tensor | None:
    """A norm's weight [n]: the only parameter beside a bias."""
    weight = getattr(module, "weight", None)
    is_alone = {name for name, _ in module.named_parameters()} <= {"weight", "bias"}
    return weight if isinstance(weight, nn.Parameter) and weight.dim() == 1 and is_alone else None


def holds(probe: FoldProbe, site: Site, fold: Fold) -> bool:
    """Whether dividing what the source gives and multiplying what the site is given leaves the layer as it is."""
    root = random_factors(int(fold.index.max()) + 1, probe.hidden.device)
    by_source = 1 / root
    if fold.rows is not None:
        module = probe.layer.get_submodule(fold.source)
        assert isinstance(module, KeptLinear)
        by_source = torch.ones(module.out_features, device=root.device)
        by_source[fold.rows.to(root.device)] = 1 / root
    scale = (root**fold.degree)[fold.index.to(root.device)]
    output, _ = run_probe(
        probe.layer,
        probe.call_layer,
        probe.hidden,
        watch=(),
        scale_inputs=dict.fromkeys(site.hosted, scale),
        scale_outputs={fold.source: by_source},
    )
    return is_close(output, probe.output, _change(probe.output, probe.hidden))


def _change(output: Tensor, hidden: Tensor) -> Tensor:
    """What the layer adds: the residual would hide small differences."""
    return output.float() - hidden.float() if output.shape == hidden.shape else output.float()


def is_close(found: Tensor, expected: Tensor, against: Tensor | None = None) -> bool:
    against = expected if against is None else against
    return bool((found.float() - expected.float()).norm() <= TOLERANCE * against.float().norm())


def random_factors(count: int, device: torch.device) -> Tensor:
    """fp32 [count]: powers of two, none of them 1."""
    generator = torch.Generator().manual_seed(count)
    exponents = torch.randint(1, _SPREAD + 1, (count,), generator=generator).float()
    signs = torch.randint(2, (count,), generator=generator) * 2.0 - 1
    return (2.0 ** (exponents * signs)).to(device)
