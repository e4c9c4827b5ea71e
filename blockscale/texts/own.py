"""The package's two texts, English and Brazilian Portuguese prose about 4-bit numbers, each in two halves."""

from importlib.resources import files

from blockscale.texts.text import Text

_FILES = {"en": "en_four_bits.txt", "pt": "pt_quatro_bits.txt"}
CALIBRATION = tuple(f"{language}-calibration" for language in _FILES)
EVALUATION = tuple(f"{language}-evaluation" for language in _FILES)


def own_text(name: str) -> Text:
    """One of CALIBRATION and EVALUATION: the halves do not overlap."""
    language, half = name.split("-")
    whole = (files("blockscale.texts") / _FILES[language]).read_text(encoding="utf-8")
    middle = whole.index("\n\n", len(whole) // 2)
    return Text(name, whole[:middle] if half == "calibration" else whole[middle:].lstrip())
