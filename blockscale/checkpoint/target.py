"""The place that an output is to have: free, and with room for it. Needs no torch, so that verbs ask first."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blockscale.errors import OutputError


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns an OSError of writing into one OutputError."""
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutputError(f"{path}: the disk is full", hint="free some space or write elsewhere") from e
        raise OutputError(f"{path}: cannot be written: {e.strerror}", hint="check the path and its rights") from e


def check_absent(out: Path) -> None:
    """OutputError unless `out` is absent or an empty folder."""
    with disk_errors(out):
        is_free = not os.path.lexists(out) or (out.is_dir() and not out.is_symlink() and not any(out.iterdir()))
    if not is_free:
        raise OutputError(f"{out} exists already", hint="choose another name or remove it first")
