"""Lint as the tests of faults ask it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import blockscale

from .fault import Fault
from .raw import GOLDEN


def lint(folder: Path, fault: Fault, **options: Any) -> Any:
    """A report, given what the fault needs to be seen."""
    source = GOLDEN / fault.source if fault.source else None
    return blockscale.lint(folder, source=source, tensor_parallel=fault.tensor_parallel, **options)


def found(report: Any, fault: Fault) -> list[Any]:
    """The findings of the fault's rule on its layer."""
    return [f for f in report.findings if f.name == fault.rule and fault.layer in (None, f.layer)]


def serious(report: Any) -> Sequence[str]:
    """What is worse than information."""
    return [f"{f.rule} on {f.layer}: {f.message}" for f in report.findings if f.severity != "info"]
