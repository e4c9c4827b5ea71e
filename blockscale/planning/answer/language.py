"""The texts of a plan's page in several languages, and how each writes numbers."""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from blockscale.errors import UsageError
from blockscale.pages import number, size
from blockscale.planning.speed.predict import Estimate

_SIGNS = {"USD": "US$", "BRL": "R$", "EUR": "€"}
LANGUAGES = ("en", "pt-BR")


@dataclass(frozen=True)
class Language:
    """`texts`: key -> text with names in braces."""

    code: str
    texts: Mapping[str, str]

    def text(self, key: str, /, **values: object) -> str:
        return self.texts[key].format(**values)

    def said(self, key: str, values: Mapping[str, str | float]) -> str:
        """The text with numbers in it: counts in full, others to three digits."""
        return self.text(key, **{name: self._written(value) for name, value in values.items()})

    def _written(self, value: str | float) -> str:
        if isinstance(value, str):
            return value
        return self.count(value) if isinstance(value, int) else self.number(value)

    def word(self, name: str) -> str:
        """Of a name that the planner uses, like `weights`; those without a translation stay as they are."""
        return self.texts.get(f"word.{name}", name)

    def number(self, x: float | None, digits: int = 3) -> str:
        return self._own(_plain(x, digits))

    def count(self, n: float) -> str:
        """A whole number, in full."""
        return self._own(f"{n:,.0f}")

    def short(self, x: float) -> str:
        """Of a round number, on an axis."""
        return self._own(f"{x:,g}" if x < 1 else f"{x:,.10g}")

    def range(self, estimate: Estimate | None, digits: int = 3, scale: float = 1.0) -> str:
        """`9.8 to 10.4`."""
        if estimate is None:
            return ""
        low, high = self.number(estimate.low * scale, digits), self.number(estimate.high * scale, digits)
        return self.text("range", low=low, high=high)

    def size(self, num_bytes: float) -> str:
        """Decimal units, as disks have them; GB with one decimal."""
        if num_bytes >= 1e9:
            return f"{self._own(f'{num_bytes / 1e9:,.1f}')} GB"
        return self._own(size(round(num_bytes)))

    def watts(self, watts: float) -> str:
        return f"{self.number(watts / 1e3)} kW" if watts >= 1e3 else f"{self.number(watts)} W"

    def money(self, amount: float, currency: str) -> str:
        """Its sign or code in front, as both languages have it."""
        sign = _SIGNS.get(currency, currency)
        return f"{sign} {self.number(amount)}" if len(sign) > 1 else f"{sign}{self.number(amount)}"

    def percentage(self, share: float) -> str:
        return f"{self._own(f'{100 * share:.0f}')} %"

    def _own(self, figure: str) -> str:
        if self.code == "pt-BR":
            return figure.translate(str.maketrans(",.", ".,"))
        return figure


def _plain(x: float | None, digits: int) -> str:
    """Whole numbers in full and with separators of thousands."""
    if x is not None and 10 ** (digits - 1) <= abs(x) < float("inf"):
        rounded = float(f"{x:.{digits}g}")
        return f"{rounded:,.0f}"
    return number(x, digits)


@cache
def language(code: str) -> Language:
    """UsageError for one that there is not."""
    known = {name.lower(): name for name in LANGUAGES}
    name = known.get(code.lower().replace("_", "-")) or known.get({"pt": "pt-br"}.get(code.lower(), ""))
    if name is None:
        near = difflib.get_close_matches(code, LANGUAGES, 1) or LANGUAGES
        raise UsageError(f"no texts in language '{code}'", hint="languages: " + ", ".join(near))
    text = resources.files("blockscale.planning.answer").joinpath(f"words.{name}.toml").read_text(encoding="utf-8")
    return Language(name, tomllib.loads(text))
