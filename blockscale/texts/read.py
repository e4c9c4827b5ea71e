"""A text by what a user calls it: an own text's name, a file, or a data set on the hub."""

import os
from pathlib import Path

from blockscale.texts.files import read_file
from blockscale.texts.hub import PREFIX, read_dataset
from blockscale.texts.own import CALIBRATION, EVALUATION, own_text
from blockscale.texts.rows import Render, join_rows, json_rows
from blockscale.texts.text import Text

_ROW_SUFFIXES = (".jsonl", ".ndjson")


def read_text(source: str | Path, render: Render | None = None) -> Text:
    """A text by own name, path or `hf:owner/name[:split[:column]]`; what exists as a file is a file.

    render   the model's chat template, for conversations; None if it has none

    UsageError for what is missing, empty, binary, in another encoding, or has a broken line.
    """
    name = str(source)
    if name in (*CALIBRATION, *EVALUATION):
        return own_text(name)
    if name.startswith(PREFIX) and not os.path.exists(name):
        return read_dataset(name, render)
    path = Path(source)
    suffix, content = read_file(path)
    if suffix in _ROW_SUFFIXES:
        return join_rows(path.stem, json_rows(path.stem, content), render)
    return Text(path.stem, content)
