"""Several answers at once, and readers that go away before the end."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from blockscale.server.failure import ApiError, api_error

Item = TypeVar("Item")
DONE = "data: [DONE]\n\n"


class Streams:
    """The streams that are running, and how to end them all. It belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[Any]] = set()

    async def interleave(self, streams: Sequence[AsyncGenerator[Item]]) -> AsyncGenerator[tuple[int, Item]]:
        """(index of the stream, its next item), as they come. The first error ends all of them, and so does closing."""
        queue: asyncio.Queue[tuple[int, Item] | Exception | None] = asyncio.Queue(maxsize=2 * len(streams))

        async def pump(index: int, stream: AsyncGenerator[Item]) -> None:
            try:
                async with aclosing(stream):
                    async for item in stream:
                        await queue.put((index, item))
                await queue.put(None)
            except Exception as error:
                await queue.put(error)

        pumps = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
        self._queues.add(queue)
        try:
            num_left = len(pumps)
            while num_left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_left -= 1
                else:
                    yield item
        finally:
            self._queues.discard(queue)
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def end_all(self, error: ApiError) -> None:
        """Every stream that is running raises `error` next."""
        for queue in self._queues:
            while not queue.empty():  # what its reader did not take by now is lost to it
                queue.get_nowait()
            queue.put_nowait(error)


async def until_gone(request: Request, work: Awaitable[Item]) -> Item:
    """The result of `work`, which is cancelled when the client hangs up. ApiError (499, read by nobody) then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError("the client is gone", status=499, code="client_gone")
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def server_event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


class EventStream(StreamingResponse):
    """Server-sent events, then [DONE]. An error ends the stream as an event of its own, without [DONE].

    `events` has given its first event; it is closed at once when the reader is gone.
    """

    def __init__(self, first: str, events: AsyncGenerator[str]) -> None:
        self._events = events
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # no proxy may hold events back
        super().__init__(_to_the_end(first, events), media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


async def _to_the_end(first: str, events: AsyncGenerator[str]) -> AsyncIterator[str]:
    yield first
    try:
        async for event in events:
            yield event
    except Exception as error:
        yield api_error(error).event()
        return
    yield DONE


async def event_stream(request: Request, events: AsyncGenerator[str]) -> EventStream:
    """A response once the first event is there: what fails before it can still have a status of its own."""
    try:
        first = await until_gone(request, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events)
