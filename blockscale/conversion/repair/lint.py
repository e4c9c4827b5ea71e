"""`lint`, the verb, with and without a repair. Lies here and not in `api`, which needs torch; lint mostly does not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from blockscale.checkpoint.locate import locate
from blockscale.inspection.findings import LintReport
from blockscale.inspection.lint import Progress, lint_folder

if TYPE_CHECKING:
    from blockscale.conversion.repair.repair import RepairSummary


def lint(
    model: str | Path,
    *,
    repair: str | Path | None = None,
    source: str | Path | None = None,
    tensor_parallel: int = 1,
    quick: bool = False,
    progress: Progress | None = None,
) -> LintReport:
    """Every known fault of a checkpoint (folder or hub id); `report.ok` where there is no error.

    repair           a folder to write the mended checkpoint to, if all errors can be mended without loss: CheckFailed
                     if not. The report is about `model` all the same.
    source           the 16-bit model that it was made from: weights are compared with it
    tensor_parallel  GPUs that its matrices are to be split over
    quick            leave block scales and weights unread

    Raises BlockscaleError's subclasses.
    """
    report = lint_folder(
        locate(model),
        source=None if source is None else locate(source),
        tensor_parallel=tensor_parallel,
        quick=quick,
        progress=progress,
    )
    if repair is not None:
        mend(model, repair, source=source, tensor_parallel=tensor_parallel, progress=progress)
    return report


def mend(
    model: str | Path,
    out: str | Path,
    *,
    source: str | Path | None = None,
    tensor_parallel: int = 1,
    progress: Progress | None = None,
) -> RepairSummary:
    """Writes a checkpoint to the folder `out` without its faults, if they can be mended without loss; `lint` says what
    the options mean. Where there is nothing to mend, nothing is written."""
    from blockscale.conversion.repair.repair import repair_checkpoint  # needs torch

    source_path = None if source is None else locate(source)
    return repair_checkpoint(
        locate(model), Path(out), source=source_path, tensor_parallel=tensor_parallel, progress=progress
    )
