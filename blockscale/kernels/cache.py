"""The folder of built kernels.

An entry's name is a digest of all that its bytes depend on: source, flags, versions. It appears whole or not at all:
it is written beside its place and renamed. Two processes that build it at once write the same bytes, and the second
rename changes nothing. Where the folder cannot be written, what is built serves this process alone.
"""

import atexit
import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from blockscale.cache_folder import cache_folder

_DIGEST_BYTES = 32


def kernels_folder() -> Path:
    """Where built kernels lie: a folder of their own in the cache."""
    return cache_folder() / "kernels"


def key(*parts: str | bytes) -> str:
    """A digest of the parts in their order; ("ab", "c") and ("a", "bc") differ."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:32]


def fetch(parts: Sequence[str | bytes], suffix: str, build: Callable[[], bytes]) -> bytes:
    """What `build` gives for `parts`, from the folder if it is there. A damaged entry is built again.

    An entry begins with the SHA-256 of what follows, so `suffix` should not promise a readable file.
    """
    path = kernels_folder() / (key(*parts) + suffix)
    with suppress(OSError):
        stored = path.read_bytes()
        digest, data = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
        if hashlib.sha256(data).digest() == digest:
            return data
    data = build()

    def write(target: Path) -> None:
        target.write_bytes(hashlib.sha256(data).digest() + data)

    try:
        _move_whole(_aside(path), path, write)
    except OSError as error:
        _say_once(str(path.parent), error.strerror or str(error))
    return data


def fetch_file(parts: Sequence[str | bytes], suffix: str, build: Callable[[Path], None]) -> Path:
    """The file that `build` writes at the path it is given, from the folder if it is there.

    For what only a path can be made from, such as a shared library. Where the folder cannot be written, the file lies
    in a temporary folder that goes with the process. An error of `build` that is no OSError goes through.
    """
    name = key(*parts) + suffix
    path = kernels_folder() / name
    if path.is_file():
        return path
    try:
        aside = _aside(path)
    except OSError as error:
        _say_once(str(path.parent), error.strerror or str(error))
        path = _temporary_folder() / name
        if path.is_file():
            return path
        aside = _aside(path)
    _move_whole(aside, path, build)
    return path


def _aside(path: Path) -> Path:
    """A new folder beside `path`: OSError if nothing can be written there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=".building-", dir=path.parent))


def _move_whole(aside: Path, path: Path, write: Callable[[Path], None]) -> None:
    """`write` fills a file in `aside`, which then takes its place at `path`; `aside` goes away."""
    try:
        write(aside / path.name)
        with (aside / path.name).open("rb") as file:
            os.fsync(file.fileno())
        os.replace(aside / path.name, path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@cache
def _temporary_folder() -> Path:
    path = Path(tempfile.mkdtemp(prefix="blockscale-kernels-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@cache
def _say_once(folder: str, reason: str) -> None:
    message = f"built kernels are not kept: {folder}: {reason}; set BLOCKSCALE_CACHE to a folder that can be written"
    warnings.warn(message, RuntimeWarning, stacklevel=4)
