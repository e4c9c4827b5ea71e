"""One decoder layer quantized: a job that follows from its weights and two generations of hidden states alone.

    find sites and folds --> smooth, last site first --> per stage, in the order of the forward pass:
        capture what the half-quantized layer gives the stage's sites --> quantize them --> put them into the layer
    --> the quantized layer writes the next generation

The 16-bit layer runs beside it, on the 16-bit model's hidden states: its inputs are the targets.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from blockscale.algorithms.activation_scale import ActivationScale
from blockscale.algorithms.statistics import Moments, add_moments, finish, new_moments
from blockscale.checkpoint.linear import QuantizedLinear
from blockscale.errors import NonFiniteError, RecipeError
from blockscale.formats.spec import NVFP4
from blockscale.host.linear import KeptLinear, PackedLinear
from blockscale.host.weights import set_module
from blockscale.quantization.fold_search import find_folds
from blockscale.quantization.folds import NoFold
from blockscale.quantization.layerwise.branches import needs_text
from blockscale.quantization.layerwise.capture import SiteInputs, capture_stage, sample_inputs
from blockscale.quantization.layerwise.method import Method
from blockscale.quantization.layerwise.rounding import Choice
from blockscale.quantization.layerwise.site import SiteJob, SiteResult, quantize_site
from blockscale.quantization.layerwise.smoothing import Smoothed, rows_of, smooth_site
from blockscale.quantization.layerwise.streams import (
    Streams,
    drop,
    probe_layer,
    run_reference,
    without_faults,
)
from blockscale.quantization.plan import PlannedLinear
from blockscale.quantization.ranges import Ranges, watch_caches, watcher
from blockscale.quantization.sites import Site, find_sites, numberless
from blockscale.quantization.walk import Walk, Watch, advance

_SMOOTHING_TOKENS = 4096


@dataclass
class LayerResult:
    """What a layer became. By member: `linears`, `choices`, `input_amax`, `smoothed`, `sqnr_db` (of the weights after
    folds; None where it is not finite).

    tensors     stored tensors that folds changed
    unsmoothed  why sites were not smoothed, and how many, of all `num_sites` that a method would smooth
    """

    linears: dict[str, QuantizedLinear] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)
    smoothed: dict[str, Smoothed] = field(default_factory=dict)
    input_amax: dict[str, float | None] = field(default_factory=dict)
    sqnr_db: dict[str, float | None] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    kv: Ranges = field(default_factory=Ranges)
    notices: list[str] = field(default_factory=list)
    unsmoothed: Counter[str] = field(default_factory=Counter)
    num_sites: int = 0


def quantize_layer(
    walk: Walk,
    index: int,
    streams: Streams,
    linears: Mapping[str, PlannedLinear],
    method: Method,
    activation_scale: ActivationScale,
    *,
    with_kv: bool,
) -> tuple[Walk, LayerResult]:
    """Reads generation `index` of both streams and writes the next ones. The walk that comes back lacks windows that
    gave NaN or Inf."""
    path = f"{walk.prefix}.{index}"
    while True:
        layer = walk.load(index)
        sites = find_sites(layer, path, linears, *probe_layer(layer, index, streams))
        _check_called(walk, path, linears, sites, method)
        walk, streams, references = run_reference(walk, index, layer, streams, sites)
        result = LayerResult()
        try:
            _quantize_sites(walk, index, layer, streams, sites, references, linears, method, activation_scale, result)
            break
        except NonFiniteError:
            # the 16-bit layer runs on these windows, this one does not: it is begun again without them
            sound = without_faults(walk, index, layer, streams, sites)
            if sound.windows is walk.windows:
                raise
            streams, walk = streams.leaving_out(index, walk.windows, sound.windows), sound
    before = walk.windows
    walk = advance(walk, index, layer, streams.quantized, _cache_watcher(walk, layer, path, result.kv, with_kv))
    if walk.windows is not before:
        drop(streams.reference, index + 1, before.batches, walk.windows.batches)
    return walk, result


def _check_called(
    walk: Walk, path: str, linears: Mapping[str, PlannedLinear], sites: Sequence[Site], method: Method
) -> None:
    reached = {member for site in sites for member in site.members}
    inside = [stored for hosted, stored in walk.weights.stored.items() if hosted.startswith(f"{path}.")]
    for stored in inside:
        if stored in linears and stored not in reached and needs_text(linears[stored], method):
            raise RecipeError(
                f"{stored}: its inputs are not known, for the model does not call it on plain text",
                hint="keep it in 16 bits (--keep)",
            )


def _quantize_sites(
    walk: Walk,
    index: int,
    layer: nn.Module,
    streams: Streams,
    sites: Sequence[Site],
    references: Mapping[str, SiteInputs],
    linears: Mapping[str, PlannedLinear],
    method: Method,
    activation_scale: ActivationScale,
    result: LayerResult,
) -> None:
    """Changes the layer. NonFiniteError where a site is given NaN or Inf."""
    if method.smoothing:
        _smooth(walk, index, layer, streams, sites, linears, method, activation_scale, result)
    for stage in stages(sites):
        inputs = capture_stage(walk, index, layer, streams.quantized, stage, streams.folder / "inputs")
        pooled = _pooled(stage, inputs) if stage[0].is_expert else None
        for site in stage:
            smoothed = result.smoothed.get(site.members[0])
            job = SiteJob(
                {m: linears[m] for m in site.members},
                {m: rows_of(layer, h) for m, h in zip(site.members, site.hosted, strict=True)},
                inputs[site.name],
                references.get(site.name),
                None if smoothed is None else smoothed.scale,
                method,
                activation_scale,
                pooled,
            )
            _take(result, job, quantize_site(job))
            _put(layer, site, result, activation_scale)
            for used in (inputs[site.name], references.get(site.name)):
                if used is not None:
                    used.clear()


def stages(sites: Sequence[Site]) -> list[list[Site]]:
    """Sites that are captured together: all experts' same projections, and each other site by itself."""
    found: dict[str, list[Site]] = {}
    for site in sites:
        found.setdefault(numberless(site.hosted[0]) if site.is_expert else site.name, []).append(site)
    return list(found.values())


def _smooth(
    walk: Walk,
    index: int,
    layer: nn.Module,
    streams: Streams,
    sites: Sequence[Site],
    linears: Mapping[str, PlannedLinear],
    method: Method,
    activation_scale: ActivationScale,
    result: LayerResult,
) -> None:
    """Searches and folds the scales of all sites with NVFP4 weights that have a fold, from the last to the first."""
    smoothable = [s for s in sites if any(linears[m].scheme.weight is NVFP4 for m in s.members)]
    if not smoothable:
        return
    path = f"{walk.prefix}.{index}"
    folds = find_folds(layer, sites, *probe_layer(layer, index, streams))
    samples = sample_inputs(walk, index, layer, streams.quantized, smoothable, _SMOOTHING_TOKENS)
    result.num_sites = len(smoothable)
    for site in reversed(smoothable):
        fold, sample = folds[site.name], samples.get(site.name)
        if isinstance(fold, NoFold) or sample is None:
            result.unsmoothed[fold.reason if isinstance(fold, NoFold) else "no calibration token reached it"] += 1
            continue
        smoothed = smooth_site(
            layer,
            site,
            fold,
            sample,
            method.smoothing,
            linears,
            activation_scale,
            path=path,
            weights=walk.weights,
        )
        result.tensors |= smoothed.tensors
        result.smoothed |= dict.fromkeys(site.members, smoothed)


def _pooled(stage: Sequence[Site], inputs: Mapping[str, SiteInputs]) -> Moments:
    """Of all experts' inputs, as they come."""
    sums = None
    for site in stage:
        for x in inputs[site.name].train:
            sums = sums or new_moments(site.in_features, x.device)
            add_moments(sums, x, name=site.name)
    return finish(sums if sums is not None else new_moments(stage[0].in_features))


def _take(result: LayerResult, job: SiteJob, done: SiteResult) -> None:
    result.linears |= done.linears
    result.choices |= done.choices
    for member, linear in done.linears.items():
        has_scale = linear.input_global_scale is not None
        result.input_amax[member] = done.input_amax if has_scale else None
        if not done.num_tokens:
            result.notices.append(
                f"{member}: no calibration token reached it; its scales come from its siblings and its weights"
            )
        elif has_scale and not done.input_amax:
            result.notices.append(f"{member}: its inputs were all zero; its input scale is 1")
        rows = job.weights[member]
        error = rows - linear.weight.dequantize(torch.float32).view(rows.shape)
        if linear.low_rank is not None:
            error = error - linear.low_rank.up.float() @ linear.low_rank.down.float()
        sqnr = (10 * (rows.double().square().sum() / error.double().square().sum()).log10()).item()
        result.sqnr_db[member] = sqnr if math.isfinite(sqnr) else None


def _put(layer: nn.Module, site: Site, result: LayerResult, activation_scale: ActivationScale) -> None:
    """The quantized linears take the places of the 16-bit ones."""
    for member, hosted in zip(site.members, site.hosted, strict=True):
        old = layer.get_submodule(hosted)
        assert isinstance(old, KeptLinear)
        packed = PackedLinear(
            result.linears[member], old.bias, is_emulating=True, activation_scale=activation_scale
        ).to(old.weight.device)
        set_module(layer, hosted, packed)


def _cache_watcher(walk: Walk, layer: nn.Module, path: str, ranges: Ranges, with_kv: bool) -> Watch | None:
    return watcher(ranges, partial(watch_caches, layer, walk.weights, path)) if with_kv else None
