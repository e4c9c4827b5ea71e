"""What nobody should send: every answer is a refusal with a reason or a right answer, none is a failure of the server,
and the server goes on. Needs nothing."""

import contextlib
import json
import random
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from blockscale.engine.engine import Engine
from blockscale.engine.options import EngineOptions
from blockscale.engine.vocabulary import read_vocabulary
from blockscale.models.pooling import Embedding, Pooling
from blockscale.server import protocol
from blockscale.server.limits import Limits
from blockscale.server.run import ServerOptions
from tests.engine.fake_decoder import VOCAB_SIZE, FakeModel
from tests.server.running import Running, check_nothing_is_left, letters, over, wait_for

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "A"}]
LEAST: dict[str, tuple[type, dict[str, Any]]] = {
    CHAT: (protocol.ChatRequest, {"model": "tiny", "messages": USER, "max_tokens": 2}),
    TEXT: (protocol.CompletionRequest, {"model": "tiny", "prompt": "A", "max_tokens": 2}),
    "/v1/embeddings": (protocol.EmbeddingRequest, {"model": "tiny", "input": "A"}),
    "/tokenize": (protocol.TokenizeRequest, {"prompt": "A"}),
    "/detokenize": (protocol.DetokenizeRequest, {"tokens": [1]}),
}
DEEP: Any = "x"
for _ in range(150):
    DEEP = {"a": [DEEP]}
# as Python writes JSON, and as JSON that Python does not write
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**400, -(10**400), 1.5, -0.0, 1e308, 5e-324),
    *("", "A", "\x00", "\u00e9" * 50, "9" * 5000, "\U0001f600", "\\", "a" * 10_000),
    *([], [[]], [None], [1], ["A"], [[1, 2], [3]], [{"a": 1}], [1] * 500, ["A"] * 200, [-1], [2**70], USER),
    *({}, {"a": {}}, {"type": "function"}, {"5": 1e308}, {"9" * 5000: 1}, {"05": 1, "5": 1}, {"\u0665": 1}),
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": DEEP}},
    [{"type": "function", "function": {"name": "f", "parameters": DEEP}}],
    [{"role": "user", "content": DEEP}],
    DEEP,
]
RAW = [
    *("1e999", "-1e999", "NaN", "Infinity", "1" * 5000, "0x1", "'A'", "01"),
    *('"\\ud800"', '"\\udc00\\ud800"', "[" * 900 + "]" * 900),
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    options = EngineOptions(num_pages=24, max_running=4, max_step_tokens=24, max_context=128)
    return Engine(FakeModel(), options, vocabulary=read_vocabulary(letters(size=VOCAB_SIZE)), end_ids=[0])


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Running]:
    tokenizer = letters(size=VOCAB_SIZE)
    options = ServerOptions(
        ("tiny",),
        limits=Limits(max_body_bytes=1_000_000, body_seconds=1.0),
        embedding=Embedding(Pooling.MEAN, 1, True),
    )
    with over(engine, tokenizer, options) as it:
        yield it
        assert it.get("/health").status_code == 200
        check_nothing_is_left(it, engine)


def send(server: Running, path: str, body: bytes) -> None:
    response = server.client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404), (path, body[:200], response.text[:300])
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"]
        assert error["code"]
        assert len(response.content) < 20_000


@pytest.mark.parametrize("path", LEAST)
def test_any_value_in_any_field(server: Running, path: str) -> None:
    kind, least = LEAST[path]
    chance = random.Random(path)
    names = [*kind.model_fields, *protocol._UNSERVED.get(kind, {}), "other"]  # type: ignore[attr-defined]
    for name in names:
        for value in VALUES:
            if chance.random() < 0.25:
                send(server, path, json.dumps({**least, name: value}).encode())
        whole = json.dumps({**least, name: "@"})
        for text in chance.sample(RAW, 3):
            send(server, path, whole.replace('"@"', text).encode())


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_any_values_together(server: Running, path: str) -> None:
    kind, least = LEAST[path]
    chance = random.Random(7)
    for _ in range(60):
        names = chance.sample(list(kind.model_fields), 3)  # type: ignore[attr-defined]
        send(server, path, json.dumps({**least, **{name: chance.choice(VALUES) for name in names}}).encode())


def test_bytes_in_disorder(server: Running) -> None:
    chance = random.Random(3)
    whole = json.dumps({**LEAST[CHAT][1], "stop": ["\u00e9"], "logit_bias": {"5": 1.5}}, ensure_ascii=False).encode()
    for _ in range(100):
        body = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(body))
            body[at : at + chance.randrange(2)] = chance.randbytes(chance.randrange(3))
        send(server, CHAT, bytes(body))


@pytest.mark.parametrize("num", [2**63, 10**9, 10**400])
def test_choices_without_number(server: Running, num: int) -> None:
    """Nothing is made for each of them."""
    began = time.monotonic()
    for path in (CHAT, TEXT):
        response = server.post(path, **{**LEAST[path][1], "n": num})
        assert response.status_code == 400
    assert time.monotonic() - began < 5


BODY = json.dumps(LEAST[TEXT][1]).encode()


def request(
    *headers: bytes, body: bytes = BODY, version: bytes = b"HTTP/1.1", line: bytes = b"", length: int | None = None
) -> bytes:
    head = [line or b"POST /v1/completions " + version, b"Host: a", b"Content-Type: application/json", *headers]
    return b"\r\n".join([*head, b"Content-Length: %d" % (len(body) if length is None else length), b"", b""]) + body


def connect(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def exchange(server: Running, sent: bytes) -> bytes:
    """All that the server answers until it closes the connection; TimeoutError if it never does."""
    with connect(server) as connection:
        connection.sendall(sent)
        found = b""
        while part := connection.recv(65536):
            found += part
    return found


CLOSE = b"Connection: close"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (request(version=b"HTTP/1.0"), 200),
        (request(CLOSE, b"X: " + b"a" * 10_000), 200),
        (request(CLOSE, *[b"X-%d: a" % i for i in range(1000)]), 200),
        (request(CLOSE, b"Authorization: Bearer \xff\xfe"), 200),
        (request(CLOSE, b"Expect: 100-continue"), 100),
        (request(CLOSE).replace(b"Host: a", b"Host: ["), 200),
        (request(CLOSE).replace(b"Host: a", b"Host: \xff"), 200),
        (request(CLOSE).replace(b"Host: a\r\n", b""), 400),
        (request(CLOSE, length=-5), 400),
        (request(CLOSE, length=10**15), 413),
        (request(CLOSE, b"Content-Encoding: gzip", body=b"\x1f\x8b\x08\x00"), 400),
        (request(CLOSE).replace(b"application/json", b"multipart/form-data; boundary=x"), 415),
        (request(CLOSE).replace(b"application/json", b"application/json; charset=utf-7"), 200),
        (request(CLOSE).replace(b"Content-Type: application/json\r\n", b""), 415),
        (request(CLOSE, line=b"PATCH /v1/completions HTTP/1.1"), 405),
        (request(CLOSE, line=b"POST /v1/completions/ HTTP/1.1"), 404),
        (request(CLOSE, line=b"POST //v1//completions HTTP/1.1"), 404),
        (request(CLOSE, line=b"GET /v1/models/%ff%00..%2f HTTP/1.1", body=b""), 404),
        (request(CLOSE, line=b"GET http://[/ HTTP/1.1", body=b""), 404),
        (request(CLOSE, line=b"GET /page/..%2f..%2frun.py HTTP/1.1", body=b""), 404),
        (request(CLOSE, line=b"BREW /coffee HTCPCP/1.0"), 400),
        (b"\x16\x03\x01\x02\x00\x01\x00" * 20 + b"\r\n\r\n", 400),
    ],
)
def test_requests_that_are_odd(server: Running, sent: bytes, status: int) -> None:
    found = exchange(server, sent)
    assert int(found.split(b" ", 2)[1]) == status, found[:500]


def test_a_pipeline_is_answered_in_order(server: Running) -> None:
    bodies = [json.dumps({**LEAST[TEXT][1], "max_tokens": num}).encode() for num in (3, 1, 2)]
    found = exchange(server, b"".join(request(*([CLOSE] if i == 2 else []), body=b) for i, b in enumerate(bodies)))
    counts = [int(part.split(b"completion_tokens")[1][2:3]) for part in found.split(b"HTTP/1.1 200")[1:]]
    assert counts == [3, 1, 2]


def test_a_body_that_never_comes(server: Running) -> None:
    """Nor one that comes a byte at a time."""
    found = exchange(server, request(length=500))
    assert b" 408 " in found.splitlines()[0]
    assert b"body_too_slow" in found
    with connect(server) as connection:
        connection.sendall(request(length=500, body=b""))
        connection.settimeout(0.1)
        found = b""
        for _ in range(50):
            connection.sendall(b" ")
            with contextlib.suppress(TimeoutError):
                found += connection.recv(65536)
            if b"body_too_slow" in found:
                return
    pytest.fail(f"the server waits: {found!r}")


def test_chunks_that_are_none(server: Running) -> None:
    sent = request(b"Transfer-Encoding: chunked").replace(b"Content-Length: %d\r\n" % len(BODY), b"") + b"\r\nZZ\r\n"
    assert b" 400 " in exchange(server, sent).splitlines()[0]


@pytest.mark.parametrize("how", ["closed", "half", "reset", "in the head", "in the body"])
def test_connections_that_break(server: Running, engine: Engine, how: str) -> None:
    stream = json.dumps({**LEAST[TEXT][1], "max_tokens": 100, "stream": True}).encode()
    for _ in range(5):
        with connect(server) as connection:
            whole = request(body=stream)
            connection.sendall(whole[:40] if how == "in the head" else whole[:-20] if how == "in the body" else whole)
            if how == "half":  # taken as a client that is gone
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
            elif how == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_for(lambda: server.service.traffic.num_sequences == 0)
    check_nothing_is_left(server, engine)
    server_errors = [line for line in server.get("/metrics").text.splitlines() if "internal_error" in line]
    assert server_errors == []


def test_nothing_here_is_an_internal_error(server: Running) -> None:
    counted = server.get("/metrics").text
    assert 'code="internal_error"' not in counted
    assert 'status="500"' not in counted


def test_a_template_that_recurses() -> None:
    tokenizer = letters("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(messages) }}", size=VOCAB_SIZE)
    engine = Engine(FakeModel(), EngineOptions(num_pages=4), vocabulary=read_vocabulary(tokenizer))
    with over(engine, tokenizer) as server:
        assert server.post(CHAT, **LEAST[CHAT][1]).status_code == 400
