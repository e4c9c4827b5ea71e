"""A server at work: readers that leave, full queues, keys, drains, a dead engine, metrics. Needs nothing."""

import json
import threading
import time
from collections.abc import Callable

import httpx
import pytest

from blockscale.engine.vocabulary import read_vocabulary
from blockscale.errors import EngineError
from blockscale.server.failure import ApiError
from blockscale.server.limits import Limits
from tests.server.fake_engine import FakeEngine
from tests.server.running import letters, make_service, read_metrics, running, wait_for

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def fake() -> FakeEngine:
    return FakeEngine(read_vocabulary(letters()))


def in_thread(work: Callable[[], httpx.Response]) -> tuple[threading.Thread, list[httpx.Response]]:
    found: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    return thread, found


@pytest.mark.parametrize("n", [1, 3])
def test_a_reader_that_leaves_takes_its_requests_along(n: int) -> None:
    engine = fake()
    engine.gate_at = 3
    engine.gate.clear()
    with running(make_service(engine, letters())) as server:
        body = {"model": "tiny", "prompt": "x" * 50, "stream": True, "max_tokens": 60, "n": n}
        with httpx.stream("POST", server.url + TEXT, json=body) as response:
            lines = response.iter_lines()  # kept: the response is closed with it
            assert next(lines).startswith("data: ")
            wait_for(lambda: len(engine.running) == n)
        wait_for(lambda: not engine.running)
        assert len(engine.aborted) == n
        wait_for(lambda: server.service.traffic.num_sequences == 0)
        server.call(engine.gate.set)
        assert server.post(TEXT, model="tiny", prompt="ab").json()["choices"][0]["text"] == "ab"


def test_a_client_that_hangs_up_before_the_answer() -> None:
    engine = fake()
    engine.gate.clear()
    with running(make_service(engine, letters())) as server:
        for stream in (False, True):
            body = {"model": "tiny", "prompt": "xyz", "stream": stream}
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(server.url + TEXT, json=body, timeout=httpx.Timeout(5, read=0.3))
            wait_for(lambda: not engine.running)
        assert len(engine.aborted) == 2
        wait_for(lambda: server.service.traffic.num_sequences == 0)


def test_a_full_queue() -> None:
    engine = fake()
    engine.gate.clear()
    with running(make_service(engine, letters(), limits=Limits(max_sequences=2))) as server:
        thread, first = in_thread(lambda: server.post(TEXT, model="tiny", prompt=["a", "b"]))
        wait_for(lambda: len(engine.running) == 2)
        for stream in (False, True):
            response = server.post(TEXT, model="tiny", prompt="c", stream=stream)
            assert response.status_code == 429
            assert response.json()["error"]["code"] == "queue_full"
            assert response.headers["retry-after"] == "1"
        server.call(engine.gate.set)
        thread.join()
        assert first[0].status_code == 200
        assert server.post(TEXT, model="tiny", prompt="c").status_code == 200


def test_keys() -> None:
    with running(make_service(fake(), letters(), api_key="secret")) as server:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
            response = server.client.post(TEXT, json={"model": "tiny", "prompt": "x"}, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert server.get("/metrics").status_code == 401
        assert server.get("/health").status_code == 200
        good = {"authorization": "Bearer secret"}
        assert server.client.post(TEXT, json={"model": "tiny", "prompt": "x"}, headers=good).status_code == 200
        assert server.client.get("/v1/models", headers=good).status_code == 200


def test_an_engine_that_dies_in_a_stream() -> None:
    engine = fake()
    engine.fails_at = 2
    with running(make_service(engine, letters())) as server:
        response = server.post(TEXT, model="tiny", prompt="abcd", stream=True)
        assert response.status_code == 200  # the stream had begun
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert [json.loads(e)["choices"][0]["text"] for e in events[:-1]] == ["a", "b"]
        assert json.loads(events[-1])["error"]["type"] == "server_error"
        assert "[DONE]" not in response.text
        assert server.post(TEXT, model="tiny", prompt="abcd").status_code == 503
        health = server.get("/health")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_dead")


def test_an_engine_that_refuses() -> None:
    engine = fake()
    engine.refuses = EngineError("out of memory", hint="lower max_running")
    with running(make_service(engine, letters())) as server:
        for stream in (False, True):
            response = server.post(TEXT, model="tiny", prompt="a", stream=stream)
            assert response.status_code == 503
            assert response.json()["error"]["message"] == "out of memory. Hint: lower max_running"


def test_what_is_not_ours_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    engine = fake()
    engine.refuses = ZeroDivisionError("a path, a key")  # type: ignore[assignment]
    with running(make_service(engine, letters())) as server:
        response = server.post(TEXT, model="tiny", prompt="a")
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the server failed with ZeroDivisionError"


def test_draining() -> None:
    """What runs may end, what comes is refused, and what does not end in time is told so."""
    engine = fake()
    engine.gate_at = 3
    engine.gate.clear()
    service = make_service(engine, letters())
    with running(service) as server:
        body = {"model": "tiny", "prompt": "abcdefgh", "stream": True}
        thread, whole = in_thread(lambda: server.client.post(TEXT, json={**body, "max_tokens": 6}))
        wait_for(lambda: len(engine.running) == 1)
        service.traffic.is_draining = True
        refused = httpx.post(server.url + TEXT, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert httpx.get(server.url + "/health").status_code == 503
        server.call(engine.gate.set)
        thread.join()
        assert whole[0].text.endswith("[DONE]\n\n")

        service.traffic.is_draining = False
        server.call(engine.gate.clear)
        thread, cut = in_thread(lambda: server.client.post(TEXT, json=body))
        wait_for(lambda: len(engine.running) == 1)
        server.call(service.streams.end_all, ApiError("the server is shutting down", status=503))
        thread.join()
        last = [line for line in cut[0].text.splitlines() if line][-1]
        assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
        wait_for(lambda: not engine.running)


def test_metrics() -> None:
    engine = fake()
    with running(make_service(engine, letters())) as server:
        began = time.monotonic()
        server.post(TEXT, model="tiny", prompt=["abc", "de"])
        took = time.monotonic() - began
        server.post(TEXT, model="tiny", prompt="abcdef", max_tokens=2)
        figures = read_metrics(server.get("/metrics").text)
    assert figures["blockscale_prompt_tokens_total"] == 3 + 2 + 6
    assert figures["blockscale_output_tokens_total"] == 4 + 3 + 2
    assert figures["blockscale_cached_prompt_tokens_total"] == 3
    assert figures["blockscale_time_to_first_token_seconds_count"] == 3
    assert figures["blockscale_inter_token_latency_seconds_count"] == 3 + 2 + 1
    assert 0 < figures["blockscale_time_to_first_token_seconds_sum"] < 2 * took + 1
    assert figures['blockscale_sequences_total{finish_reason="stop"}'] == 2
    assert figures['blockscale_sequences_total{finish_reason="length"}'] == 1
    assert figures['blockscale_http_requests_total{endpoint="/v1/completions",status="200"}'] == 2
    assert figures["blockscale_kv_usage_ratio"] == 0.25
    assert figures["blockscale_kv_kept_ratio"] == 0.25
