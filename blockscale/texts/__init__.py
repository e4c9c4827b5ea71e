"""Texts to calibrate and evaluate on: files, and the package's own by name.

The package's two texts (original prose about 4-bit numbers, English and Brazilian Portuguese) are each split in half:
`en-calibration` and `pt-calibration`, `en-evaluation` and `pt-evaluation`.
"""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from blockscale.errors import UsageError

_OWN = {"en": "en_four_bits.txt", "pt": "pt_quatro_bits.txt"}
CALIBRATION = tuple(f"{language}-calibration" for language in _OWN)
EVALUATION = tuple(f"{language}-evaluation" for language in _OWN)


@dataclass(frozen=True)
class Text:
    """`name` is the file's stem or the own text's name."""

    name: str
    content: str


def read_text(source: str | Path) -> Text:
    """A text by own name or path. UsageError for a file that is missing, empty or not UTF-8."""
    name = str(source)
    if name in (*CALIBRATION, *EVALUATION):
        language, half = name.split("-")
        whole = (files("blockscale.texts") / _OWN[language]).read_text(encoding="utf-8")
        middle = whole.index("\n\n", len(whole) // 2)
        return Text(name, whole[:middle] if half == "calibration" else whole[middle:].lstrip())
    path = Path(source)
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as e:
        raise UsageError(
            f"text {path} cannot be read: {e.strerror}", hint=f"give a text file, or one of {', '.join(CALIBRATION)}"
        ) from e
    except UnicodeDecodeError as e:
        raise UsageError(f"text {path} is not UTF-8 (byte {e.start})", hint="convert it with iconv") from e
    if not content.strip():
        raise UsageError(f"text {path} is empty")
    return Text(path.stem, content)
