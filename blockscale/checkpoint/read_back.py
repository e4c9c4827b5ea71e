"""Whether a folder that was just written reads back as what was meant."""

from collections.abc import Mapping
from pathlib import Path

from blockscale.checkpoint.linear import Scheme
from blockscale.checkpoint.output import Layout
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.errors import CheckpointError


def read_back_problem(path: Path, linears: Mapping[str, tuple[Scheme, tuple[int, ...]]], kept: Layout) -> str | None:
    """What an opener of the folder finds other than planned, as a sentence; None if nothing is.

    `linears`: scheme and shape ([N, K] or [E, N, K]) by module. `kept`: every other tensor but KV-cache scales.
    """
    try:
        written = open_checkpoint(path)
    except CheckpointError as e:
        return f"the written checkpoint does not read back: {e}"
    stored = written.quantized.linears if written.quantized is not None else {}
    found = {module: (linear.scheme, linear.shape) for module, linear in stored.items()}
    planned = {module: (scheme, tuple(shape)) for module, (scheme, shape) in linears.items()}
    kept_found = {name: (tensor.dtype, tensor.shape) for name, tensor in written.kept.items()}
    kept_planned = {name: (dtype, tuple(shape)) for name, (dtype, shape) in kept.items()}
    if found == planned and kept_found == kept_planned:
        return None
    names = dict.fromkeys([*planned, *found, *kept_planned, *kept_found])
    wrong = [n for n in names if found.get(n) != planned.get(n) or kept_found.get(n) != kept_planned.get(n)]
    return f"the written checkpoint is not what was planned, first at '{wrong[0]}'"
