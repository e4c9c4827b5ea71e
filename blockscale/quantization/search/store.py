"""Scores in a file, so that another budget for the same model needs no gradients again."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from blockscale.checkpoint.shards import read_json
from blockscale.errors import CheckpointError, UsageError
from blockscale.pages import write_page
from blockscale.quantization.search.groups import Group
from blockscale.quantization.search.sensitivity import Sensitivity


def scores_digest(job: str, groups: Sequence[Group], method: str) -> str:
    """Of all that scores depend on. `job`: see `pipeline.job_digest`."""
    asked = [[group.name, group.members, [(o.name, str(o.rule)) for o in group.options]] for group in groups]
    return hashlib.sha256(json.dumps([job, asked, method]).encode()).hexdigest()


def save_scores(path: Path, digest: str, sensitivity: Sensitivity) -> None:
    write_page(json.dumps({"digest": digest, **asdict(sensitivity)}, indent=1) + "\n", path)


def load_scores(path: Path, digest: str, groups: Sequence[Group]) -> Sensitivity | None:
    """None if there is no file yet. UsageError for scores of another model, recipe, text, device or version."""
    if not path.exists():
        return None
    try:
        data = dict(read_json(path))
    except CheckpointError as e:
        raise UsageError(f"scores {path} cannot be read: {e}", hint="remove it, and it is made anew") from e
    names = {field.name for field in fields(Sensitivity)}
    if set(data) != {*names, "digest"}:
        raise UsageError(f"{path} holds no scores", hint="give --scores another name")
    if data.pop("digest") != digest:
        raise UsageError(
            f"{path} holds scores of another model, recipe, text, device or version",
            hint="remove it, or give --scores another name",
        )
    found = Sensitivity(**data)
    try:
        is_sound = all(math.isfinite(score) and score >= 0 for row in found.table(groups) for score in row)
    except (KeyError, TypeError):
        is_sound = False
    if not is_sound:
        raise UsageError(f"{path} lacks scores of this model's groups", hint="remove it, and it is made anew")
    return found
