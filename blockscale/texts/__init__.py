"""Texts to calibrate and evaluate on: files, and the package's own by name.

The package's two texts (original prose about 4-bit numbers, English and Brazilian Portuguese) are each split in half:
`en-calibration` and `pt-calibration`, `en-evaluation` and `pt-evaluation`.
"""

from collections.abc import Callable, Sequence
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


def special_tokens(encode: Callable[[str], Sequence[int]]) -> tuple[list[int], list[int]]:
    """The tokens that `encode` puts before and after every text: ([BOS], []), ([], [EOS]), ([], []) ..."""
    added, probe = list(encode("")), list(encode("a"))
    num_before = 0
    while num_before < min(len(added), len(probe)) and added[num_before] == probe[num_before]:
        num_before += 1
    return added[:num_before], added[num_before:]


def encode_text(text: str, encode: Callable[[str], Sequence[int]]) -> tuple[list[int], list[int]]:
    """What a window of this tokenizer starts with (BOS, or nothing), and the text's own tokens, nothing around them."""
    before, after = special_tokens(encode)
    encoded = list(encode(text))
    return before, encoded[len(before) : len(encoded) - len(after)]
