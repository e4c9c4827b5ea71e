"""The engine in a thread of its own, for programs that run an asyncio loop."""

import asyncio
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from blockscale.engine.engine import Engine
from blockscale.engine.request import Event, FinishReason
from blockscale.engine.sampling import Sampling
from blockscale.errors import BlockscaleError, EngineError

Result = TypeVar("Result")

_IDLE_S = 1.0  # without work for so long, the engine checks its own books


class _Mailbox:
    """Events of one request on their way to their reader, in the reader's event loop.

    A reader that lags finds several events in one, so that what waits for it is bounded by its own output.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: list[Event] = []
        self._has_event = asyncio.Event()

    def put(self, event: Event) -> None:
        """From any thread."""
        with suppress(RuntimeError):  # the loop is closed: there is no reader any more
            self._loop.call_soon_threadsafe(self._put, event)

    async def get(self) -> Event:
        await self._has_event.wait()
        events, self._events = self._events, []
        if len(events) > 1 and events[-1].error is not None:  # what came before an error is not lost with it
            self._events = [events.pop()]
        else:
            self._has_event.clear()
        return merged(events)

    def _put(self, event: Event) -> None:
        self._events.append(event)
        self._has_event.set()


def merged(events: Sequence[Event]) -> Event:
    """Successive events of one request as one."""
    last = events[-1]
    if len(events) == 1:
        return last
    return Event(
        last.request_id,
        tuple(token for event in events for token in event.token_ids),
        "".join(event.text for event in events),
        tuple(entry for event in events for entry in event.logprobs),
        tuple(entry for event in events for entry in event.prompt_logprobs),
        last.finish_reason,
        last.stopped_by,
        last.error,
        last.usage,
        last.vector,
    )


@dataclass(frozen=True)
class _Job:
    """Something to do between two steps, and who waits for what came of it."""

    work: Callable[[], Any]
    done: Callable[[Any, BaseException | None], None]


class EngineThread:
    """Runs an engine's steps as long as there is work. Used from one event loop; the engine is this thread's alone.

        worker = EngineThread(engine)
        async for event in worker.submit(prompt_ids, sampling): ...
        await worker.close(drain_s=30)

    failure  why the loop ended by itself; None while it runs, or after `close`
    """

    def __init__(self, engine: Engine) -> None:
        self.failure: BlockscaleError | None = None
        self._engine = engine
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._mailboxes: dict[str, _Mailbox] = {}  # the thread's own
        self._is_closing = False
        self._step_began: float | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()  # no job is left behind when the thread ends
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """It takes requests."""
        return self._thread.is_alive() and self.failure is None and not self._is_closing

    @property
    def busy_s(self) -> float:
        """Seconds that the step which is running has taken so far; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def context(self) -> int:
        """Tokens of a sequence at most."""
        return self._engine.context

    async def submit(
        self, prompt_ids: Sequence[int], sampling: Sampling | None = None, request_id: str | None = None
    ) -> AsyncGenerator[Event]:
        """The events of a request, the last with its finish reason. Closing the generator, or cancelling its reader,
        takes the request out of the engine.

        At the first event: UsageError for a request that cannot be served, BusyError where too many wait, EngineError
        where the engine is closing or has failed.
        """
        mailbox = _Mailbox()

        def enter() -> str:
            if self._is_closing:
                raise EngineError("the engine is shutting down", hint="ask another server")
            name = self._engine.submit(prompt_ids, sampling, request_id)
            self._mailboxes[name] = mailbox
            return name

        entering = asyncio.ensure_future(self.call(enter))
        try:
            name = await asyncio.shield(entering)
        except asyncio.CancelledError:
            # it may be in the engine all the same, or be so in a moment
            entering.add_done_callback(self._leave)
            raise
        is_ended = False
        try:
            while not is_ended:
                event = await mailbox.get()
                is_ended = event.finish_reason is not None
                yield event
        finally:
            if not is_ended:
                self._abort(name)

    async def call(self, work: Callable[[], Result]) -> Result:
        """What `work` returns or raises, done by the engine's thread between two steps."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if future.done():
                return  # whoever waited was cancelled
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def done(result: Any, error: BaseException | None) -> None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, result, error)

        self._post(_Job(work, done))
        return await future

    async def close(self, drain_s: float = 0.0) -> None:
        """Takes no more requests, lets those it has run for so long, aborts what is left and ends the thread."""
        self._is_closing = True
        with suppress(BlockscaleError):
            for _ in range(int(drain_s / 0.02)):
                if not await self.call(lambda: self._engine.has_work):
                    break
                await asyncio.sleep(0.02)
            await self.call(self._abort_all)
        with self._lock:
            self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _leave(self, entering: "asyncio.Task[str]") -> None:
        if not entering.cancelled() and entering.exception() is None:
            self._abort(entering.result())

    def _abort(self, name: str) -> None:
        def leave() -> None:
            self._mailboxes.pop(name, None)
            self._engine.abort(name)

        with suppress(BlockscaleError):  # an engine that has ended has no request
            self._post(_Job(leave, lambda result, error: None))

    def _post(self, job: _Job) -> None:
        with self._lock:
            if self._ended.is_set():
                raise self.failure or EngineError("the engine is shut down", hint="start the process anew")
            self._jobs.put(job)

    # what follows runs in the engine's thread

    def _run(self) -> None:
        try:
            while self._do_jobs():
                if self._engine.has_work:
                    self._step_began = time.monotonic()
                    self._deliver(self._engine.step())
                    self._step_began = None
                if self._engine.lost is not None:
                    raise self._engine.lost
        except BaseException as e:
            self.failure = e if isinstance(e, BlockscaleError) else EngineError(f"the engine failed: {e!r}")
        finally:
            self._end(self.failure or EngineError("the engine is shut down"))

    def _do_jobs(self) -> bool:
        """All jobs there are; waits for one where the engine has nothing else to do. False once it is to end."""
        is_checked = False
        while True:
            has_work = self._engine.has_work
            try:
                job = self._jobs.get(block=not has_work, timeout=None if has_work or is_checked else _IDLE_S)
            except queue.Empty:
                if has_work:
                    return True
                self._engine.check_integrity()
                is_checked = True
                continue
            if job is None:
                return False
            self._do(job)

    def _do(self, job: _Job) -> None:
        try:
            result = job.work()
        except Exception as e:
            job.done(None, e)
        else:
            job.done(result, None)

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            is_last = event.finish_reason is not None
            mailbox = self._mailboxes.pop(event.request_id, None) if is_last else self._mailboxes.get(event.request_id)
            if mailbox is not None:
                mailbox.put(event)

    def _abort_all(self) -> None:
        for name in list(self._mailboxes):
            self._engine.abort(name)
        while self._engine.has_work:
            self._deliver(self._engine.step())

    def _end(self, error: BlockscaleError) -> None:
        """Every stream and every job ends with `error`, and none comes after."""
        with self._lock:
            self._ended.set()
        for name, mailbox in self._mailboxes.items():
            mailbox.put(Event(name, finish_reason=FinishReason.ERROR, error=error))
        self._mailboxes.clear()
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None:
                job.done(None, error)
