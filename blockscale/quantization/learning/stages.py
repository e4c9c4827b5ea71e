"""Quantize, then learn: two stages, of which the first leaves a checkpoint of its own beside the output until both are
done.

    .NAME.learning/.checkpoint.partial  the first stage at work
                   checkpoint/          what it made
                   finished.json        job, summary and windows of it; once this is there, a resumed run learns at once
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockscale.checkpoint.output import lock_folder
from blockscale.checkpoint.reader import Checkpoint
from blockscale.checkpoint.shards import read_json
from blockscale.checkpoint.target import disk_errors
from blockscale.errors import OutputError
from blockscale.formats.spec import NVFP4
from blockscale.quantization.calibration_data import CalibrationData
from blockscale.quantization.layerwise.method import METHODS
from blockscale.quantization.learning.learn import Progress, check_room, learn
from blockscale.quantization.plan import Plan
from blockscale.quantization.recipe import Recipe
from blockscale.quantization.summary import LayerRecord, Summary

_FINISHED = "finished.json"
FirstStage = Callable[[Path], tuple[Summary, CalibrationData | None]]


def learning_steps(recipe: Recipe) -> int:
    """How many steps a recipe's method learns after everything else."""
    return METHODS[recipe.method].learning_steps if recipe.method is not None else 0


def quantize_and_learn(
    out: Path,
    first: FirstStage,
    source: Checkpoint,
    plan: Plan,
    data: CalibrationData,
    recipe: Recipe,
    *,
    job: str,
    device: str = "cpu",
    resume: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Runs `first` into a folder beside `out`, and learns from there to `out`, which appears whole or not at all.

    first   writes a checkpoint to the folder it is given, and says what it did and on which windows; it resumes by
            itself where it was asked to
    data    of `first`, before it runs: windows that are still to be written may be missing
    job     digest of what determines the first stage's bytes

    OutputError for the unfinished work of another job; else as `learn`.
    """
    num_weights = sum(torch.Size(p.shape).numel() for p in plan.linears.values() if p.scheme.weight is NVFP4)
    check_room(num_weights, source, data.windows.shape[1], device)  # before hours of work, not after them
    with _workplace(out, job, resume) as work:
        checkpoint, record = work / "checkpoint", work / _FINISHED
        if not record.is_file():
            summary, used = first(checkpoint)
            assert used is not None
            _save(record, job, summary, used.windows)
        summary, windows = _load(record)
        learned = learn(
            checkpoint,
            source,
            replace(data, windows=windows),
            out,
            steps=learning_steps(recipe),
            seed=data.seed,
            device=device,
            progress=progress,
        )
    layers = {
        name: replace(layer, sqnr_db=learned.sqnr_db.get(name, layer.sqnr_db)) for name, layer in summary.layers.items()
    }
    return replace(
        summary,
        out=learned.out,
        layers=layers,
        notices=(*summary.notices, *learned.notices),
        learning=learned.learning,
    )


def learning_path(out: Path) -> Path:
    return out.parent / f".{out.name}.learning"


@contextmanager
def _workplace(out: Path, job: str, resume: bool) -> Iterator[Path]:
    """The folder of the first stage, locked. An interruption leaves what a later `resume` can use; an error, and the
    end, leave nothing of this job."""
    out = Path(os.path.abspath(out))
    work = learning_path(out)
    with disk_errors(out):
        lock = lock_folder(work, out)
    try:
        if resume and (work / _FINISHED).is_file() and read_json(work / _FINISHED).get("job") != job:
            raise OutputError(
                f"{work} is the unfinished work of another job (model, recipe, text, device or version)",
                hint="run that job again with --resume, or drop --resume to start over",
            )
        if not resume or not (work / _FINISHED).is_file():
            _remove(work / _FINISHED, work / "checkpoint")
        try:
            yield work
        except Exception:
            _remove(work / _FINISHED, work / "checkpoint")
            raise
        _remove(work / _FINISHED, work / "checkpoint")
    finally:
        with suppress(OSError):  # something is left to resume, perhaps another job's
            work.rmdir()
        os.close(lock)


def _remove(record: Path, checkpoint: Path) -> None:
    """The record first: without it nothing counts as finished."""
    record.unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def _save(record: Path, job: str, summary: Summary, windows: Tensor) -> None:
    content = json.dumps({"job": job, "summary": summary.to_dict(), "windows": windows.tolist()})
    partial = record.with_suffix(".partial")
    with disk_errors(record):
        partial.write_text(content, encoding="utf-8")
        os.replace(partial, record)


def _load(record: Path) -> tuple[Summary, Tensor]:
    content = read_json(record)
    facts: dict[str, Any] = content["summary"]
    layers = {name: LayerRecord(**layer) for name, layer in facts["layers"].items()}
    summary = Summary(**{**facts, "out": Path(facts["out"]), "layers": layers, "notices": tuple(facts["notices"])})
    return summary, torch.tensor(content["windows"])
