"""Linears whose rows can be divided by a smoothing scale: values before an attention's output, the ungated half of an
MLP before its second linear.

A linear beside the site's is one if multiplying its output channels by random factors multiplies the site's input
channels by the same factors (or their squares), which also shows which channel feeds which.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from blockscale.host.linear import KeptLinear
from blockscale.quantization.fold_probe import TOLERANCE, FoldProbe, holds, random_factors
from blockscale.quantization.folds import Fold, FoldKind, NoFold
from blockscale.quantization.layer_probe import is_same, run_probe
from blockscale.quantization.sites import Site, parent_name

_HEAD_SIZES = ("head_dim", "head_size", "v_head_dim", "attention_head_size")
# Set where later layers read this one's values as well, which running it alone does not show.
_LENDS_VALUES = "store_full_length_kv"


def row_fold(probe: FoldProbe, site: Site, lead: str, no: Callable[[str], NoFold]) -> Fold | NoFold:
    """Of a site that no norm precedes; `lead`: one of its linears that the layer runs."""
    before: list[str] = []  # the linears beside it that have run, the last first
    for name in probe.given:
        if name == lead:
            break
        is_linear = name in probe.planned and isinstance(probe.layer.get_submodule(name), KeptLinear)
        if is_linear and name not in site.hosted and parent_name(name) == parent_name(lead):
            before.insert(0, name)
    for source in before:
        for rows in _row_sets(probe.layer, source, site.in_features):
            fold = _rows_that_scale(probe, lead, source, rows)
            if fold is None:
                continue
            if any(getattr(module, _LENDS_VALUES, False) for module in _above(probe.layer, source)):
                return no(f"later layers read what {source} gives as well")
            return fold if holds(probe, site, fold) else no(f"the layer uses what {source} gives elsewhere too")
    if site.is_expert and not before:
        return no("a router gives it its tokens, which no norm makes for it alone")
    if any(is_same(x, probe.hidden) for x in probe.given[lead]):
        return no("it reads the hidden states themselves, no norm comes before")
    return no("no norm, and no quantized linear beside it, gives its input up to a factor a channel")


def _above(layer: nn.Module, name: str) -> Iterator[nn.Module]:
    while name:
        name = name.rpartition(".")[0]
        yield layer.get_submodule(name)


def _row_sets(layer: nn.Module, source: str, num_channels: int) -> Iterator[Tensor]:
    """Rows of a linear [N, K] that could make `num_channels` channels: all; a half, or every other, of a gate and its
    values; the values of joined queries, keys and values, behind each other or head by head."""
    module = layer.get_submodule(source)
    assert isinstance(module, KeptLinear)
    every = torch.arange(module.out_features)
    count = every.numel()
    if num_channels % count == 0:
        yield every
    if count == 2 * num_channels:
        yield from (every[num_channels:], every[:num_channels], every[1::2], every[::2])
    num_values, is_odd = divmod(count - num_channels, 2)
    if num_values > 0 and not is_odd and num_channels % num_values == 0:
        yield every[-num_values:]
        owner = layer.get_submodule(parent_name(source))
        for size in dict.fromkeys(getattr(owner, name, None) for name in _HEAD_SIZES):
            if isinstance(size, int) and 0 < size < num_values and num_values % size == 0:
                heads = num_values // size
                if count % heads == 0:
                    yield every.view(heads, -1)[:, -size:].flatten()


def _rows_that_scale(probe: FoldProbe, lead: str, source: str, rows: Tensor) -> Fold | None:
    """The fold under which multiplying these rows multiplies what `lead` is given, channel by channel."""
    module = probe.layer.get_submodule(source)
    assert isinstance(module, KeptLinear)
    k, n = probe.given[lead][0].shape[-1], rows.numel()
    factors = random_factors(n, probe.hidden.device)
    all_factors = torch.ones(module.out_features, device=factors.device)
    all_factors[rows.to(factors.device)] = factors
    _, seen = run_probe(probe.layer, probe.call_layer, probe.hidden, watch=[lead], scale_outputs={source: all_factors})
    before, after = (torch.cat([x.reshape(-1, k).float() for x in xs]) for xs in (probe.given[lead], seen[lead]))
    if before.shape != after.shape:
        return None
    repeats = k // n
    channel = torch.arange(k)
    # each run of `size` rows (a head's values) is read by `repeats` runs of channels that follow each other
    for size in [n] if repeats == 1 else [d for d in range(1, n + 1) if n % d == 0]:
        index = channel // (repeats * size) * size + channel % size
        for degree in (1, 2):
            expected = before * (factors**degree)[index.to(factors.device)]
            error = (after - expected).norm(dim=0)
            if after.any() and bool((error <= TOLERANCE * expected.norm(dim=0)).all()):
                return Fold(FoldKind.ROWS, source, index, rows=rows, degree=degree)
    return None
