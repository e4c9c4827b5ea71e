"""Whether a text is in a language that the checkpoint was calibrated on, by a measure on both texts' short words."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockscale.checkpoint.shards import read_json
from blockscale.texts import Text
from blockscale.texts.short_words import ShortWords, divergence, one_language_limit, short_words, stored_short_words

_CHARACTERS_PER_TOKEN = 8  # more than any tokenizer's on prose: the part that is measured is within what this covers


def stored_record(path: Path) -> Mapping[str, Any]:
    """What blockscale stored with a checkpoint; empty where another tool wrote it."""
    file = path / "blockscale.json"
    return read_json(file) if file.is_file() else {}


def language_notices(text: Text, start: float, num_tokens: int, record: Mapping[str, Any]) -> list[str]:
    """One sentence if no calibrated text has short words like those of `text`, else nothing: also where there was no
    calibration, and where the texts are too short to tell.

    start       fraction of the text that is left out
    num_tokens  of the text that are measured
    record      the checkpoint's own
    """
    begin = int(start * len(text.content))
    words = short_words(text.content[begin : begin + _CHARACTERS_PER_TOKEN * num_tokens])
    distances: list[tuple[float, float, str]] = []  # divergence, its limit, calibrated text
    for name, calibrated in calibrated_words(record):
        limit = one_language_limit(words, calibrated)
        if limit is not None:
            distances.append((divergence(words, calibrated), limit, name))
    if not distances or any(distance <= limit for distance, limit, _ in distances):
        return []
    distance, limit, nearest = min(distances)
    return [
        f"the language of {text.name} was probably not calibrated: its short words are {distance:.2f} bits away from "
        f"those of {nearest}, the nearest calibrated text, and texts of one language at most {limit:g}"
    ]


def calibrated_words(record: Mapping[str, Any]) -> list[tuple[str, ShortWords]]:
    """Name and short words of each calibrated text, also of a checkpoint that was converted since; empty where
    none are stored."""
    while "calibration" not in record and isinstance(record.get("source"), Mapping):
        record = record["source"]
    calibration = record.get("calibration")
    texts = calibration.get("texts") if isinstance(calibration, Mapping) else None
    found = []
    for text in texts if isinstance(texts, list) else []:
        words = stored_short_words(text.get("short_words")) if isinstance(text, Mapping) else None
        if words is not None:
            found.append((str(text.get("name")), words))
    return found
