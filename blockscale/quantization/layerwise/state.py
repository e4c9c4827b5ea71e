"""Where a layer-wise run stands after whole layers: what a killed one finds again."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from blockscale.checkpoint.output import PROGRESS_NAME, save_progress
from blockscale.checkpoint.target import disk_errors
from blockscale.quantization.calibration_data import CalibrationData
from blockscale.quantization.hidden_states import HiddenStates
from blockscale.quantization.layerwise.layer import LayerResult
from blockscale.quantization.windows import Windows

_CPU_BATCH, _GPU_BATCH = 4, 32  # windows: what a CPU holds beside a layer, and what keeps a GPU busy


@dataclass(frozen=True)
class State:
    """Both streams hold generation `next_layer`, without the windows in `faults`.

    probe       number of the window whose first tokens layers are probed with
    input_amax  of linears before the layers
    unsmoothed  why inputs were not smoothed, and how many, of `num_sites`
    """

    next_layer: int = 0
    probe: int = 0
    faults: Mapping[int, str] = field(default_factory=dict)
    input_amax: Mapping[str, float] = field(default_factory=dict)
    kv_amax: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    unsmoothed: Mapping[str, int] = field(default_factory=dict)
    num_sites: int = 0

    def windows(self, data: CalibrationData, device: str) -> Windows:
        return Windows(data.windows, self.faults, _CPU_BATCH if device == "cpu" else _GPU_BATCH)

    def after(self, windows: Windows, result: LayerResult) -> "State":
        """One layer further."""
        return replace(
            self,
            next_layer=self.next_layer + 1,
            faults=windows.faults,
            kv_amax={**self.kv_amax, **result.kv.kv_amax},
            notices=(*self.notices, *result.notices),
            unsmoothed=dict(Counter(self.unsmoothed) + result.unsmoothed),
            num_sites=self.num_sites + result.num_sites,
        )

    @property
    def smoothing_notices(self) -> tuple[str, ...]:
        if not self.unsmoothed:
            return ()
        reasons = sorted(self.unsmoothed.items(), key=lambda item: (-item[1], item[0]))
        listed = "; ".join(f"{reason} ({count})" for reason, count in reasons)
        return (f"{sum(self.unsmoothed.values())} of {self.num_sites} inputs are not smoothed: {listed}",)


def save_state(state: State, folder: Path, data: CalibrationData) -> None:
    save_progress(folder, {"digest": data.digest, **asdict(state)})


def load_state(
    folder: Path, data: CalibrationData, streams: Sequence[HiddenStates], num_layers: int, device: str
) -> State:
    """What an earlier run left, if all that is needed to go on is there; else the beginning."""
    try:
        facts = json.loads((folder / PROGRESS_NAME).read_text(encoding="utf-8"))
        is_ours = facts.pop("digest") == data.digest
        state = State(**facts)
        state = replace(
            state,
            faults={int(number): why for number, why in state.faults.items()},
            kv_amax={name: (key, value) for name, (key, value) in state.kv_amax.items()},
            notices=tuple(state.notices),
        )
        num_batches = len(state.windows(data, device).batches)
        is_done = state.next_layer >= num_layers
        is_whole = is_done or all(stream.is_whole(state.next_layer, num_batches) for stream in streams)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return State()
    return state if is_ours and is_whole else State()


def forget_state(folder: Path) -> None:
    """Of a run that cannot be taken up: its files are about to change."""
    with disk_errors(folder):
        (folder / PROGRESS_NAME).unlink(missing_ok=True)
