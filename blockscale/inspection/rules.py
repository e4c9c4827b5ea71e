"""The rules of lint: what each is called, how bad it is, what engines do with such a file, and how it is repaired.

They stand in `rules.toml`, which is prose for the most part.
"""

import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Literal

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Rule:
    """`consequence`: what an engine does with such a file. `repair`: what `lint --repair` does; empty if it refuses."""

    name: str
    code: str
    severity: Severity
    summary: str
    consequence: str
    repair: str = ""

    @property
    def label(self) -> str:
        return f"{self.code} {self.name}"


def _read_rules() -> dict[str, Rule]:
    text = resources.files("blockscale.inspection").joinpath("rules.toml").read_text(encoding="utf-8")
    return {name: Rule(name, **entry) for name, entry in tomllib.loads(text).items()}


RULES = _read_rules()
