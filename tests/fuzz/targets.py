"""What is fuzzed, and what must hold of it: it returns, or raises a BlockscaleError that says something."""

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import blockscale
from blockscale.checkpoint.folder import open_folder
from blockscale.checkpoint.header import read_header
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.checkpoint.source import open_source
from blockscale.errors import BlockscaleError

Target = Callable[[Path], object]
FORMS = ("modelopt", "compressed-tensors", "bf16", "gguf")
SECONDS = 20  # far more than any target takes


def headers(folder: Path) -> None:
    for file in sorted(folder.glob("*.safetensors")):
        with contextlib.suppress(BlockscaleError):
            read_header(file)


def inspect(folder: Path) -> None:
    blockscale.inspect(folder).to_dict()


def lint(folder: Path) -> None:
    blockscale.lint(folder).to_dict()


def conversion(to: str) -> Target:
    def convert(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as parent:
            try:
                blockscale.convert(folder, Path(parent) / "out", to)
            except BlockscaleError:
                assert os.listdir(parent) == []
                raise

    return convert


def repair(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as parent:
        blockscale.lint(folder, repair=Path(parent) / "out")


READERS: dict[str, Target] = {
    "headers": headers,
    "folder": open_folder,
    "checkpoint": open_checkpoint,
    "source": open_source,
}
VERBS: dict[str, Target] = {
    "inspect": inspect,
    "lint": lint,
    "repair": repair,
    **{f"convert to {to}": conversion(to) for to in FORMS},
}
TARGETS: dict[str, Target] = {**READERS, **VERBS}


class Hang(Exception):
    """A target waits for something."""


@contextlib.contextmanager
def time_limit(seconds: int = SECONDS) -> Iterator[None]:
    def stop(_: int, frame: FrameType | None) -> None:
        raise Hang(f"still at work after {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def outcome(target: Target, folder: Path) -> str | None:
    """The error's message, None if there is none. Any exception that is no BlockscaleError goes through."""
    message = None
    with time_limit():
        try:
            target(folder)
        except BlockscaleError as error:
            message = str(error)
    assert message is None or message.strip()
    return message


# ---------------------------------------------------------------- what is opened

_watched: list[list[str]] = []


def _note_opens(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _watched and isinstance(arguments[0], str | bytes | os.PathLike):
        for opened in _watched:
            opened.append(os.path.abspath(os.fsdecode(arguments[0])))


sys.addaudithook(_note_opens)


@contextlib.contextmanager
def opened_paths() -> Iterator[list[str]]:
    """Every path that Python opens meanwhile, to read or to write."""
    paths: list[str] = []
    _watched.append(paths)
    try:
        yield paths
    finally:
        _watched.remove(paths)
