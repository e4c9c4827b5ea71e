"""What verbs print: data to stdout, progress and notices to stderr."""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_QUIET_SECONDS = 1.0  # what is done by then needs no line of progress


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A callback (stage, done, total) that draws bars with a time estimate on a terminal. Elsewhere it prints a line
    for each stage that is not done at once."""
    if not sys.stderr.isatty():
        yield _stage_lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield update


def _stage_lines() -> Callable[[str, int, int], None]:
    begun: dict[str, float] = {}
    told: set[str] = set()

    def update(stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage not in told and now - begun.setdefault(stage, now) > _QUIET_SECONDS:
            told.add(stage)
            print(f"{printable(stage)} ...", file=sys.stderr, flush=True)

    return update


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """What is printed inside may find nobody who reads it (`| head`): the verb goes on, and its outcome stays."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(data: object, *, one_item_a_line: bool = False) -> None:
    """One JSON document; figures that are not finite become null.

    one_item_a_line  each item of each list of a table is one line: shorter, and quick with 100,000 items
    """
    if one_item_a_line and isinstance(data, dict):
        entries = (f"{json.dumps(key)}: {_lines(value)}" for key, value in data.items())
        sys.stdout.write("{\n" + ",\n".join(entries) + "\n}")
    else:
        json.dump(_finite(data), sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")


def _lines(value: object) -> str:
    if not isinstance(value, list) or not value:
        return _line(value)
    return "[\n" + ",\n".join(map(_line, value)) + "\n]"


def _line(value: object) -> str:
    try:
        return json.dumps(value, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int = 0) -> None:
    """Left-aligned first column, right-aligned figures, two spaces between. The last `num_left` columns are text."""
    widths = [max(len(row[i]) for row in (headers, *rows)) for i in range(len(headers))]
    last_figure = len(headers) - num_left
    for row in (headers, *rows):
        cells = [
            cell.rjust(w) if 0 < i < last_figure else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def printable(text: str) -> str:
    """With control characters as escapes: names come from files that anybody may have written."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def notice(message: str) -> None:
    print(f"note: {printable(message)}", file=sys.stderr)


def quiet_libraries() -> None:
    """Keeps transformers' own bars and advice off the terminal; its errors still come through."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
