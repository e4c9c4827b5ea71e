"""Data sets on the hub as texts: `hf:owner/name[:split[:column]]`, read row by row, without fetching all of it."""

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from blockscale.errors import MissingDependencyError, UsageError
from blockscale.texts.rows import Render, join_rows
from blockscale.texts.text import Text

PREFIX = "hf:"
MAX_CHARACTERS = 2**22  # about a million tokens: windows are taken from these
_FORM = re.compile(r"hf:(?P<name>[^:/\s]+/[^:/\s]+)(:((?P<config>[^:/]+)/)?(?P<split>[^:/]+)(:(?P<column>[^:]+))?)?")
_HINT = (
    "check the name, the split and the network (and HF_HUB_OFFLINE), or save rows as .jsonl elsewhere and give the file"
)


def read_dataset(source: str, render: Render | None) -> Text:
    """The first rows of a data set, MAX_CHARACTERS of them, from the split "train" unless another is named; a
    configuration stands before the split: `hf:owner/name:config/split`.

    UsageError where it cannot be reached or has no such split or column; MissingDependencyError without `datasets`.
    """
    form = _FORM.fullmatch(source)
    if form is None:
        raise UsageError(
            f"'{source}' does not name a data set",
            hint="hf:owner/name, hf:owner/name:split or hf:owner/name:split:column",
        )
    _check_library(source)
    rows = _rows(source, form["name"], form["config"], form["split"] or "train")
    return join_rows(form["name"], rows, render, form["column"], MAX_CHARACTERS)


def _check_library(source: str) -> None:
    try:
        found = version("datasets")
    except PackageNotFoundError:
        found = "0"
    if int(found.split(".")[0]) < 4:  # before 4 it ran code that came with a data set
        raise MissingDependencyError(
            f"{source} needs the package datasets, 4 or later",
            hint='pip install "blockscale[data]", or save rows as .jsonl and give the file',
        )


def _rows(source: str, name: str, config: str | None, split: str) -> Iterator[tuple[str, Any]]:
    from datasets import load_dataset

    try:
        for number, row in enumerate(load_dataset(name, config, split=split, streaming=True), 1):
            yield f"text {name}, row {number}", row
    except Exception as e:  # the library, the network and every file format have errors of their own
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0][:300]
        raise UsageError(f"{source} cannot be read: {reason}", hint=_HINT) from e
