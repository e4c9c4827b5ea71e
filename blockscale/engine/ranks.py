"""The processes that compute beside this one: started, told what to do, watched, ended.

None outlives this process: each ends when its pipe from here is closed, by whatever end this process comes to. None
dies unnoticed: a thread waits for each, and ends what waits for it. Ctrl-C does not reach them; this process decides.
"""

import os
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from blockscale.engine.orders import Answer, End, Job, Order, packed, receive
from blockscale.errors import EngineError, RankError

_CODE = "from blockscale.engine.follower import main; main()"
_END_S = 5.0  # for a process that was told to end
_DEATH_S = 2.0  # after something went wrong here: the reason may be a process that is just dying
_HINT = "start the engine anew"


@dataclass
class _State:
    """What ends with the processes, whoever notices first.

    failed  a process ended that was not told to; `who` is its rank
    abort   frees this process where it waits for one that is gone
    folder  where the ranks find each other
    """

    folder: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    lifelines: list[int] = field(default_factory=list)
    failed: threading.Event = field(default_factory=threading.Event)
    who: int = 0
    is_closing: bool = False
    abort: Callable[[], None] | None = None


class Ranks:
    """Processes 1, 2, ... of a model's ranks; this one is rank 0."""

    def __init__(self, jobs: Sequence[Job], folder: str) -> None:
        """Starts a process for each job and waits until all are up. EngineError where one does not come up.

        folder  where the ranks find each other; it is removed when all are ended
        """
        self._state = state = _State(folder)
        self._failure: RankError | None = None
        self._finalizer = weakref.finalize(self, _close, state)
        for rank in range(1, len(jobs) + 1):
            _start(state)
            watch = threading.Thread(target=_watch, args=(state, rank), name=f"rank {rank}", daemon=True)
            watch.start()
        with self.together():
            for job, connection in zip(jobs, state.connections, strict=True):
                connection.send_bytes(packed(job))
            self.hear()

    @property
    def process_ids(self) -> list[int]:
        """Of ranks 1, 2, ..."""
        return [process.pid for process in self._state.processes]

    def on_end(self, abort: Callable[[], None]) -> None:
        """Called once: from another thread when a process is gone, or when all are ended."""
        self._state.abort = abort

    def tell(self, order: Order) -> None:
        """Tells all. Inside `together`."""
        message = packed(order)
        for connection in self._state.connections:
            connection.send_bytes(message)

    def hear(self) -> list[Any]:
        """The answer of each, in order of rank. Inside `together`."""
        values = []
        for rank, connection in enumerate(self._state.connections, 1):
            answer = receive(connection)
            assert isinstance(answer, Answer)
            if answer.error is not None:
                raise _of_rank(rank, *answer.error)
            values.append(answer.value)
        return values

    def check(self) -> None:
        """RankError once a process is gone, or something failed that all did together."""
        if self._failure is None and (self._state.failed.is_set() or not self._finalizer.alive):
            self._fail(None)
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks do: after any failure in it they are out of step, and the processes are ended."""
        self.check()
        try:
            yield
        except Exception as e:
            failure = self._fail(e)
            raise failure from (None if failure is e else e)
        except BaseException:
            self._fail(RankError("the engine was interrupted in the middle of a step", hint=_HINT))
            raise

    def close(self, *, at_once: bool = False) -> None:
        """Ends the processes and waits for them. `at_once`: whatever they are doing."""
        if at_once:
            _close(self._state, is_gentle=False)
        self._finalizer()

    def _fail(self, error: Exception | None) -> RankError:
        if self._failure is None:
            self._failure = self._reason(error)
            _close(self._state, is_gentle=False)
        return self._failure

    def _reason(self, error: Exception | None) -> RankError:
        if isinstance(error, RankError):
            return error
        state = self._state
        if not self._finalizer.alive:
            return RankError("the engine is closed", hint=_HINT)
        if error is None or isinstance(error, EOFError | OSError | RuntimeError):
            state.failed.wait(_DEATH_S)
        if state.failed.is_set():
            said = _last_words(state)
            if said is not None:
                return said
            process = state.processes[state.who - 1]
            return RankError(f"the process of rank {state.who} ended, with exit code {process.poll()}", hint=_HINT)
        return RankError(f"rank 0: {type(error).__name__}: {error}", hint=getattr(error, "hint", "") or _HINT)


def _start(state: _State) -> None:
    ours, theirs = Pipe()
    reading, writing = os.pipe()
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CODE, str(theirs.fileno()), str(reading), state.folder],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
            pass_fds=(theirs.fileno(), reading),
            start_new_session=True,
        )
    except OSError as e:
        os.close(writing)
        raise EngineError(f"no further process can be started: {e}", hint="free memory or raise its limits") from e
    finally:
        theirs.close()
        os.close(reading)
    state.processes.append(process)
    state.connections.append(ours)
    state.lifelines.append(writing)


def _watch(state: _State, rank: int) -> None:
    state.processes[rank - 1].wait()
    if state.is_closing or state.failed.is_set():
        return
    state.who = rank
    state.failed.set()
    for process in state.processes:  # they wait for the one that is gone, or soon will
        if process.poll() is None:
            process.kill()
    abort, state.abort = state.abort, None
    if abort is not None:
        abort()


def _last_words(state: _State) -> RankError | None:
    """Of the process that ended first, if it said why. What others say is that they miss it."""
    connection = state.connections[state.who - 1]
    with suppress(EOFError, OSError):
        while connection.poll():
            answer = receive(connection)
            if isinstance(answer, Answer) and answer.error is not None:
                return _of_rank(state.who, *answer.error)
    return None


def _of_rank(rank: int, what: str, hint: str) -> RankError:
    return RankError(f"rank {rank}: {what}", hint=hint or _HINT)


def _close(state: _State, *, is_gentle: bool = True) -> None:
    state.is_closing = True
    for process, connection in zip(state.processes, state.connections, strict=True):
        if is_gentle and process.poll() is None:
            with suppress(OSError):
                connection.send_bytes(packed(End()))
    for process in state.processes:
        try:
            process.wait(_END_S if is_gentle else 0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    abort, state.abort = state.abort, None
    if abort is not None:
        abort()
    shutil.rmtree(state.folder, ignore_errors=True)
    for connection in state.connections:
        connection.close()
    for lifeline in state.lifelines:
        with suppress(OSError):
            os.close(lifeline)
    state.lifelines.clear()
