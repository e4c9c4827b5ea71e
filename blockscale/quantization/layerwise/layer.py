"""One decoder layer quantized: a job that follows from its weights and two generations of hidden states alone.

    find sites and folds --> smooth, last site first --> per stage, in the order of the forward pass:
        capture what the half-quantized layer gives the stage's sites --> quantize them --> put them into the layer
    --> the quantized layer writes the next generation

The 16-bit layer runs beside it, on the 16-bit model's hidden states: its inputs are the targets.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from blockscale.algorithms.activation_scale import ActivationScale
from blockscale.algorithms.statistics import Moments, add_moments, finish, new_moments
from blockscale.checkpoint.linear import QuantizedLinear
from blockscale.host.linear import KeptLinear, PackedLinear
from blockscale.quantization.fold_search import find_folds
from blockscale.quantization.folds import Fold
from blockscale.quantization.hidden_states import HiddenStates
from blockscale.quantization.layer_probe import CallLayer
from blockscale.quantization.layerwise.capture import Capture, SiteInputs, capture_stage, sample_inputs
from blockscale.quantization.layerwise.method import Method
from blockscale.quantization.layerwise.rounding import Choice
from blockscale.quantization.layerwise.site import SiteJob, SiteResult, quantize_site
from blockscale.quantization.layerwise.smoothing import Smoothed, smooth_site
from blockscale.quantization.plan import PlannedLinear
from blockscale.quantization.ranges import Ranges, watch_caches
from blockscale.quantization.sites import Site, find_sites
from blockscale.quantization.walk import Keep, Walk, advance

_SMOOTHING_TOKENS = 4096


@dataclass
class LayerResult:
    """What a layer became. By member: `linears`, `choices`, `input_amax`, `smoothed`; `rows`: fp32 weights after folds,
    which the codes stand for. `tensors`: stored tensors that folds changed."""

    linears: dict[str, QuantizedLinear] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)
    smoothed: dict[str, Smoothed] = field(default_factory=dict)
    input_amax: dict[str, float | None] = field(default_factory=dict)
    sqnr_db: dict[str, float] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    kv: Ranges = field(default_factory=Ranges)


@dataclass(frozen=True)
class Streams:
    """Hidden states of the model as quantized so far, and of the 16-bit model. `probe`: a walk over a few tokens."""

    quantized: HiddenStates
    reference: HiddenStates
    probe: Walk
    folder: Path


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
    layer, original = walk.load(index), walk.load(index)
    call_layer, hidden = _probe(layer, index, streams)
    sites = find_sites(layer, path, linears, call_layer, hidden)
    result = LayerResult()
    walk, references = _run_reference(walk, index, original, streams, sites)
    del original
    if method.smoothing and sites:
        _smooth(walk, index, layer, streams, sites, linears, method, activation_scale, result)
    for stage in stages(sites):
        inputs = capture_stage(walk, index, layer, streams.quantized, stage, streams.folder / "inputs")
        pooled = _pooled(stage, inputs) if stage[0].is_expert else None
        for site in stage:
            smoothed = result.smoothed.get(site.members[0])
            job = SiteJob(
                {m: linears[m] for m in site.members},
                {m: _rows(layer, h) for m, h in zip(site.members, site.hosted, strict=True)},
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
    before = walk.windows
    walk = advance(walk, index, layer, streams.quantized, _cache_watcher(walk, layer, path, result.kv, with_kv))
    if walk.windows is not before:
        _drop(streams.reference, index + 1, before.batches, walk.windows.batches)
    return walk, result


def stages(sites: Sequence[Site]) -> list[list[Site]]:
    """Sites that are captured together: all experts' same projections, and each other site by itself."""
    found: dict[str, list[Site]] = {}
    for site in sites:
        numberless = ".".join("*" if part.isdigit() else part for part in site.hosted[0].split("."))
        found.setdefault(numberless if site.is_expert else site.name, []).append(site)
    return list(found.values())


def _probe(layer: nn.Module, index: int, streams: Streams) -> tuple[CallLayer, Tensor]:
    """The layer with the arguments of a few tokens, and hidden states of their shape."""
    probe = streams.probe
    args, kwargs = probe.call(index, 0, streams.quantized)

    def call_layer(hidden: Tensor) -> Tensor:
        output = layer(hidden, *args, **kwargs)
        return output[0] if isinstance(output, tuple) else output

    return call_layer, streams.quantized.read(index, 0)[:1, : probe.windows.ids.shape[1]].to(probe.device)


def _run_reference(
    walk: Walk, index: int, original: nn.Module, streams: Streams, sites: Sequence[Site]
) -> tuple[Walk, Mapping[str, SiteInputs]]:
    """Runs the 16-bit layer and keeps what its sites are given, but for experts: the two models may send a token to
    different ones. Windows that the layer cannot run leave both streams."""
    while True:
        capture = Capture([s for s in sites if not s.is_expert], walk, streams.folder / "references")
        with capture.listening(original) as watch:
            after = advance(walk, index, original, streams.reference, watch)
        if after.windows is walk.windows:
            return walk, capture.inputs
        for inputs in capture.inputs.values():
            inputs.clear()
        for states in (streams.quantized, streams.reference):
            _drop(states, index, walk.windows.batches, after.windows.batches)
        walk = after


def _drop(
    states: HiddenStates, generation: int, before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]
) -> None:
    """Takes windows out of a generation."""
    left = {number for batch in after for number in batch}
    num_batches = 0
    for batch, numbers in enumerate(before):
        places = [i for i, number in enumerate(numbers) if number in left]
        if places:
            hidden = states.read(generation, batch)
            states.write(generation, num_batches, hidden.index_select(hidden.dim() - 3, torch.tensor(places)))
            num_batches += 1


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
    """Searches and folds the scales of all sites that have a fold, from the last to the first."""
    path = f"{walk.prefix}.{index}"
    call_layer, hidden = _probe(layer, index, streams)
    folds = find_folds(layer, sites, call_layer, hidden)
    samples = sample_inputs(walk, index, layer, streams.quantized, sites, _SMOOTHING_TOKENS)
    for site in reversed(sites):
        fold, sample = folds[site.name], samples.get(site.name)
        if not isinstance(fold, Fold) or sample is None:
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


def _rows(layer: nn.Module, hosted: str) -> Tensor:
    """fp32 [N, K]; the experts of a stack one below the other."""
    module = layer.get_submodule(hosted)
    assert isinstance(module, KeptLinear)
    return module.weight.float().flatten(0, -2)


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
        result.input_amax[member] = done.input_amax if linear.input_global_scale is not None else None
        rows = job.weights[member]
        error = rows - linear.weight.dequantize(torch.float32).view(rows.shape)
        if linear.low_rank is not None:
            error = error - linear.low_rank.up.float() @ linear.low_rank.down.float()
        ratio = rows.double().square().sum() / error.double().square().sum()
        result.sqnr_db[member] = (10 * ratio.log10()).item()


def _put(layer: nn.Module, site: Site, result: LayerResult, activation_scale: ActivationScale) -> None:
    """The quantized linears take the places of the 16-bit ones."""
    for member, hosted in zip(site.members, site.hosted, strict=True):
        old = layer.get_submodule(hosted)
        assert isinstance(old, KeptLinear)
        packed = PackedLinear(
            result.linears[member], old.bias, is_emulating=True, activation_scale=activation_scale
        ).to(old.weight.device)
        parent, _, leaf = hosted.rpartition(".")
        layer.get_submodule(parent).register_module(leaf, packed)


def _cache_watcher(walk: Walk, layer: nn.Module, path: str, ranges: Ranges, with_kv: bool) -> Callable[[], Keep] | None:
    if not with_kv:
        return None

    def watch() -> Keep:
        seen = Ranges()
        watch_caches(layer, walk.weights, path, seen)
        return lambda: ranges.add(seen)

    return watch
