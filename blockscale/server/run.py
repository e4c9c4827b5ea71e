"""From an engine to a server that answers until it is told to end."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI

from blockscale.engine.engine import Engine
from blockscale.engine.vocabulary import Vocabulary
from blockscale.engine.worker import EngineThread
from blockscale.errors import CheckFailed, UsageError
from blockscale.models.pooling import NOT_TRAINED, Embedding
from blockscale.server.answer import chat_form
from blockscale.server.app import make_app
from blockscale.server.canary import Bounds, Canary, Numbers, read_reference, score, write_reference
from blockscale.server.failure import ApiError
from blockscale.server.limits import Limits, Traffic
from blockscale.server.metrics import Metrics
from blockscale.server.service import Service

_WATCH_S = 1.0  # between looks at the engine
_AFTER_DRAIN_S = 5.0  # for streams to say why they end


@dataclass(frozen=True)
class CanaryOptions:
    """text       file that is scored
    reference  its numbers; None: the server compares with its own first score alone
    every_s    between scores
    """

    text: Path
    reference: Path | None = None
    every_s: float = 1800.0
    bounds: Bounds = field(default_factory=Bounds)


@dataclass(frozen=True)
class ServerOptions:
    """names      that requests may give as `model`
    api_key    None: all who reach the port may ask
    embedding  how the model embeds texts, or why it does not
    """

    names: tuple[str, ...]
    api_key: str | None = None
    limits: Limits = field(default_factory=Limits)
    canary: CanaryOptions | None = None
    embedding: Embedding | str = NOT_TRAINED


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the port, before anything large is loaded. UsageError where that cannot be."""
    try:
        # Only of a socket that says TCP does asyncio send small pieces at once; else each answer waits for 40 ms
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        family, kind, protocol, _, address = found[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{host} is no address of this machine: {error}", hint="--host 127.0.0.1") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        hint = "another program listens there; choose another with --port, or 0 for any that is free"
        raise UsageError(f"cannot listen on {host}:{port}: {error}", hint=hint) from error
    return listener


def serve(
    engine: Engine,
    tokenizer: Any,
    vocabulary: Vocabulary,
    listener: socket.socket,
    options: ServerOptions,
    notice: Callable[[str], None],
    pages: Callable[[Service], Sequence[APIRouter]] = lambda _: (),
) -> None:
    """Answers until SIGTERM or SIGINT, then lets what runs end.

    pages  further endpoints

    CheckFailed if the engine ended by itself: a supervisor then starts the process anew.
    """
    failure = asyncio.run(_serve(engine, tokenizer, vocabulary, listener, options, notice, pages))
    if failure is not None:
        raise CheckFailed(f"the engine ended: {failure}", hint=failure.hint if hasattr(failure, "hint") else "")


def make_reference(engine: Engine, tokenizer: Any, vocabulary: Vocabulary, text: Path, out: Path, name: str) -> Numbers:
    """Scores the canary's text with this engine and writes its numbers."""

    async def run() -> Numbers:
        worker = EngineThread(engine)
        try:
            service = make_service(worker, engine, tokenizer, vocabulary, ServerOptions((name,)))
            return await score(service, _read(text))
        finally:
            await worker.close()

    numbers = asyncio.run(run())
    write_reference(out, numbers, name)
    return numbers


def make_service(
    worker: EngineThread, engine: Engine, tokenizer: Any, vocabulary: Vocabulary, options: ServerOptions
) -> Service:
    return Service(
        worker,
        tokenizer,
        vocabulary,
        options.names,
        engine.context,
        lambda: worker.call(engine.stats),
        chat_form(tokenizer),
        options.limits,
        Metrics(),
        Traffic(options.limits),
        api_key=options.api_key,
        embedding=options.embedding,
    )


class _Server(uvicorn.Server):
    """uvicorn, which tells when it is asked to end, and for which a signal to end is no failure: it does not raise the
    signal again at its own end."""

    def __init__(self, config: uvicorn.Config, on_exit: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_exit = on_exit

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit and sig == signal.SIGINT  # Ctrl-C for the second time
        self.should_exit = True
        self._on_exit()


async def _serve(
    engine: Engine,
    tokenizer: Any,
    vocabulary: Vocabulary,
    listener: socket.socket,
    options: ServerOptions,
    notice: Callable[[str], None],
    pages: Callable[[Service], Sequence[APIRouter]],
) -> Exception | None:
    """Why the engine ended by itself; None where the server was told to end."""
    loop = asyncio.get_running_loop()
    worker = EngineThread(engine)
    service = make_service(worker, engine, tokenizer, vocabulary, options)
    limits = options.limits

    def drain() -> None:
        service.traffic.is_draining = True
        gone = ApiError("the server is shutting down", status=503, code="shutting_down", hint="ask again")
        loop.call_soon_threadsafe(loop.call_later, limits.drain_seconds, service.streams.end_all, gone)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(_watch(worker, server))]
        if canary is not None:
            tasks.append(asyncio.create_task(canary.run()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    config = uvicorn.Config(
        make_app(service, pages(service), lifespan),
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(limits.drain_seconds + _AFTER_DRAIN_S),
    )
    server = _Server(config, drain)
    try:
        canary = await _start_canary(service, options.canary, notice)
        host, port = listener.getsockname()[:2]
        notice(f"{service.name} answers on http://{f'[{host}]' if ':' in host else host}:{port}")
        await server.serve([listener])
    finally:
        await worker.close()
    return worker.failure


async def _watch(worker: EngineThread, server: uvicorn.Server) -> None:
    """Ends the server when the engine is gone: requests were told so, and nothing can be answered any more."""
    while worker.is_alive:
        await asyncio.sleep(_WATCH_S)
    server.should_exit = True


async def _start_canary(
    service: Service, options: CanaryOptions | None, notice: Callable[[str], None]
) -> Canary | None:
    if options is None:
        return None
    reference = None if options.reference is None else read_reference(options.reference)
    canary = Canary(service, _read(options.text), reference, options.every_s, options.bounds, notice)
    reading = await canary.check()
    parts = [f"perplexity {reading.perplexity:.4g}"]
    parts += [] if reading.ratio is None else [f"{reading.ratio:.4g} times the reference's"]
    parts += [] if reading.kl is None else [f"{reading.kl:.3g} nats a token from it"]
    notice(f"canary: {', '.join(parts)}")
    return canary


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not a readable text: {error}") from error
