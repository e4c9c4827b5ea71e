"""Quantize a model's decoder layers one after the other, each on what the layers quantized before it give.

    embedded windows --> layer 0 --> its tensors written, both streams' next generation --> layer 1 --> ...

After each layer its tensors are in the output and a state file says where to go on, so that a run killed anywhere and
resumed writes the same bytes as one that was not.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from blockscale.algorithms.activation_scale import ActivationScale
from blockscale.checkpoint.output import OutputFolder
from blockscale.checkpoint.reader import DIALECTS, Checkpoint
from blockscale.errors import RecipeError
from blockscale.host.model import check_ids
from blockscale.host.skeleton import build_skeleton, decoder_layers, load_config
from blockscale.host.weights import HostedWeights, host_weights
from blockscale.quantization.calibrate import check_observable
from blockscale.quantization.calibration_data import CalibrationData
from blockscale.quantization.hidden_states import HiddenStates
from blockscale.quantization.layerwise.branches import empty_branches
from blockscale.quantization.layerwise.layer import LayerResult, quantize_layer
from blockscale.quantization.layerwise.method import METHODS, Method
from blockscale.quantization.layerwise.state import forget_state, load_state, save_state
from blockscale.quantization.layerwise.streams import Streams
from blockscale.quantization.plan import Plan
from blockscale.quantization.ranges import Ranges, watcher_before
from blockscale.quantization.recipe import Recipe
from blockscale.quantization.statistics import ActivationStatistics
from blockscale.quantization.walk import record_calls
from blockscale.quantization.windows import Windows

_PROBE_TOKENS = 32


def quantize_layers(
    checkpoint: Checkpoint,
    plan: Plan,
    output: OutputFolder,
    recipe: Recipe,
    data: CalibrationData,
    *,
    with_kv: bool,
    device: str = "cpu",
    progress: Callable[[str, int, int], None] | None = None,
) -> ActivationStatistics:
    """Writes every planned linear of the decoder layers to `output`, and the tensors that smoothing changed.

    What lies outside the layers is left to the caller. ModelError, RecipeError as `calibrate`.
    """
    assert recipe.method is not None
    method, activation_scale = METHODS[recipe.method], ActivationScale(recipe.activation_scale)
    config = load_config(checkpoint.path)
    dtype = torch.float32 if device == "cpu" else checkpoint.dtype
    model = build_skeleton(config, dtype, with_kv_transforms=with_kv)
    weights = host_weights(model, checkpoint, is_emulating=False)
    prefix, layers = decoder_layers(model)
    check_ids(data.windows, model)
    folder = output.state_path("layers")
    for name in ("inputs", "references"):
        shutil.rmtree(folder / name, ignore_errors=True)  # of a layer that was killed
    with torch.no_grad():
        quantized, reference = streams = [HiddenStates(folder, name) for name in ("quantized", "reference")]
        state = load_state(folder, data, streams, len(layers), device)
        if state.next_layer < len(layers):
            is_new = state.next_layer == 0
            if is_new:
                forget_state(folder)
                for stream in streams:
                    stream.clear()
            before = Ranges()
            walk = record_calls(
                model,
                weights,
                state.windows(data, device),
                folder / "calls",
                device=device,
                states=reference if is_new else None,
                watch=watcher_before(before) if is_new else None,
            )
            if is_new:
                for batch in range(len(walk.windows.batches)):
                    quantized.write(0, batch, reference.read(0, batch))
                seen = {name: amax for name, amax in before.input_amax.items() if name in plan.linears}
                state = replace(state, probe=walk.windows.batches[0][0], input_amax=seen)
                _check_observable(plan, method, seen, prefix, weights)
            few = Windows(data.windows[state.probe : state.probe + 1, :_PROBE_TOKENS])
            probe = record_calls(model, weights, few, folder / "probe", device=device)
            both = Streams(quantized, reference, probe, HiddenStates(folder, "probe"), folder)
            for index in range(state.next_layer, len(layers)):
                for stream in streams:
                    stream.keep_only(index)
                walk, result = quantize_layer(
                    walk, index, both, plan.linears, method, activation_scale, with_kv=with_kv
                )
                _write(result, plan, output, DIALECTS[recipe.dialect])
                state = state.after(walk.windows, result)
                save_state(state, folder, data)
                if progress:
                    progress("quantizing layers", index + 1, len(layers))
        for stream in streams:
            stream.clear()
    windows = state.windows(data, device)
    notices = (*windows.notices, *state.notices, *state.smoothing_notices)
    return ActivationStatistics(state.input_amax, state.kv_amax, windows.num_tokens, notices)


def _check_observable(
    plan: Plan, method: Method, seen: Mapping[str, float], prefix: str, weights: HostedWeights
) -> None:
    """Before the long work."""
    inside = {stored for hosted, stored in weights.stored.items() if hosted.startswith(prefix + ".")}
    wanted = [module for module, linear in plan.linears.items() if linear.scheme.needs_input_scale]
    check_observable(wanted, seen, prefix, weights)
    for module, linear in plan.linears.items():
        if module not in inside and empty_branches(linear, method):
            raise RecipeError(
                f"{module}: nothing can be put beside its weight, for it lies outside the decoder layers",
                hint="keep it in 16 bits (--keep), or take a method without branches",
            )


def _write(result: LayerResult, plan: Plan, output: OutputFolder, dialect: Any) -> None:
    """A layer's tensors, and a record of each fused group."""
    for module, linear in result.linears.items():
        for name, tensor in dialect.to_tensors(module, linear).items():
            output.write(name, tensor)
    for name, tensor in result.tensors.items():
        output.write(name, tensor)
        output.mark_done(name)
    for group, members in plan.groups.items():
        if all(m in result.linears for m in members):
            output.mark_done(group, {m: _record(m, result) for m in members})


def _record(module: str, result: LayerResult) -> dict[str, Any]:
    linear, sqnr = result.linears[module], result.sqnr_db[module]
    choice, smoothed = result.choices.get(module), result.smoothed.get(module)
    nearest = None if choice is None else choice.losses.get("nearest")
    chosen = None if choice is None else choice.losses.get(choice.name)
    return {
        "format": linear.scheme.weight.name,
        "activation": linear.scheme.activation.name if linear.scheme.activation else None,
        "shape": list(linear.weight.shape),
        "sqnr_db": None if sqnr is None else round(sqnr, 3),
        "input_amax": result.input_amax.get(module),
        "chosen": None if choice is None else choice.name,
        "gain": round(1 - chosen / nearest, 4) if nearest and chosen is not None else None,
        "smoothing": None if smoothed is None else smoothed.name,
    }
