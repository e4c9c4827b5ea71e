"""What precedes each site of a decoder layer and can be divided by a smoothing scale without changing the layer.

Nothing is known by name. Candidates are seen by running the layer: a norm whose output is the site's input, a linear
whose output scales it channel by channel. Each is then tried on the whole layer; what changes its output (a router, a
residual or a later head reads it too) is no fold, and the reason is kept.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from blockscale.checkpoint.groups import fused_groups
from blockscale.host.linear import KeptLinear
from blockscale.quantization.fold_norms import norm_fold
from blockscale.quantization.fold_probe import FoldProbe, look
from blockscale.quantization.fold_rows import row_fold
from blockscale.quantization.folds import Fold, FoldKind, NoFold
from blockscale.quantization.layer_probe import CallLayer, is_same, random_hidden
from blockscale.quantization.sites import Site, numberless, parent_name


def find_folds(
    layer: nn.Module,
    sites: Sequence[Site],
    call_layer: CallLayer,
    hidden: Tensor,
    *,
    use_pre_quant_scale: bool = False,
) -> dict[str, Fold | NoFold]:
    """Site name -> its fold, or why it has none. The layer is left as it was; arguments as for `find_sites`.

    use_pre_quant_scale  where nothing can be folded, a scale that is stored beside the weights, if loaders take one

    Of routed experts one is tried for all of them: they run the same code. ModelError if the layer gives NaN.
    """
    probe = look(layer, sites, call_layer, random_hidden(hidden))
    found: dict[str, Fold | NoFold] = {}
    for alike in _alike(sites):
        tried = max(alike, key=lambda site: _num_tokens(probe, site))
        outcome = _fold_of(probe, tried)
        for site in alike:
            found[site.name] = _moved(outcome, tried, site)
            if use_pre_quant_scale and isinstance(outcome, NoFold) and outcome.has_room_for_scale:
                found[site.name] = Fold(FoldKind.PRE_QUANT_SCALE, "", torch.arange(site.in_features))
    return found


def _alike(sites: Sequence[Site]) -> Iterable[list[Site]]:
    """A list for each site, but one for all experts' sites of the same linears."""
    found: dict[tuple[str, ...], list[Site]] = {}
    for site in sites:
        names = tuple(numberless(name) for name in site.hosted) if site.is_expert else site.hosted
        found.setdefault(names, []).append(site)
    return found.values()


def _moved(outcome: Fold | NoFold, tried: Site, site: Site) -> Fold | NoFold:
    """What was found for one expert, for another."""
    parent = parent_name(tried.hosted[0])
    if isinstance(outcome, NoFold) or site is tried or not outcome.source.startswith(parent + "."):
        return outcome
    return replace(outcome, source=parent_name(site.hosted[0]) + outcome.source.removeprefix(parent))


def _num_tokens(probe: FoldProbe, site: Site) -> int:
    lead = probe.lead(site)
    return 0 if lead is None else sum(x.shape[:-1].numel() for x in probe.given[lead])


def _fold_of(probe: FoldProbe, site: Site) -> Fold | NoFold:
    has_room = not site.is_expert and all(len(group) == 1 for group in fused_groups(site.members).values())

    def no(reason: str) -> NoFold:
        return NoFold(reason, has_room)

    lead = probe.lead(site)
    if lead is None:
        return no("the layer does not run it")
    if not all(isinstance(probe.layer.get_submodule(name), KeptLinear) for name in site.hosted):
        return no("its weights are packed already")
    given = probe.given[lead]
    norm = next((n for n, calls in probe.norms.items() if any(is_same(c.output, given[0]) for c in calls)), None)
    if norm is not None:
        return norm_fold(probe, site, norm, given, no)
    return row_fold(probe, site, lead, no)
