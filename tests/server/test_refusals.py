"""Bad requests: the status, the field and the reason, in OpenAI's shape. Needs nothing."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from blockscale.engine.vocabulary import read_vocabulary
from blockscale.server.limits import Limits
from tests.server.fake_engine import FakeEngine
from tests.server.running import Running, letters, make_service, running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "clock"}}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    tokenizer = letters()
    limits = Limits(max_body_bytes=4000, max_choices=8, max_tokens=50)
    with running(make_service(FakeEngine(read_vocabulary(tokenizer)), tokenizer, limits=limits)) as it:
        yield it


def refused(response: httpx.Response, status: int, code: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if code is not None:
        assert error["code"] == code
    return dict(error)


# endpoint, fields besides the least that is needed, the field that is named, code
FIELDS: list[tuple[str, dict[str, Any], str | None, str]] = [
    (CHAT, {"temprature": 1}, "temprature", "unknown_parameter"),
    (CHAT, {"temperature": "1"}, "temperature", "invalid_value"),
    (CHAT, {"temperature": 2.5}, "temperature", "invalid_value"),
    (CHAT, {"temperature": True}, "temperature", "invalid_value"),
    (CHAT, {"top_p": 0}, None, "invalid_value"),
    (CHAT, {"presence_penalty": 3}, None, "invalid_value"),
    (CHAT, {"n": 0}, "n", "invalid_value"),
    (CHAT, {"n": 9}, None, "too_many_choices"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "invalid_value"),
    (CHAT, {"max_completion_tokens": -1}, "max_completion_tokens", "invalid_value"),
    (CHAT, {"max_completion_tokens": 51}, "max_completion_tokens", "invalid_value"),
    (CHAT, {"max_tokens": 400}, "max_tokens", "context_length_exceeded"),
    (CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
    (CHAT, {"audio": {"voice": "x"}}, "audio", "unsupported_parameter"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    (CHAT, {"store": True}, "store", "unsupported_parameter"),
    (CHAT, {"metadata": {"a": "b"}}, "metadata", "unsupported_parameter"),
    (CHAT, {"service_tier": "flex"}, "service_tier", "unsupported_parameter"),
    (CHAT, {"prediction": {"type": "content", "content": "x"}}, "prediction", "unsupported_parameter"),
    (CHAT, {"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
    (CHAT, {"verbosity": "low"}, "verbosity", "unsupported_parameter"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    (CHAT, {"function_call": "auto"}, "function_call", "unsupported_parameter"),
    (CHAT, {"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter"),
    (CHAT, {"chat_template_kwargs": {"colour": 1}}, "chat_template_kwargs", "invalid_value"),
    (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "invalid_value"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    (CHAT, {"tool_choice": "auto"}, "tool_choice", "invalid_value"),
    (CHAT, {"parallel_tool_calls": True}, "parallel_tool_calls", "invalid_value"),
    (CHAT, {"tools": [TOOL, TOOL]}, "tools", "invalid_value"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, None, "invalid_value"),
    (CHAT, {"tools": [TOOL], "response_format": {"type": "json_object"}}, "tools", "unsupported_parameter"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format", "invalid_value"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    (CHAT, {"response_format": {"type": "json_object"}, "regex": "a"}, None, "invalid_value"),
    (CHAT, {"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
    (CHAT, {"stop": [""]}, None, "invalid_value"),
    (CHAT, {"messages": []}, "messages", "invalid_value"),
    (CHAT, {"messages": "hi"}, "messages", "invalid_value"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "invalid_value"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content", "invalid_value"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id", "invalid_value"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": "Ana"}]}, "messages.0.name", "unsupported_parameter"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        "messages.0.content.0.type",
        "invalid_value",
    ),
    (TEXT, {"suffix": "end"}, "suffix", "unsupported_parameter"),
    (TEXT, {"best_of": 3}, "best_of", "unsupported_parameter"),
    (TEXT, {"prompt": ""}, "prompt", "empty_prompt"),
    (TEXT, {"prompt": []}, "prompt", "invalid_value"),
    (TEXT, {"prompt": [128]}, "prompt", "invalid_value"),
    (TEXT, {"prompt": [1, "a"]}, None, "invalid_value"),
    (TEXT, {"prompt": "a" * 200}, None, "context_length_exceeded"),
    (TEXT, {"prompt": ["a"] * 9}, None, "too_many_choices"),
    (TEXT, {"max_tokens": 0}, "max_tokens", "invalid_value"),
    (TEXT, {"min_tokens": 40, "max_tokens": 4}, None, "invalid_value"),
    (TEXT, {"logprobs": 30}, "logprobs", "invalid_value"),
    (TEXT, {"seed": 2**70}, None, "invalid_value"),
]


@pytest.mark.parametrize(("path", "fields", "param", "code"), FIELDS)
def test_fields(server: Running, path: str, fields: dict[str, Any], param: str | None, code: str) -> None:
    least: dict[str, Any] = {"model": "tiny"} | ({"messages": MESSAGES} if path == CHAT else {"prompt": "hi"})
    error = refused(server.post(path, **{**least, **fields}), 400, code)
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
    streamed = server.post(path, **{**least, "stream": True, **fields})
    if "stream_options" not in fields:  # a stream has them
        refused(streamed, 400, code)


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False},
        {"service_tier": "auto"},
        {"metadata": {}},
        {"modalities": ["text"]},
        {"audio": None},
        {"user": "ana", "safety_identifier": "x", "prompt_cache_key": "y"},
        {"temperature": None, "stop": None, "tools": None, "n": None},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_what_asks_for_nothing_is_taken(server: Running, fields: dict[str, Any]) -> None:
    response = server.post(CHAT, model="tiny", messages=MESSAGES, **fields)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[1]", "invalid_json"),
        (b'{"model": NaN}', "invalid_json"),
        (b"[" * 3000, "invalid_json"),
        (b'{"model": "\xff"}', "invalid_utf8"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "invalid_utf8"),
        (b"{}", "missing_required_parameter"),
    ],
)
def test_bodies(server: Running, body: bytes, code: str) -> None:
    json_type = {"content-type": "application/json"}
    refused(server.client.post(TEXT, content=body, headers=json_type), 400, code)


def test_a_body_of_another_type(server: Running) -> None:
    content = json.dumps({"model": "tiny", "prompt": "x"}).encode()
    refused(server.client.post(TEXT, content=content, headers={"content-type": "text/plain"}), 415)


def test_large_bodies(server: Running) -> None:
    refused(server.post(TEXT, model="tiny", prompt="x" * 5000), 413, "body_too_large")

    def endless() -> Iterator[bytes]:  # its length is not declared
        for _ in range(100):
            yield b" " * 1000

    json_type = {"content-type": "application/json"}
    refused(server.client.post(TEXT, content=endless(), headers=json_type), 413, "body_too_large")


def test_wrong_places(server: Running) -> None:
    assert refused(server.post(TEXT, model="gpt-4", prompt="x"), 404, "model_not_found")["param"] == "model"
    refused(server.post("/v1/images/generations", model="tiny"), 404)
    refused(server.get(TEXT), 405)
    counted = server.get("/metrics").text
    assert 'blockscale_http_requests_total{endpoint="/v1/completions",status="404"}' in counted
    assert 'blockscale_errors_total{code="model_not_found"}' in counted
    assert "/v1/images" not in counted  # a label that anybody can write would grow without end


def test_a_model_without_a_template(server: Running) -> None:
    tokenizer = letters(template=None)
    with running(make_service(FakeEngine(read_vocabulary(tokenizer)), tokenizer)) as bare:
        error = refused(bare.post(CHAT, model="tiny", messages=MESSAGES), 400, "no_chat_template")
        assert "/v1/completions" in error["message"]


def test_a_template_that_refuses_and_one_without_tools() -> None:
    tokenizer = letters("{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}x")
    with running(make_service(FakeEngine(read_vocabulary(tokenizer)), tokenizer)) as bare:
        error = refused(bare.post(CHAT, model="tiny", messages=[{"role": "system", "content": "x"}]), 400)
        assert "no system role" in error["message"]
        refused(bare.post(CHAT, model="tiny", messages=MESSAGES, tools=[TOOL]), 400, "unsupported_parameter")
