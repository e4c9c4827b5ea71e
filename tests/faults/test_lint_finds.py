"""Lint names every fault that the injector makes, on its layer and with its severity."""

import json
from pathlib import Path

import pytest

from .breaking_files import PICKLE_RAN
from .fault import Fault
from .inject import FAULTS, RULES, Bases, broken, severity
from .linting import found, lint
from .raw import GOLDEN

IDS = [f"{fault.rule}: {fault.name} ({fault.base})" for fault in FAULTS]
ONE_A_RULE = {fault.rule: fault for fault in reversed(FAULTS)}


@pytest.mark.parametrize("fault", FAULTS, ids=IDS)
def test_lint_finds(fault: Fault, bases: Bases, tmp_path: Path) -> None:
    folder = broken(fault, bases[fault.base], tmp_path)
    report = lint(folder, fault)
    findings = found(report, fault)
    assert findings, [(finding.name, finding.layer) for finding in report.findings]
    for finding in findings:
        assert finding.severity == severity(fault.rule)
        assert finding.rule == f"{RULES[fault.rule]} {fault.rule}"
        assert finding.message
    assert report.ok == all(finding.severity != "error" for finding in report.findings)
    assert not (folder / PICKLE_RAN).exists()


@pytest.mark.parametrize("fault", ONE_A_RULE.values(), ids=ONE_A_RULE)
def test_the_command_line_says_the_same(
    fault: Fault, bases: Bases, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from blockscale.cli.main import main

    folder = broken(fault, bases[fault.base], tmp_path)
    options = ["--source", str(GOLDEN / fault.source)] if fault.source else []
    options += ["--tensor-parallel", str(fault.tensor_parallel)] if fault.tensor_parallel > 1 else []
    report = lint(folder, fault)
    assert main(["lint", str(folder), *options, "--json"]) == (0 if report.ok else 1)
    printed = json.loads(capsys.readouterr().out)["findings"]
    assert [(f["rule"], f["severity"], f["layer"], f["message"]) for f in printed] == [
        (f.rule, f.severity, f.layer, f.message) for f in report.findings
    ]
