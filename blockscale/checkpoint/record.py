"""What blockscale stores beside a checkpoint (`blockscale.json`), as far as it says how the model is to be run.

`"activation_scale": "four_over_six"`: how the block scales of NVFP4 activations are chosen. Other engines do not read
this file and take amax. The headroom that a search wants in the input_global_scale costs them little: small blocks
reach E4M3's subnormals a little sooner. Needs no torch.
"""

from pathlib import Path

from blockscale.algorithms.activation_scale import ActivationScale
from blockscale.checkpoint.shards import read_json
from blockscale.errors import CheckpointError

RECORD_NAME = "blockscale.json"
ACTIVATION_SCALE = "activation_scale"


def read_activation_scale(folder: Path) -> ActivationScale:
    """AMAX where no such file is, or none that can be read: it is a remark. CheckpointError for one that says what this
    version does not know, because the model would not run as it was meant to."""
    said = _said_activation_scale(folder)
    try:
        return ActivationScale.AMAX if said is None else ActivationScale(said)
    except ValueError:
        known = ", ".join(method.value for method in ActivationScale)
        raise CheckpointError(
            f"{folder / RECORD_NAME}: {ACTIVATION_SCALE} {said!r} is not known",
            hint=f"known: {known}; a newer blockscale may have written it",
        ) from None


def activation_scale_entry(method: ActivationScale) -> dict[str, str]:
    """For the record of a checkpoint that is being written: nothing for AMAX."""
    return {} if method is ActivationScale.AMAX else {ACTIVATION_SCALE: method.value}


def _said_activation_scale(folder: Path) -> object:
    file = folder / RECORD_NAME
    try:
        return read_json(file).get(ACTIVATION_SCALE) if file.is_file() else None
    except (CheckpointError, OSError):
        return None
