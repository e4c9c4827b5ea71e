"""`lint --repair`: a folder like another, without the faults that can be taken away losing nothing.

    folder --lint--> findings --remedies--> refused, before anything is written
                                        --> rewritten, mended where a finding asks for it --lint--> the new folder

Configs and index are written from the tensors. The rest is copied byte for byte. The folder that is repaired is only
read.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blockscale.checkpoint.dialects import branches
from blockscale.checkpoint.dialects.stored import StoredLinear, StoredModel, role_faults
from blockscale.checkpoint.folder import survey_folder
from blockscale.checkpoint.groups import fused_groups
from blockscale.checkpoint.output import OutputFolder
from blockscale.checkpoint.record import ACTIVATION_SCALE
from blockscale.checkpoint.source import as_itself
from blockscale.checkpoint.target import check_absent
from blockscale.conversion.repair.config_losses import losses, with_said_activations
from blockscale.conversion.repair.reindex import MENDED, Reindexed, is_mended, reindex
from blockscale.conversion.repair.remedies import NO_REPAIR, Remedies, find_remedies
from blockscale.conversion.repair.treatment import treat_group
from blockscale.conversion.rewrite import (
    Job,
    Progress,
    Written,
    copy_kv_scales,
    keep_tensor,
    source_record,
    write_checkpoint,
)
from blockscale.errors import CheckFailed, CheckpointError, OutputError, UsageError
from blockscale.inspection.findings import Finding, LintReport, to_findings
from blockscale.inspection.lint import lint_folder, lint_reading
from blockscale.inspection.reading import Reading, read_surveyed

_OWN_CONFIGS = ("config.json", "quant_config.json", "quantize_config.json")
_RECORDS = ("recipe.yaml",)  # of how the checkpoint was made, which a repair changes nothing about
_MAX_HINTS = 2
_OTHERWISE = "quantize the model again, or download it again"
_REPORT = "this is a fault of blockscale; please report it with what lint says"


@dataclass(frozen=True)
class RepairSummary:
    """path      of the folder that was repaired
    out       of the new one; None: there was nothing to repair, and nothing was written
    repairs   findings that are mended
    errors    linear -> relative error (root of summed squares) of those whose values could not all be kept
    notices   what a user should know
    report    lint's about the new folder, or about the old one where there is no new one
    """

    path: Path
    out: Path | None
    repairs: tuple[Finding, ...]
    errors: Mapping[str, float]
    notices: tuple[str, ...]
    report: LintReport

    @property
    def by_rule(self) -> dict[str, list[str]]:
        """Rule -> layers that were repaired."""
        layers: dict[str, list[str]] = {}
        for finding in self.repairs:
            layers.setdefault(finding.rule, []).append(finding.layer)
        return layers

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "path": str(self.path),
            "out": None if self.out is None else str(self.out),
            "repairs": self.by_rule,
            "errors": dict(self.errors),
            "notices": list(self.notices),
            "left": self.report.to_dict(),
        }


def repair_checkpoint(
    path: Path,
    out: Path,
    *,
    source: Path | None = None,
    tensor_parallel: int = 1,
    progress: Progress | None = None,
) -> RepairSummary:
    """Writes the repaired folder `out`, which appears whole or not at all; `path` is left as it is.

    source           the 16-bit model that the checkpoint was made from, by which lint sees more
    tensor_parallel  GPUs that the result must fit

    CheckFailed, before anything is written, if an error of lint has no repair that loses nothing. OutputError for a
    target that exists or a full disk; CheckpointError where there is no folder, or `source` cannot be read.
    """
    check_absent(out)
    _check_outside(path, out)
    surveyed = survey_folder(path)
    mended = [fault for fault in surveyed.faults if is_mended(fault)]
    reindexed = reindex(surveyed) if mended else Reindexed(surveyed, (), ())
    reading = with_said_activations(read_surveyed(reindexed.folder))
    report = lint_reading(reading, source=source, tensor_parallel=tensor_parallel, progress=progress)
    findings = (*to_findings(mended), *report.findings)
    remedies = find_remedies(reading, findings)
    _refuse_what_is_lost(path, reading, remedies, reindexed)
    if not remedies.treated:
        return RepairSummary(path, None, (), {}, (), report)

    after: list[LintReport] = []

    def check(folder: Path) -> None:
        report = lint_folder(folder, source=source, tensor_parallel=tensor_parallel, progress=progress)
        after.append(_check_result(report, folder, out))

    written = _write(out, reading, remedies, check, progress)
    notices = (*_notices(remedies, reindexed), *after[0].notices)
    return RepairSummary(path, written.out, remedies.treated, written.errors, notices, after[0])


def _check_outside(path: Path, out: Path) -> None:
    """UsageError for a target inside the folder that is to be left as it is."""
    if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(path)):
        raise UsageError(f"{out} lies inside of {path}, which is left as it is", hint="choose a folder beside it")


# ---------------------------------------------------------------- what is refused


def _refuse_what_is_lost(path: Path, reading: Reading, remedies: Remedies, reindexed: Reindexed) -> None:
    reasons: dict[str, list[str]] = {}
    hints: list[str] = []
    for finding, why in remedies.refused:
        if finding.severity == "error" and not (finding.name == "nothing-quantized" and reindexed.lost):
            rule = finding.rule if why == NO_REPAIR else f"{finding.rule} ({why})"
            reasons.setdefault(rule, []).append(finding.layer)
            hints.append(finding.hint)
    lines = [f"{rule}: {', '.join(layers)}" for rule, layers in reasons.items()]
    lines += _unreadable(reading, remedies)
    if remedies.treated:
        if reindexed.lost:  # what the files lack comes of what is wrong with them
            causes = [f for f in remedies.treated if f.name in MENDED and f.severity == "error"]
            lines = [*(f"{finding.rule}: {finding.message}" for finding in causes), *lines]
            hints = [*(finding.hint for finding in causes), *hints]
        lines += reindexed.lost
        if reading.model is not None:
            lines += losses(reading, reading.model, remedies.dropped)
    if lines:
        raise CheckFailed(
            f"{path} cannot be repaired without losing something:\n  " + "\n  ".join(lines),
            hint="nothing was written; " + ("; or ".join(_first(hints)) or _OTHERWISE),
        )


def _first(hints: Iterable[str]) -> list[str]:
    return [hint for hint in dict.fromkeys(hints) if hint][:_MAX_HINTS]


def _unreadable(reading: Reading, remedies: Remedies) -> Iterator[str]:
    """What stops a reader although lint counts it as less than an error."""
    if not remedies.treated or reading.model is None:
        return
    known = {(finding.name, finding.layer) for finding in remedies.treated}
    known |= {(finding.name, finding.layer) for finding, _ in remedies.refused if finding.severity == "error"}
    for fault in reading.faults:
        linear = reading.model.linears.get(fault.where)
        is_settled = linear is not None and all(fault.rule != own.rule for own in role_faults(linear))
        if fault.is_fatal and (fault.rule, fault.where) not in known and not is_settled:
            yield fault.message


# ---------------------------------------------------------------- what is written


def _write(
    out: Path, reading: Reading, remedies: Remedies, check: Callable[[Path], None], progress: Progress | None
) -> Written:
    model, folder = reading.model, reading.folder
    jobs = [keep_tensor(as_itself(info)) for name, info in reading.kept.items() if name not in remedies.dropped]
    if model is None:
        return _write_as_it_is(out, jobs, folder.path, folder.companions, check)
    return write_checkpoint(
        out,
        [
            *jobs,
            *_linear_jobs(model, remedies),
            *(copy_kv_scales(attention, scales) for attention, scales in model.kv_tensors.items()),
        ],
        dialect=model.dialect,
        config=folder.config,
        kv_format=remedies.kv_format,
        has_pre_quant_scale=any("pre_quant_scale" in linear.tensors for linear in model.linears.values()),
        low_rank={name for name, linear in model.linears.items() if branches.has_low_rank(linear.tensors)},
        companions=[*folder.companions, *_present(folder.path, _RECORDS)],
        provenance=_provenance(folder.path, remedies.treated),
        progress=progress,
        stage="repairing",
        check=check,
    )


def _write_as_it_is(
    out: Path, jobs: Sequence[Job], path: Path, companions: Sequence[Path], check: Callable[[Path], None]
) -> Written:
    """A model in 16 bits, or in a format of its own: its config is copied too, and only the index is written."""
    layout = {name: what for job in jobs for name, what in job.tensors.items()}
    with OutputFolder(out, layout, "repaired", resume=False) as output:
        for job in jobs:
            for name, info in job.copies.items():
                output.copy(name, info)
        output.finish({}, [*companions, *_present(path, (*_OWN_CONFIGS, *_RECORDS))], check=check)
    return Written(output.out, output.num_bytes, {})


def _present(path: Path, names: Sequence[str]) -> list[Path]:
    return [path / name for name in names if (path / name).is_file()]


def _linear_jobs(model: StoredModel, remedies: Remedies) -> Iterator[Job]:
    for name, members in fused_groups(model.linears).items():
        linears = [_without(model.linears[member], remedies.dropped) for member in members]
        yield from treat_group(name, linears, remedies.treatments, shares=name in remedies.shared)


def _without(linear: StoredLinear, dropped: frozenset[str]) -> StoredLinear:
    """Without the tensors of these names."""
    if not any(info.name in dropped for info in linear.tensors.values()):
        return linear
    return replace(linear, tensors={role: info for role, info in linear.tensors.items() if info.name not in dropped})


def _provenance(path: Path, repairs: Sequence[Finding]) -> Mapping[str, Any]:
    try:
        record = source_record(path)
    except CheckpointError:  # it is told along if it can be read, and needed for nothing
        record = None
    kept = {key: record[key] for key in ("recipe", ACTIVATION_SCALE) if record and key in record}
    layers: dict[str, list[str]] = {}
    for finding in repairs:
        layers.setdefault(finding.rule, []).append(finding.layer)
    return {**kept, "repairs": layers, "source": record}


def _notices(remedies: Remedies, reindexed: Reindexed) -> Iterator[str]:
    if reindexed.forgotten:
        count = len(reindexed.forgotten)
        yield f"the index listed {count} tensors that no file holds and nothing needs, first '{reindexed.forgotten[0]}'"
    if remedies.dropped:
        yield f"{len(remedies.dropped)} scales that nothing reads are left out, first '{min(remedies.dropped)}'"
    borrowed = [finding.layer for finding in remedies.treated if finding.name == "missing-input-scale"]
    if borrowed:
        yield f"{len(borrowed)} input scales are siblings', of the same input, first of {borrowed[0]}"


def _check_result(report: LintReport, folder: Path, out: Path) -> LintReport:
    """The report under the name that the folder will have. OutputError if anything is left that should not be."""
    findings = tuple(_renamed(report.findings, str(folder), str(out)))
    left = [finding for finding in findings if finding.severity == "error"]
    again = find_remedies(with_said_activations(read_surveyed(survey_folder(folder))), findings)
    left += [finding for finding in again.treated if finding not in left]
    if left:
        first = left[0]
        raise OutputError(f"the repaired checkpoint still has {first.rule}: {first.message}", hint=_REPORT)
    return replace(report, path=out, findings=findings)


def _renamed(findings: Iterable[Finding], old: str, new: str) -> Iterator[Finding]:
    """Findings that name the folder by the name that it will have."""
    for finding in findings:
        texts = {name: getattr(finding, name).replace(old, new) for name in ("layer", "message", "hint")}
        yield replace(finding, **texts)
