"""The engine behind asyncio: streams, readers that go away, shutting down, and a loop that dies."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from blockscale.engine.engine import Engine
from blockscale.engine.request import Event, FinishReason, TokenLogprob
from blockscale.engine.sampling import Sampling
from blockscale.engine.worker import EngineThread, merged
from blockscale.errors import BusyError, EngineError, UsageError
from engine.fake_decoder import greedy
from engine.test_engine import make, prompt

WAIT_S = 20


def using(engine: Engine, test: Callable[[EngineThread], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        worker = EngineThread(engine)
        try:
            return await asyncio.wait_for(test(worker), WAIT_S)
        finally:
            await asyncio.wait_for(worker.close(), WAIT_S)

    result = asyncio.run(main())
    assert not any(thread.name == "engine" and thread.is_alive() for thread in threading.enumerate())
    return result


async def read(worker: EngineThread, tokens: list[int], num: int) -> list[int]:
    return [t async for event in worker.submit(tokens, Sampling(max_tokens=num)) for t in event.token_ids]


async def until_idle(worker: EngineThread, engine: Engine) -> None:
    while await worker.call(lambda: engine.has_work):
        await asyncio.sleep(0.005)
    await worker.call(engine.check_integrity)
    assert (await worker.call(engine.stats)).pages.held == 0


class Gate:
    """Lets the model run only so many steps."""

    def __init__(self, num: int) -> None:
        self.left = threading.Semaphore(num)
        self.is_reached = threading.Event()

    def __call__(self, batch: object) -> None:
        self.is_reached.set()
        self.left.acquire()


def test_many_streams_at_once() -> None:
    prompts = [prompt(i, 5 + i) for i in range(12)]

    async def test(worker: EngineThread) -> list[list[int]]:
        return await asyncio.gather(*(read(worker, p, 10 + i) for i, p in enumerate(prompts)))

    assert using(make(), test) == [greedy(p, 10 + i) for i, p in enumerate(prompts)]


def test_errors_come_at_the_first_event() -> None:
    engine = make(gate := Gate(0), max_waiting=1)

    async def test(worker: EngineThread) -> None:
        for wrong in ([], [10**6]):
            with pytest.raises(UsageError):
                await read(worker, wrong, 1)
        first = asyncio.create_task(read(worker, [1], 2))
        await asyncio.to_thread(gate.is_reached.wait)  # a step holds the engine's thread
        second = asyncio.create_task(read(worker, [2], 2))
        third = asyncio.create_task(read(worker, [3], 2))
        gate.left.release(100)
        results = await asyncio.gather(first, second, third, return_exceptions=True)
        assert results[:2] == [greedy([1], 2), greedy([2], 2)]
        assert isinstance(results[2], BusyError)

    using(engine, test)


def test_readers_that_go_away_take_their_requests_along() -> None:
    engine = make()

    async def test(worker: EngineThread) -> None:
        stream = worker.submit(prompt(0, 9), Sampling(max_tokens=400))
        await anext(stream)
        await stream.aclose()
        cancelled = asyncio.create_task(read(worker, prompt(1, 9), 400))
        await asyncio.sleep(0.02)
        cancelled.cancel()
        early = asyncio.create_task(read(worker, prompt(2, 9), 400))
        await asyncio.sleep(0)  # its submission is on the way
        early.cancel()
        await asyncio.gather(cancelled, early, return_exceptions=True)
        await until_idle(worker, engine)
        assert (await worker.call(engine.stats)).num_finished == 0
        assert await read(worker, [5], 3) == greedy([5], 3)

    using(engine, test)


def test_a_slow_reader_finds_what_came_as_one_event() -> None:
    async def test(worker: EngineThread) -> list[Event]:
        stream = worker.submit([5], Sampling(max_tokens=50))
        events = [await anext(stream)]
        await asyncio.sleep(0.3)
        return events + [event async for event in stream]

    events = using(make(), test)
    assert [t for event in events for t in event.token_ids] == greedy([5], 50)
    assert len(events) < 50
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)


def test_closing_lets_finish_what_it_can_and_aborts_the_rest() -> None:
    async def drained(worker: EngineThread) -> list[int]:
        reading = asyncio.create_task(read(worker, [5], 60))
        await asyncio.sleep(0.01)
        await worker.close(drain_s=WAIT_S)
        assert not worker.is_alive
        with pytest.raises(EngineError, match=r"shut(ting)? down"):
            await read(worker, [1], 1)
        return await reading

    assert using(make(), drained) == greedy([5], 60)
    gate = Gate(3)

    async def cut(worker: EngineThread) -> list[Event]:
        stream = worker.submit([5], Sampling(max_tokens=60))
        first = await anext(stream)
        closing = asyncio.create_task(worker.close())
        await asyncio.sleep(0.02)
        gate.left.release(5)
        rest = [event async for event in stream]
        await closing
        return [first, *rest]

    events = using(make(gate), cut)
    assert events[-1].finish_reason is FinishReason.ABORT
    got = [t for event in events for t in event.token_ids]
    assert got == greedy([5], 60)[: len(got)]


def test_a_loop_that_dies_ends_every_stream_with_an_error() -> None:
    engine = make(gate := Gate(2))

    async def test(worker: EngineThread) -> None:
        streams = [worker.submit([i], Sampling(max_tokens=50), str(i)) for i in range(3)]
        reading = [asyncio.create_task(_events(stream)) for stream in streams]
        await asyncio.to_thread(gate.is_reached.wait)
        engine._scheduler.schedule = lambda: 1 / 0  # whatever breaks a scheduler
        gate.left.release(100)
        for events in await asyncio.gather(*reading):
            assert events[-1].finish_reason is FinishReason.ERROR
            assert "ZeroDivisionError" in str(events[-1].error)
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            await read(worker, [1], 1)
        assert not worker.is_alive
        assert worker.failure is not None

    using(engine, test)


async def _events(stream: Any) -> list[Event]:
    return [event async for event in stream]


def test_events_joined_say_all_that_they_said() -> None:
    entries = [TokenLogprob(i, -1.0) for i in range(3)]
    parts = [
        Event("a", (0,), "x", (entries[0],), (entries[2],)),
        Event("a", (1,), "y", (entries[1],), finish_reason=FinishReason.STOP, stopped_by=1),
    ]
    whole = Event("a", (0, 1), "xy", tuple(entries[:2]), (entries[2],), FinishReason.STOP, 1)
    assert merged(parts) == whole
    assert merged(parts[:1]) is parts[0]
