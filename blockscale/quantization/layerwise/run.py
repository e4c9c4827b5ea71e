"""Quantize a model's decoder layers one after the other, each on what the layers quantized before it give.

    embedded windows --> layer 0 --> its tensors written, both streams' next generation --> layer 1 --> ...

After each layer its tensors are in the output and a state file says where to go on, so that a run killed anywhere and
resumed writes the same bytes as one that was not.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from blockscale.algorithms.activation_scale import ActivationScale
from blockscale.checkpoint.output import PROGRESS_NAME, OutputFolder
from blockscale.checkpoint.reader import DIALECTS, Checkpoint
from blockscale.checkpoint.target import disk_errors
from blockscale.errors import RecipeError
from blockscale.host.model import check_ids
from blockscale.host.skeleton import build_skeleton, decoder_layers, load_config
from blockscale.host.weights import host_weights
from blockscale.quantization.calibration_data import CalibrationData
from blockscale.quantization.hidden_states import HiddenStates
from blockscale.quantization.layerwise.layer import LayerResult, Streams, quantize_layer
from blockscale.quantization.layerwise.method import METHODS
from blockscale.quantization.plan import Plan
from blockscale.quantization.recipe import Recipe
from blockscale.quantization.statistics import ActivationStatistics
from blockscale.quantization.walk import Walk, record_calls
from blockscale.quantization.windows import BATCH, Windows

_PROBE_TOKENS = 32
_GPU_BATCH = 32


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
    inside = {stored for hosted, stored in weights.stored.items() if hosted.startswith(prefix + ".")}
    _check_inside(plan, inside)
    folder = output.state_path("layers")
    with torch.no_grad():
        streams = [HiddenStates(folder, name) for name in ("quantized", "reference")]
        state = _load_state(folder, data, streams, device)
        embedded = HiddenStates(folder, "embedded") if state.next_layer == 0 else None
        walk = record_calls(
            model, weights, state.windows(data, device), folder / "calls", device=device, states=embedded
        )
        if embedded is not None:
            _begin(walk, embedded, streams)
        few = Windows(data.windows[:1, :_PROBE_TOKENS])
        probe = record_calls(model, weights, few, folder / "probe", device=device)
        both = Streams(streams[0], streams[1], probe, folder)
        for index in range(state.next_layer, len(layers)):
            for stream in streams:
                stream.keep_only(index)
            walk, result = quantize_layer(walk, index, both, plan.linears, method, activation_scale, with_kv=with_kv)
            _write(result, plan, output, DIALECTS[recipe.dialect])
            state = state.after(index, walk, result)
            _save_state(state, folder, data)
            if progress:
                progress("quantizing layers", index + 1, len(layers))
        for stream in streams:
            stream.clear()
    return ActivationStatistics({}, state.kv_amax, walk.windows.num_tokens, (*walk.windows.notices, *state.notices))


def _check_inside(plan: Plan, inside: set[str]) -> None:
    for module, linear in plan.linears.items():
        if module not in inside and linear.scheme.needs_input_scale:
            raise RecipeError(
                f"{module}: its input scale cannot be calibrated, for it lies outside the decoder layers",
                hint="store it with 16-bit activations (activation: null), or keep it",
            )


def _begin(walk: Walk, embedded: HiddenStates, streams: list[HiddenStates]) -> None:
    """Both streams start from the same hidden states."""
    for stream in streams:
        stream.clear()
        for batch in range(len(walk.windows.batches)):
            stream.write(0, batch, embedded.read(0, batch))
    embedded.clear()


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
    linear = result.linears[module]
    choice, smoothed = result.choices.get(module), result.smoothed.get(module)
    nearest = None if choice is None else choice.losses.get("nearest")
    chosen = None if choice is None else choice.losses.get(choice.name)
    return {
        "format": linear.scheme.weight.name,
        "activation": linear.scheme.activation.name if linear.scheme.activation else None,
        "shape": list(linear.weight.shape),
        "sqnr_db": round(result.sqnr_db[module], 3),
        "input_amax": result.input_amax.get(module),
        "chosen": None if choice is None else choice.name,
        "gain": round(1 - chosen / nearest, 4) if nearest and chosen is not None else None,
        "smoothing": None if smoothed is None else smoothed.name,
    }


@dataclass(frozen=True)
class _State:
    """Where a run stands after whole layers."""

    next_layer: int = 0
    faults: Mapping[int, str] = field(default_factory=dict)
    kv_amax: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    def windows(self, data: CalibrationData, device: str) -> Windows:
        return Windows(data.windows, self.faults, BATCH if device == "cpu" else _GPU_BATCH)

    def after(self, index: int, walk: Walk, result: LayerResult) -> "_State":
        notices = tuple(
            f"{module}: no calibration token reached it; its scales come from its siblings and its weights"
            for module, choice in result.choices.items()
            if not choice.losses
        )
        return _State(index + 1, walk.windows.faults, {**self.kv_amax, **result.kv.kv_amax}, (*self.notices, *notices))


def _save_state(state: _State, folder: Path, data: CalibrationData) -> None:
    partial = folder / f"{PROGRESS_NAME}.partial"
    with disk_errors(folder):
        partial.write_text(json.dumps({"digest": data.digest, **asdict(state)}), encoding="utf-8")
        os.replace(partial, folder / PROGRESS_NAME)


def _load_state(folder: Path, data: CalibrationData, streams: list[HiddenStates], device: str) -> _State:
    """What an earlier run left, if all of it is there; else the beginning."""
    path = folder / PROGRESS_NAME
    if not path.is_file():
        return _State()
    facts = json.loads(path.read_text(encoding="utf-8"))
    state = _State(
        facts["next_layer"],
        {int(number): why for number, why in facts["faults"].items()},
        {name: (pair[0], pair[1]) for name, pair in facts["kv_amax"].items()},
        tuple(facts["notices"]),
    )
    num_batches = len(state.windows(data, device).batches)
    is_whole = all(stream.is_whole(state.next_layer, num_batches) for stream in streams)
    return state if facts["digest"] == data.digest and is_whole else _State()
