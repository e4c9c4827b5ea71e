"""OpenAI's client against a server over a real decoder with random weights. Needs the packages `openai`, `xgrammar`."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from blockscale.engine.engine import Engine
from blockscale.engine.options import EngineOptions
from tests.models.running import transformers_logits
from tests.server.running import TEMPLATE, Running, decoding

USER: list[Any] = [{"role": "user", "content": "hi"}]
PROMPT = "user:hi;assistant:"
SPACES = {str(ord(c)): -100 for c in " \t\n\r"}  # JSON may have any number of them, and a random model likes them
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 3, "maximum": 99}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def path(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def served(path: Path) -> Iterator[tuple[Running, Engine]]:
    options = EngineOptions(num_pages=40, max_running=4, max_step_tokens=24, max_context=192, num_draft=2)
    with decoding(path, options, template=TEMPLATE) as it:
        yield it


@pytest.fixture(scope="module")
def client(served: tuple[Running, Engine]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served[0].url}/v1", api_key="any", max_retries=0)


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    asked = {"model": "tiny", "messages": USER, "max_tokens": 12, "temperature": 0, **fields}
    return client.chat.completions.create(**asked)


def test_chat_is_what_transformers_writes(client: openai.OpenAI, path: Path) -> None:
    answer = chat(client, max_tokens=10, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    tokens = [entry.bytes[0] for entry in entries]
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 10)
    logprobs = transformers_logits(path, torch.tensor([*PROMPT.encode(), *tokens])).log_softmax(-1)
    for i, entry in enumerate(entries):
        row = logprobs[len(PROMPT) - 1 + i]
        assert int(row.argmax()) == tokens[i]
        assert entry.logprob == pytest.approx(float(row.max()), abs=1e-2)  # keys that round to the other bfloat16
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def test_choices_and_seeds(client: openai.OpenAI) -> None:
    fields = {"temperature": 2.0, "seed": 4, "n": 3}
    first = [c.message.content for c in chat(client, **fields).choices]
    assert len(set(first)) == 3
    assert [c.message.content for c in chat(client, **fields).choices] == first
    assert chat(client, **{**fields, "n": 1, "seed": 5}).choices[0].message.content == first[1]


def test_stop_and_bias(client: openai.OpenAI) -> None:
    text = chat(client).choices[0].message.content
    stopped = chat(client, stop=[text[4:6], "never"]).choices[0]
    assert stopped.message.content == text[: text.index(text[4:6])]
    assert stopped.finish_reason == "stop"
    assert chat(client, logit_bias={"90": 100}).choices[0].message.content == "Z" * 12
    assert text[0] not in chat(client, logit_bias={str(ord(text[0])): -100}).choices[0].message.content


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_schema_is_kept(client: openai.OpenAI, temperature: float) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    fields = {"response_format": schema, "max_tokens": 100, "logit_bias": SPACES, "temperature": temperature, "seed": 1}
    for choice in chat(client, **fields, n=4).choices:
        assert choice.finish_reason == "stop"
        found = json.loads(choice.message.content)
        assert found["colour"] in ("red", "green")
        assert 3 <= found["count"] <= 99
        assert found.keys() == {"colour", "count"}
    streamed = "".join(c.choices[0].delta.content or "" for c in chat(client, **fields, stream=True))
    assert streamed == chat(client, **fields).choices[0].message.content


def test_an_object_is_kept(client: openai.OpenAI) -> None:
    bias = {**SPACES, str(ord("}")): 100}
    choice = chat(client, response_format={"type": "json_object"}, logit_bias=bias).choices[0]
    assert (json.loads(choice.message.content), choice.finish_reason) == ({}, "stop")
    cut = chat(client, response_format={"type": "json_object"}, logit_bias=SPACES, max_tokens=3).choices[0]
    assert cut.message.content.startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "paint"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    answer = chat(client, tools=[TOOL], tool_choice=choice, max_tokens=100, logit_bias=SPACES, stream=stream)
    if stream:
        chunks = [c.choices[0] for c in answer]
        call = next(c.delta.tool_calls[0] for c in chunks if c.delta.tool_calls)
        assert chunks[-1].finish_reason == "tool_calls"
    else:
        (call,) = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "paint"
    assert json.loads(call.function.arguments)["colour"] in ("red", "green")


def test_regex_and_grammar(client: openai.OpenAI) -> None:
    text = chat(client, extra_body={"regex": "[A-C]{5}-[0-9]"}).choices[0].message.content
    assert len(text) == 7
    assert set(text[:5]) <= set("ABC")
    grammar = 'root ::= "yes" | "no"'
    assert chat(client, extra_body={"grammar": grammar}).choices[0].message.content in ("yes", "no")


@pytest.mark.parametrize(
    "structure",
    [
        {"regex": "(((a*)*)*)*b"},
        {"regex": "((a{1000}){1000}){1000}"},
        {"regex": "(a|b|ab|ba)*" * 50},
        {"grammar": 'root ::= "a"{1000000}'},
        {"grammar": 'root ::= root root | "a"'},
    ],
)
def test_structures_that_are_made_to_hang(served: tuple[Running, Engine], structure: dict[str, str]) -> None:
    server, _ = served
    response = server.post("/v1/completions", model="tiny", prompt="a", max_tokens=4, **structure)
    assert response.status_code in (200, 400)
    assert server.get("/health").status_code == 200


def test_a_structure_that_no_token_can_begin(served: tuple[Running, Engine]) -> None:
    response = served[0].post("/v1/completions", model="tiny", prompt="a", regex="\u00e9+")
    assert response.status_code == 400
    assert "begin with" in response.json()["error"]["message"]


def test_penalties_and_truncation_change_what_is_written(client: openai.OpenAI) -> None:
    plain = client.completions.create(model="tiny", prompt="abc", temperature=0, max_tokens=40).choices[0].text
    assert len(set(plain)) < len(plain)
    for fields in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"extra_body": {"repetition_penalty": 9.0}}):
        asked: Any = {"model": "tiny", "prompt": "abc", "temperature": 0, "max_tokens": 40, **fields}
        assert client.completions.create(**asked).choices[0].text != plain
    for fields in ({"top_p": 1e-6}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1.0}}):
        asked = {"model": "tiny", "prompt": "abc", "temperature": 2, "max_tokens": 40, **fields}
        assert client.completions.create(**asked).choices[0].text == plain


def test_logprobs_of_a_prompt_add_up(client: openai.OpenAI, path: Path) -> None:
    text = "score this, token by token"
    answer = client.completions.create(model="tiny", prompt=text, max_tokens=0, logprobs=1, echo=True)
    found = answer.choices[0].logprobs
    assert found
    assert found.token_logprobs
    expected = transformers_logits(path, torch.tensor(list(text.encode()))).log_softmax(-1)
    rows = [float(expected[i, ord(c)]) for i, c in enumerate(text[1:])]
    assert math.fsum(found.token_logprobs[1:]) == pytest.approx(math.fsum(rows), abs=1e-2 * len(rows))
    assert found.token_logprobs[1:] == pytest.approx(rows, abs=1e-2)
