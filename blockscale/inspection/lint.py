"""Every rule over one checkpoint: what is wrong with the files, the configs, the scales and the layout."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from blockscale.checkpoint.dialects.stored import role_faults
from blockscale.checkpoint.faults import Fault
from blockscale.errors import CheckpointError, UsageError
from blockscale.inspection.checks.config import config_faults
from blockscale.inspection.checks.layout import layout_faults, layout_notices
from blockscale.inspection.checks.limits import limit_faults
from blockscale.inspection.checks.names import name_faults
from blockscale.inspection.checks.scales import scale_faults
from blockscale.inspection.checks.structure import structure_faults
from blockscale.inspection.checks.tied_head import tied_head_faults
from blockscale.inspection.collection import no_collection
from blockscale.inspection.findings import LintReport, to_findings
from blockscale.inspection.matrices import matrices_of
from blockscale.inspection.reading import Reading, read_folder

if TYPE_CHECKING:
    from blockscale.checkpoint.source import Source

Progress = Callable[[str, int, int], None]  # stage, done, total
_OF_ROLES = ("missing-block-scale", "missing-global-scale", "missing-input-scale")


@no_collection()
def lint_folder(
    path: Path,
    *,
    source: Path | None = None,
    tensor_parallel: int = 1,
    quick: bool = False,
    progress: Progress | None = None,
) -> LintReport:
    """What is wrong with a checkpoint, whatever is wrong with it.

    source           the 16-bit model that it was made from: weights are compared with it
    tensor_parallel  GPUs that its matrices are to be split over
    quick            headers, configs and single scales only: no block scales, no weights, no comparison

    CheckpointError where there is no folder, or `source` cannot be read; UsageError for no number of GPUs,
    and for `quick` with a source.
    """
    return lint_reading(
        read_folder(path), source=source, tensor_parallel=tensor_parallel, quick=quick, progress=progress
    )


def lint_reading(
    reading: Reading,
    *,
    source: Path | None = None,
    tensor_parallel: int = 1,
    quick: bool = False,
    progress: Progress | None = None,
) -> LintReport:
    """The same of a folder that has been read already."""
    if quick and source is not None:
        raise UsageError("a quick look compares nothing with a source", hint="leave out --quick, or --source")
    opened = None if source is None else _open(source)
    matrices = matrices_of(reading)
    faults = [*reading.faults, *config_faults(reading, matrices), *structure_faults(reading, matrices)]
    faults += limit_faults(reading, tensor_parallel, matrices)
    notices = list(_notices(reading, quick))
    if any(fault.rule == "unwritten-data" for fault in faults):
        notices.append("scales and weights were not looked at: parts of the files were never written")
    else:
        faults += scale_faults(reading, quick=quick, progress=progress)
        if not quick:
            faults += tied_head_faults(reading)
            faults += layout_faults(reading, opened, progress)
            by_name = [] if opened is None else list(name_faults(reading, opened))
            faults += by_name
            if not any(fault.rule == "source-not-compared" for fault in by_name):
                notices += layout_notices(reading, opened)
    if reading.model is None and reading.folder.method is not None and not any(fault.is_fatal for fault in faults):
        faults += _source_faults(reading)
    return LintReport(reading.folder.path, to_findings(_without_echoes(faults, reading)), tuple(notices))


def _open(source: Path) -> "Source":
    from blockscale.checkpoint.source import open_source  # needs torch

    return open_source(source)


def _source_faults(reading: Reading) -> Iterator[Fault]:
    """Of weights that no dialect holds, but that can be read as 16 bits: FP8 in blocks, gpt-oss, AWQ, GPTQ."""
    from blockscale.checkpoint.source import view_as_16bit

    try:
        view_as_16bit(reading.folder)
    except CheckpointError as e:
        yield Fault("format-mismatch", "config.json", str(e), e.hint)


def _notices(reading: Reading, quick: bool) -> Iterator[str]:
    if reading.model is None:
        method = reading.folder.method
        what = "a 16-bit model" if method is None else f"weights stored as {method}"
        yield f"{what}: files and layers were looked at; there are no scales or lists of this program's dialects"
    elif quick:
        yield "quick: block scales and weights were not read"


def _without_echoes(faults: Iterable[Fault], reading: Reading) -> list[Fault]:
    """Where a mixed config names the wrong format of a layer, that is the fault, and not that its tensors differ, nor
    that it lacks what only the named format has."""
    found = list(faults)
    named = {fault.where for fault in found if fault.rule == "mixed-layers-mismatch"}
    linears = {} if reading.model is None else reading.model.linears

    def is_echo(fault: Fault) -> bool:
        if fault.where not in named:
            return False
        linear = linears.get(fault.where)
        is_complete = linear is not None and all(own.rule != fault.rule for own in role_faults(linear))
        return fault.rule == "format-mismatch" or (fault.rule in _OF_ROLES and is_complete)

    return [fault for fault in found if not is_echo(fault)]
