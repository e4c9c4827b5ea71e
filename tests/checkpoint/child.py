"""Work done in a forked child, which may be killed on its way."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any


def run_child(work: Callable[[], None]) -> int:
    """The exit code of a child that does `work`: 0, 1 for an exception, -9 for one that was killed."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)  # not through pytest's own exit
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_at_line(source: str, number: int) -> Callable[[], None]:
    """Arms this process: it is killed as it comes to its `number`-th line of a source file, counted as they run."""
    left = number

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                kill_self()
        return on_line

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        return on_line if frame.f_code.co_filename == source else None

    return lambda: sys.settrace(on_call)


def folder_bytes(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}
