"""Activation statistics from calibration text: the largest magnitude of each linear's input, a layer at a time.

After every decoder layer what is known is written down, so that a killed run goes on at the layer where it was, with
the same result.
"""

import json
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from blockscale.checkpoint.groups import expert_set
from blockscale.checkpoint.output import PROGRESS_NAME, save_progress
from blockscale.checkpoint.reader import Checkpoint
from blockscale.checkpoint.target import disk_errors
from blockscale.errors import RecipeError
from blockscale.host.linear import KeptLinear
from blockscale.host.model import check_ids
from blockscale.host.skeleton import build_skeleton, decoder_layers, load_config
from blockscale.host.weights import HostedWeights, host_weights
from blockscale.quantization.calibration_data import CalibrationData
from blockscale.quantization.hidden_states import HiddenStates
from blockscale.quantization.plan import PlannedLinear
from blockscale.quantization.ranges import Ranges, watch_caches, watch_inputs, watcher, watcher_before
from blockscale.quantization.statistics import ActivationStatistics
from blockscale.quantization.walk import Watch, advance, discard_arguments, record_calls
from blockscale.quantization.windows import Windows


def calibrate(
    checkpoint: Checkpoint,
    data: CalibrationData,
    linears: Mapping[str, PlannedLinear],
    *,
    with_kv: bool,
    device: str = "cpu",
    state_folder: Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> ActivationStatistics:
    """Runs the 16-bit model over `data` and keeps the largest magnitude of each planned linear's input.

    state_folder   for hidden states, and for unfinished work, of the same data, that is taken up; by default a
                   temporary folder

    A window that gives NaN or Inf is left out from the layer on where it does, and a notice says how many were; if
    they are more than half, ModelError names the first place.
    """
    config = load_config(checkpoint.path)
    dtype = torch.float32 if device == "cpu" else checkpoint.dtype
    model = build_skeleton(config, dtype, with_kv_transforms=with_kv)
    weights = host_weights(model, checkpoint, is_emulating=False)
    prefix, layers = decoder_layers(model)
    wanted = [module for module, linear in linears.items() if linear.scheme.needs_input_scale]
    check_ids(data.windows, model)
    with _opened(state_folder) as folder, torch.no_grad():
        states = HiddenStates(folder, "hidden")
        state = _load_state(folder, data) or _State(0, Windows(data.windows), Ranges())
        if not _can_go_on(state, states, len(layers)):
            state = _State(0, Windows(data.windows), Ranges())
        ranges, windows = state.ranges, state.windows

        if state.next_layer < len(layers):
            embedded = None
            if state.next_layer == 0:
                states.clear()
                embedded = states
            else:
                states.keep_only(state.next_layer)
            walk = record_calls(
                model, weights, windows, folder, device=device, states=embedded, watch=watcher_before(ranges)
            )
            check_observable(wanted, ranges.input_amax, prefix, weights)
            for index in range(state.next_layer, len(layers)):
                layer = walk.load(index)
                watch = _watcher(layer, weights, f"{prefix}.{index}", ranges, with_kv)
                walk = advance(walk, index, layer, states, watch)
                windows = walk.windows
                del layer, watch  # the next one takes its place in memory
                _save_state(_State(index + 1, windows, ranges), folder, data.digest)
                states.keep_only(index + 1)
                if progress:
                    progress("calibrating", index + 1, len(layers))
        discard_arguments(folder)
        states.clear()
    input_amax, notices = _fill_gaps(ranges.input_amax, wanted)
    return ActivationStatistics(input_amax, ranges.kv_amax, windows.num_tokens, (*windows.notices, *notices))


def _watcher(layer: nn.Module, weights: HostedWeights, path: str, ranges: Ranges, with_kv: bool) -> Watch:
    """Counts what a batch shows of the layer at `path` in the model to `ranges`, if the batch is sound."""
    linears = [module for module in layer.modules() if isinstance(module, KeptLinear)]

    def observe(seen: Ranges) -> None:
        watch_inputs(linears, seen)
        if with_kv:
            watch_caches(layer, weights, path, seen)

    return watcher(ranges, observe)


def check_observable(wanted: Iterable[str], seen: Container[str], prefix: str, weights: HostedWeights) -> None:
    """Only decoder layers, and what comes before them, are run: RecipeError, before the long work, for a scale that
    could not be found. `seen`: linears before the layers."""
    inside = {stored for hosted, stored in weights.stored.items() if hosted.startswith(prefix + ".")}
    for module in wanted:
        if module not in inside and module not in seen:
            raise RecipeError(
                f"{module}: its input scale cannot be calibrated, for it lies outside the decoder layers",
                hint="store it with 16-bit activations (activation: null), or keep it",
            )


def _fill_gaps(seen: Mapping[str, float], wanted: Sequence[str]) -> tuple[dict[str, float], tuple[str, ...]]:
    """Experts that no token reached get the largest amax of their siblings, flagged; a linear without any is left out
    and so refused later."""
    siblings: dict[tuple[str, str], float] = {}
    for module in wanted:
        if (key := _sibling_key(module)) and module in seen:
            siblings[key] = max(siblings.get(key, 0.0), seen[module])
    result, notices = {}, []
    for module in wanted:
        amax = seen.get(module)
        if not amax and (key := _sibling_key(module)) in siblings:
            why = "no calibration token reached it" if amax is None else "its inputs were all zero"
            amax = siblings[key]
            notices.append(f"{module}: {why}; its input scale is its siblings' largest")
        elif amax == 0.0:
            notices.append(f"{module}: its inputs were all zero; its input scale is 1")
        if amax is not None:
            result[module] = amax
    return result, tuple(notices)


def _sibling_key(module: str) -> tuple[str, str] | None:
    """The layer's experts and the projection; None for a linear that has no siblings."""
    experts = expert_set(module)
    return None if experts is None else (experts, module.rpartition(".")[2])


@dataclass(frozen=True)
class _State:
    """Progress of a calibration. The hidden states of generation `next_layer` belong to it."""

    next_layer: int
    windows: Windows
    ranges: Ranges


@contextmanager
def _opened(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with disk_errors(Path("a temporary folder")):
        temporary = tempfile.TemporaryDirectory(prefix="blockscale-", ignore_cleanup_errors=True)
    with temporary as name:
        yield Path(name)


def _save_state(state: _State, folder: Path, digest: str) -> None:
    facts = {
        "digest": digest,
        "next_layer": state.next_layer,
        "faults": list(state.windows.faults.items()),
        "input_amax": state.ranges.input_amax,
        "kv_amax": state.ranges.kv_amax,
    }
    save_progress(folder, facts)


def _load_state(folder: Path, data: CalibrationData) -> _State | None:
    """None if there is none, or one of other data."""
    try:
        facts = json.loads((folder / PROGRESS_NAME).read_text())
        if facts["digest"] != data.digest:
            return None
        kv = {name: (pair[0], pair[1]) for name, pair in facts["kv_amax"].items()}
        windows = Windows(data.windows, dict(facts["faults"]))
        return _State(facts["next_layer"], windows, Ranges(facts["input_amax"], kv))
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _can_go_on(state: _State, states: HiddenStates, num_layers: int) -> bool:
    is_done = state.next_layer >= num_layers
    return state.next_layer == 0 or is_done or states.is_whole(state.next_layer, len(state.windows.batches))
