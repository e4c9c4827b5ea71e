"""A server in a thread of its own, reached over a socket as users reach it."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from blockscale.engine.engine import Engine
from blockscale.engine.options import EngineOptions
from blockscale.engine.vocabulary import read_vocabulary
from blockscale.engine.worker import EngineThread
from blockscale.host.model import load_tokenizer
from blockscale.models.load import load_decoder
from blockscale.models.pooling import NOT_TRAINED, Embedding
from blockscale.server.answer import chat_form
from blockscale.server.app import make_app
from blockscale.server.limits import Limits, Traffic
from blockscale.server.metrics import Metrics
from blockscale.server.run import ServerOptions
from blockscale.server.run import make_service as engine_service
from blockscale.server.service import Service

TEMPLATE = (
    "{% for tool in tools or [] %}T:{{ tool.function.name }};{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %};"
    "{% endfor %}{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}{# <think></think> #}"
)


def letters(template: str | None = TEMPLATE, size: int = 128) -> Any:
    """A tokenizer of one token a letter, whose ids are ASCII codes below `size`."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({chr(i): i for i in range(size)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")
    tokenizer.chat_template = template
    return tokenizer


def make_service(
    engine: Any, tokenizer: Any, *, context: int = 200, limits: Limits | None = None, **more: Any
) -> Service:
    limits = limits or Limits()
    return Service(
        engine,
        tokenizer,
        read_vocabulary(tokenizer),
        ("tiny", "other-name"),
        context,
        engine.stats,
        chat_form(tokenizer),
        limits,
        Metrics(),
        Traffic(limits),
        **more,
    )


@dataclass(frozen=True)
class Running:
    url: str
    service: Service
    loop: asyncio.AbstractEventLoop
    client: httpx.Client

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """In the server's own thread."""
        self.loop.call_soon_threadsafe(function, *args)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def get(self, path: str) -> httpx.Response:
        return self.client.get(path)


@contextlib.contextmanager
def running(service: Service, **options: Any) -> Iterator[Running]:
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(service, **options), log_level="error", lifespan="on"))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve([listener])), daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with httpx.Client(base_url=url, timeout=20) as client:
            yield Running(url, service, loop, client)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 15
    while not is_so():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.005)


def read_metrics(text: str) -> dict[str, float]:
    """Prometheus' page as name with labels -> figure."""
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


@contextlib.contextmanager
def over(engine: Engine, tokenizer: Any, options: ServerOptions | None = None) -> Iterator[Running]:
    """A server over an engine in its thread, both of which end with it."""
    worker = EngineThread(engine)
    service = engine_service(worker, engine, tokenizer, read_vocabulary(tokenizer), options or ServerOptions(("tiny",)))
    try:
        with running(service) as it:
            yield it
    finally:
        asyncio.run(worker.close())


def check_nothing_is_left(server: Running, engine: Engine) -> None:
    wait_for(lambda: not engine.has_work)
    engine.check_integrity()
    assert engine.stats().pages.held == 0
    assert server.service.traffic.num_sequences == 0


@contextlib.contextmanager
def decoding(
    path: Path, options: EngineOptions, *, template: str | None = None, embedding: Embedding | str = NOT_TRAINED
) -> Iterator[tuple[Running, Engine]]:
    """A server over the decoder of a folder, and its engine; after it, nothing may be left in the engine."""
    tokenizer = load_tokenizer(path)
    tokenizer.chat_template = template
    engine = Engine(load_decoder(path), options, vocabulary=read_vocabulary(tokenizer))
    with over(engine, tokenizer, ServerOptions(("tiny",), embedding=embedding)) as it:
        yield it, engine
        check_nothing_is_left(it, engine)
