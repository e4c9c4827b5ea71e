"""Every field of OpenAI's API, as its own client's types list them, is served or refused by name. Needs `openai`."""

import json
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import chat_completion_tool_choice_option_param
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import BaseModel
from typing_extensions import get_type_hints, is_typeddict

from blockscale.engine.vocabulary import read_vocabulary
from blockscale.models.pooling import Embedding, Pooling
from blockscale.server import protocol
from tests.server.fake_engine import FakeEngine
from tests.server.running import Running, letters, make_service, running

CHAT, TEXT, VECTOR = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
USER = {"role": "user", "content": "hi"}
FUNCTION = {"name": "f"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": [USER]},
    TEXT: {"model": "tiny", "prompt": "hi"},
    VECTOR: {"model": "tiny", "input": "hi"},
}
KINDS: dict[str, tuple[type[BaseModel], tuple[type, ...]]] = {
    CHAT: (
        protocol.ChatRequest,
        (chat_create_params.CompletionCreateParamsNonStreaming, chat_create_params.CompletionCreateParamsStreaming),
    ),
    TEXT: (
        protocol.CompletionRequest,
        (
            completion_create_params.CompletionCreateParamsNonStreaming,
            completion_create_params.CompletionCreateParamsStreaming,
        ),
    ),
    VECTOR: (protocol.EmbeddingRequest, (embedding_create_params.EmbeddingCreateParams,)),
}
# A value that each served field is taken with, and what else it needs
SERVED: dict[str, dict[str, Any]] = {
    "frequency_penalty": {"frequency_penalty": 0.5},
    "presence_penalty": {"presence_penalty": -0.5},
    "logit_bias": {"logit_bias": {"5": 1}},
    "max_tokens": {"max_tokens": 4},
    "max_completion_tokens": {"max_completion_tokens": 4},
    "n": {"n": 2},
    "seed": {"seed": 3},
    "stop": {"stop": ["x"]},
    "stream": {"stream": True},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "temperature": {"temperature": 0.5},
    "top_p": {"top_p": 0.5},
    "user": {"user": "ana"},
    "safety_identifier": {"safety_identifier": "x"},
    "prompt_cache_key": {"prompt_cache_key": "y"},
    "response_format": {"response_format": {"type": "json_object"}},
    "tools": {"tools": [{"type": "function", "function": FUNCTION}]},
    "tool_choice": {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
    "parallel_tool_calls": {"tools": [{"type": "function", "function": FUNCTION}], "parallel_tool_calls": False},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "reasoning_effort": {"reasoning_effort": "low"},
    "best_of": {"best_of": 1},
    "echo": {"echo": True},
    "dimensions": {"dimensions": 4},
    "encoding_format": {"encoding_format": "float"},
}
LOGPROBS = {CHAT: {"logprobs": True}, TEXT: {"logprobs": 2}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    tokenizer = letters("{% for m in messages %}{{ m.content }}{% endfor %}{{ reasoning_effort }}<tool_call>")
    engine = FakeEngine(read_vocabulary(tokenizer), answers=["{}"])
    with running(make_service(engine, tokenizer, embedding=Embedding(Pooling.LAST, 8, False))) as it:
        yield it


def fields_of(path: str) -> set[str]:
    return {name for kind in KINDS[path][1] for name in get_type_hints(kind)}


@pytest.mark.parametrize(("path", "name"), [(path, name) for path in KINDS for name in sorted(fields_of(path))])
def test_a_field_is_served_or_refused(server: Running, path: str, name: str) -> None:
    if name in LEAST[path]:
        return
    served = KINDS[path][0].model_fields
    if name in served:
        fields = LOGPROBS[path] if name == "logprobs" else SERVED[name]
        if path == VECTOR:  # what it answers is tested over a decoder; here, that it is read
            protocol.parse(protocol.EmbeddingRequest, json.dumps({**LEAST[path], **fields}).encode())
            return
        response = server.post(path, **{**LEAST[path], **fields})
        assert response.status_code == 200, response.text
        wrong = server.post(path, **{**LEAST[path], **fields, name: {"no": "value"}})
        assert wrong.status_code == 400
        assert name in wrong.json()["error"]["message"]
        return
    response = server.post(path, **{**LEAST[path], name: {"some": "value"}})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert server.post(path, **{**LEAST[path], name: None}).status_code == 200


def typed_dicts(kind: Any) -> list[Any]:
    """The TypedDicts of a union, of any depth; lists and iterables count as what they hold."""
    if is_typeddict(kind):
        return [kind]
    is_open = get_origin(kind) in (Union, UnionType) or getattr(get_origin(kind), "__name__", "") in (
        "Iterable",
        "list",
        "Required",
        "SequenceNotStr",
    )
    return [one for part in get_args(kind) for one in typed_dicts(part)] if is_open else []


def hint(kind: Any, name: str) -> Any:
    return get_type_hints(kind)[name]


MESSAGES = {kind.__name__: kind for kind in typed_dicts(hint(KINDS[CHAT][1][0], "messages"))}
LEAST_OF_ROLE: dict[str, dict[str, Any]] = {
    "assistant": {"content": "x"},
    "tool": {"content": "x", "tool_call_id": "c"},
    "function": {"content": "x", "name": "f"},
}
VALUES: dict[str, Any] = {"name": "Ana", "tool_calls": [CALL], "refusal": "no", "audio": {"id": "x"}}
VALUES |= {"function_call": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, found in MESSAGES.items() for name in sorted(get_type_hints(found))]
)
def test_fields_of_messages(server: Running, kind: str, name: str) -> None:
    """Each changes the prompt or is refused where it stands."""
    (role,) = get_args(hint(MESSAGES[kind], "role")) or [""]
    role = get_args(role)[0] if get_args(role) else role
    message = {"role": role, "content": "x", **LEAST_OF_ROLE.get(role, {})}
    engine = server.service.engine
    assert isinstance(engine, FakeEngine)
    if role == "function":
        refused(server.post(CHAT, model="tiny", messages=[message]), "messages.0.role")
        return
    assert server.post(CHAT, model="tiny", messages=[message]).status_code == 200
    if name in message:
        return
    response = server.post(CHAT, model="tiny", messages=[{**message, name: VALUES[name]}])
    if name == "tool_calls":  # this template shows none, but a model's does
        assert response.status_code == 200, response.text
    else:
        refused(response, f"messages.0.{name}")


def refused(response: Any, where: str) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].startswith(where), error
    assert where in error["message"]


PARTS = {p.__name__: p for kind in MESSAGES.values() for p in typed_dicts(hint(kind, "content"))}


@pytest.mark.parametrize("kind", sorted(PARTS))
def test_parts_of_messages(server: Running, kind: str) -> None:
    part = dict.fromkeys(get_type_hints(PARTS[kind]), "x")
    part["type"] = get_args(hint(PARTS[kind], "type"))[0]
    part["type"] = get_args(part["type"])[0] if get_args(part["type"]) else part["type"]
    assert part["type"] in ("text", "image_url", "input_audio", "file", "refusal")
    refused(server.post(CHAT, model="tiny", messages=[{"role": "user", "content": [part]}]), "messages.0.content.0")
    if part["type"] == "text":
        text = {"type": "text", "text": part["text"]}
        assert server.post(CHAT, model="tiny", messages=[{"role": "user", "content": [text]}]).status_code == 200


NESTED: list[tuple[str, dict[str, Any], str]] = [
    ("stream_options", {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
    ("tools", {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0"),
    ("tool_choice", {"tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice"),
    (
        "tool_choice",
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        "tool_choice",
    ),
    ("response_format", {"response_format": {"type": "grammar", "grammar": "x"}}, "response_format.type"),
]


@pytest.mark.parametrize(("field", "fields", "where"), NESTED)
def test_fields_inside_fields(server: Running, field: str, fields: Mapping[str, Any], where: str) -> None:
    tools = {"tools": [{"type": "function", "function": FUNCTION}]}
    response = server.post(CHAT, **{**LEAST[CHAT], **tools, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(where)


def test_all_kinds_of_nested_fields_are_known() -> None:
    """A kind that OpenAI adds makes this fail, so that somebody decides what to do with it."""
    assert {kind.removesuffix("MessageParam").removeprefix("ChatCompletion") for kind in MESSAGES} == {
        "Developer",
        "System",
        "User",
        "Assistant",
        "Tool",
        "Function",
    }
    assert len(PARTS) == 5
    choices = typed_dicts(chat_completion_tool_choice_option_param.ChatCompletionToolChoiceOptionParam)
    assert {kind.__name__ for kind in choices} == {
        "ChatCompletionAllowedToolChoiceParam",
        "ChatCompletionNamedToolChoiceParam",
        "ChatCompletionNamedToolChoiceCustomParam",
    }
    tools = typed_dicts(hint(KINDS[CHAT][1][0], "tools"))
    assert {kind.__name__ for kind in tools} == {"ChatCompletionFunctionToolParam", "ChatCompletionCustomToolParam"}
    (function,) = [k for k in tools if k.__name__ == "ChatCompletionFunctionToolParam"]
    assert set(get_type_hints(hint(function, "function"))) == set(protocol.Function.model_fields)
    formats = typed_dicts(hint(KINDS[CHAT][1][0], "response_format"))
    assert {kind.__name__ for kind in formats} == {
        "ResponseFormatText",
        "ResponseFormatJSONSchema",
        "ResponseFormatJSONObject",
    }
    (of_schema,) = [k for k in formats if k.__name__ == "ResponseFormatJSONSchema"]
    schema = set(get_type_hints(hint(of_schema, "json_schema")))
    assert schema == {field.alias or name for name, field in protocol.JsonSchema.model_fields.items()}
    options = typed_dicts(hint(KINDS[CHAT][1][0], "stream_options"))
    assert set(get_type_hints(options[0])) == set(protocol.StreamOptions.model_fields)
