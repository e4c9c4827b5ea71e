"""Work that is killed at a write, in a child of this process, for code of run_fresh: all runs share one import."""

import os
import shutil
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def count_writes(work: Callable[[], object]) -> int:
    """How often the work changes the disk, in a child."""
    return int(in_child(lambda: _watched(work, die_at=-1)))


def killed_at(write: int, work: Callable[[], object]) -> int:
    """The signal that ended the work, killed in the middle of its change of the disk number `write`."""
    return int(in_child(lambda: _watched(work, die_at=write)))


def in_child(work: Callable[[], object]) -> Any:
    """What the work gives, of Python literals, or minus the signal that it died of."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, repr(work()).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    status = os.waitpid(child, 0)[1]
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else eval(text)


def _watched(work: Callable[[], object], die_at: int) -> int:
    count = 0

    def or_die(function: Callable[..., Any], half: Callable[..., object]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count - 1 == die_at:
                half(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return call

    pwrite, rmtree = os.pwrite, shutil.rmtree
    os.pwrite = or_die(pwrite, lambda fd, data, offset: pwrite(fd, data[: len(data) // 2], offset))
    os.replace = or_die(os.replace, lambda *_: None)
    shutil.rmtree = or_die(rmtree, lambda top, *_: _lose_a_file(top))  # type: ignore[assignment]
    work()
    return count


def _lose_a_file(top: Path) -> None:
    for path in [p for p in sorted(Path(top).rglob("*")) if p.is_file()][:1]:
        path.unlink()
