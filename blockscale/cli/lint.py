"""Look for every known fault of a quantized checkpoint, before an engine does.

Prints what is wrong, what an engine does with such a file, and what would mend it. The exit code is 1 where there is an
error. docs/reference/lint.md explains each rule.

examples:
  blockscale lint llama-nvfp4
  blockscale lint nvidia/DeepSeek-R1-NVFP4 --quick --tensor-parallel 8
  blockscale lint llama-nvfp4 --source llama --repair llama-mended
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockscale.conversion.repair.repair import RepairSummary
    from blockscale.inspection.findings import Finding, LintReport

NAME = "lint"
HELP = "look for every known fault of a checkpoint"

Progress = Callable[[str, int, int], None]

_MAX_SHOWN = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="CKPT", help="a folder or a hub id")
    parser.add_argument(
        "--source", metavar="MODEL", help="the 16-bit model it was made from: weights are compared with it"
    )
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="check that N GPUs can share the matrices (1)"
    )
    parser.add_argument("--quick", action="store_true", help="leave block scales and weights unread")
    parser.add_argument(
        "--repair",
        metavar="OUT",
        help="write a mended checkpoint if everything that is wrong can be mended without loss",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> None:
    from blockscale.cli.output import print_json, progress_bar, reader_may_leave
    from blockscale.errors import CheckFailed, UsageError

    if args.quick and args.repair is not None:
        raise UsageError("--quick and --repair exclude each other", hint="a repair has to read all there is")
    if args.tensor_parallel < 1:
        raise UsageError(
            f"--tensor-parallel {args.tensor_parallel}: not a number of GPUs", hint="give 1 (the default) or more"
        )
    with progress_bar() as progress:
        report, summary = _outcome(args, progress)
    _print_notices(report.notices if summary is None else summary.notices)
    with reader_may_leave():
        if args.json:
            print_json(report.to_dict() if summary is None else {**report.to_dict(), "repair": summary.to_dict()})
        else:
            if summary is not None:
                print_repair(summary)
            print_report(report)
    if not report.ok:
        raise CheckFailed(f"{report.path}: {_count(report.num_errors, 'error')}", _what_repair_would_do(report))


def _outcome(args: argparse.Namespace, progress: Progress) -> "tuple[LintReport, RepairSummary | None]":
    """What lint says: of the mended checkpoint, where one was asked for."""
    from blockscale.conversion.repair.lint import lint, mend  # not through api, which imports torch

    options = {"source": args.source, "tensor_parallel": args.tensor_parallel, "progress": progress}
    if args.repair is None:
        return lint(args.model, quick=args.quick, **options), None
    summary = mend(args.model, args.repair, **options)
    return summary.report, summary


def _print_notices(notices: Iterable[str]) -> None:
    from blockscale.cli.output import notice

    for message in notices:
        notice(message)


def print_repair(summary: "RepairSummary") -> None:
    """What was mended, and what that cost."""
    from blockscale.cli.output import printable

    if summary.out is None:
        print("There is nothing to repair; nothing was written.")
        return
    print(f"{printable(str(summary.out))}: {_count(len(summary.repairs), 'finding')} repaired")
    for rule, layers in summary.by_rule.items():
        print(f"  {rule}: {printable(_some(layers))}")
    if summary.errors:
        errors = sorted(summary.errors.items(), key=lambda item: -item[1])
        listed = [f"{name} {error:.2g}" for name, error in errors]
        print(f"  relative error added by rounding: {printable(_some(listed))}")
    print()


def _what_repair_would_do(report: "LintReport") -> str:
    """As far as the rules alone tell."""
    errors = [finding for finding in report.findings if finding.severity == "error"]
    helpless = list(dict.fromkeys(finding.rule for finding in errors if not finding.repair))
    if not helpless:
        return "--repair OUT writes a mended copy, if nothing is lost by it"
    return f"--repair would refuse: nothing mends {_some(helpless)} without loss"


def _some(items: Sequence[str]) -> str:
    more = len(items) - _MAX_SHOWN
    return ", ".join(items[:_MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")


def print_report(report: "LintReport") -> None:
    """A block a rule, and a line of totals."""
    for _, group in groupby(report.findings, key=lambda finding: finding.rule):
        _print_rule(list(group))
    counts = [_count(report.count(severity), severity) for severity in ("error", "warning")]
    notes = report.count("info")
    print(", ".join([*counts, _count(notes, "note")] if notes else counts))


def _print_rule(findings: "list[Finding]") -> None:
    from blockscale.cli.output import printable
    from blockscale.inspection.rules import RULES

    first = findings[0]
    print(f"{first.severity}: {first.rule}{f' ({len(findings)} times)' if len(findings) > 1 else ''}")
    print(f"  {RULES[first.name].summary}")
    alike: dict[str, list[Finding]] = {}  # what is said of several layers in the same words is said once
    for finding in findings:
        alike.setdefault(finding.message.replace(finding.layer, "{}"), []).append(finding)
    for same in list(alike.values())[:_MAX_SHOWN]:
        print(f"  - {printable(same[0].message)}")
        if len(same) > 1:
            print(f"    so too {printable(_some([finding.layer for finding in same[1:]]))}")
    if len(alike) > _MAX_SHOWN:
        print(f"  - and {sum(map(len, list(alike.values())[_MAX_SHOWN:]))} more")
    print(f"  {first.consequence}")
    if first.repair:
        print(f"  --repair: {first.repair}")
    hints = dict.fromkeys(finding.hint for finding in findings[:_MAX_SHOWN] if finding.hint)
    for hint in hints:
        print(f"  Hint: {printable(hint)}")
    print()


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
