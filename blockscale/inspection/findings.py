"""What lint says: findings, each of a rule, about a layer."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from blockscale.checkpoint.faults import Fault
from blockscale.inspection.rules import RULES, Severity


@dataclass(frozen=True)
class Finding:
    """layer    the module, tensor or file
    repair   what `--repair` would do; empty if it refuses
    tensors  names of the stored tensors that are wrong, where `layer` does not say which
    """

    rule: str
    name: str
    severity: Severity
    layer: str
    message: str
    consequence: str
    repair: str
    hint: str
    tensors: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """`BS101` of `BS101 fused-global-scale-mismatch`."""
        return RULES[self.name].code


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
        findings = [
            {"code": finding.code, **vars(finding), "tensors": list(finding.tensors)} for finding in self.findings
        ]
        return {"path": str(self.path), "ok": self.ok, **counts, "findings": findings, "notices": list(self.notices)}


def _is_beyond_repair(fault: Fault) -> bool:
    """Of rules whose repair holds for an index and for shards: nothing tells what config.json said, or what a folder
    without weights held."""
    if fault.rule == "malformed-json":
        return fault.where == "config.json"
    return fault.rule == "missing-shard" and not fault.where.endswith(".safetensors")


_ORDER = {"error": 0, "warning": 1, "info": 2}


def to_findings(faults: Iterable[Fault]) -> tuple[Finding, ...]:
    """Faults under their rules, worst first and in the rules' order. What is said twice of a layer is said once, unless
    it is about another tensor."""
    found: dict[tuple[str, str], Fault] = {}
    for fault in faults:
        first = found.setdefault((fault.rule, fault.where), fault)
        more = tuple(tensor for tensor in fault.tensors if tensor not in first.tensors)
        if more:
            message = f"{first.message}; {fault.message}"
            found[fault.rule, fault.where] = replace(first, message=message, tensors=first.tensors + more)
    findings = []
    for fault in found.values():
        rule = RULES[fault.rule]
        findings.append(
            Finding(
                rule.label,
                rule.name,
                rule.severity,
                fault.where,
                fault.message,
                rule.consequence,
                "" if _is_beyond_repair(fault) else rule.repair,
                fault.hint,
                fault.tensors,
            )
        )
    return tuple(sorted(findings, key=lambda f: (_ORDER[f.severity], f.rule, f.layer)))
