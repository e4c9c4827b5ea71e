"""What lint says: findings, each of a rule, about a layer."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from blockscale.checkpoint.faults import Fault
from blockscale.inspection.rules import RULES, Severity


@dataclass(frozen=True)
class Finding:
    """`layer`: the module, tensor or file. `repair`: what `--repair` would do; empty if it refuses."""

    rule: str
    name: str
    severity: Severity
    layer: str
    message: str
    consequence: str
    repair: str
    hint: str


@dataclass(frozen=True)
class LintReport:
    """`notices`: what was not looked at, and why."""

    path: Path
    findings: tuple[Finding, ...]
    notices: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return self.num_errors == 0

    @property
    def num_errors(self) -> int:
        return self.count("error")

    def count(self, severity: Severity) -> int:
        return sum(finding.severity == severity for finding in self.findings)

    @property
    def by_rule(self) -> dict[str, int]:
        """Rule -> number of findings, most frequent first."""
        return dict(Counter(finding.rule for finding in self.findings).most_common())

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        counts = {severity: self.count(severity) for severity in ("error", "warning", "info")}
        findings = [vars(finding) for finding in self.findings]
        return {"path": str(self.path), "ok": self.ok, **counts, "findings": findings, "notices": list(self.notices)}


_ORDER = {"error": 0, "warning": 1, "info": 2}


def to_findings(faults: Iterable[Fault]) -> tuple[Finding, ...]:
    """Faults under their rules, worst first and in the rules' order; one said twice is said once."""
    found = {(fault.rule, fault.where): fault for fault in reversed(list(faults))}.values()
    findings = []
    for fault in found:
        rule = RULES[fault.rule]
        findings.append(
            Finding(
                rule.label,
                rule.name,
                rule.severity,
                fault.where,
                fault.message,
                rule.consequence,
                rule.repair,
                fault.hint,
            )
        )
    return tuple(sorted(findings, key=lambda f: (_ORDER[f.severity], f.rule, f.layer)))
