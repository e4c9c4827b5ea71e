"""OpenAI's own client against the server, with an engine whose answers are known. Needs the package `openai`."""

import json
from collections.abc import Iterator

import openai
import pytest

from blockscale.engine.vocabulary import read_vocabulary
from tests.server.fake_engine import FakeEngine
from tests.server.running import Running, letters, make_service, running

CALL = '<tool_call>{"name": "clock", "arguments": {"zone": "BRT"}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    tokenizer = letters()
    with running(make_service(FakeEngine(read_vocabulary(tokenizer)), tokenizer)) as it:
        yield it


@pytest.fixture
def engine(server: Running) -> FakeEngine:
    engine = server.service.engine
    assert isinstance(engine, FakeEngine)
    engine.answers = []
    engine.asked.clear()
    return engine


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def test_completion(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.completions.create(model="tiny", prompt="abc")
    assert answer.choices[0].text == "abc"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 4, 7)
    assert answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    assert engine.asked[0][1].max_tokens == 16
    assert engine.asked[0][1].temperature == 1


def test_completion_of_several_prompts(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.completions.create(model="tiny", prompt=["ab", "cd"], n=2, seed=5)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "ab"), (1, "ab"), (2, "cd"), (3, "cd")]
    assert [sampling.seed for _, sampling in engine.asked] == [5, 6, 5, 6]
    assert answer.usage
    assert answer.usage.prompt_tokens == 4


def test_completion_of_tokens(client: openai.OpenAI, engine: FakeEngine) -> None:
    assert client.completions.create(model="tiny", prompt=[104, 105]).choices[0].text == "hi"
    answer = client.completions.create(model="tiny", prompt=[[104], [105, 105]], echo=True)
    assert [c.text for c in answer.choices] == ["hh", "iiii"]


def test_streamed_completion(client: openai.OpenAI, engine: FakeEngine) -> None:
    options = {"include_usage": True}
    chunks = list(client.completions.create(model="tiny", prompt="abc", stream=True, stream_options=options, echo=True))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == "abcabc"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 4


def test_stop_and_length(client: openai.OpenAI, engine: FakeEngine) -> None:
    stopped = client.completions.create(model="tiny", prompt="one. two. three", stop=["two", "three"])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("one. ", "stop")
    cut = client.completions.create(model="tiny", prompt="abcdef", max_tokens=2)
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == ("ab", "length")


def test_scores_of_a_prompt(client: openai.OpenAI, engine: FakeEngine) -> None:
    """As lm-eval asks: nothing stands before the first token, and text and tokens agree."""
    answer = client.completions.create(model="tiny", prompt="abz", max_tokens=1, logprobs=1, echo=True)
    found = answer.choices[0].logprobs
    assert found
    assert found.tokens == ["a", "b", "z", "a"]
    assert found.text_offset == [0, 1, 2, 3]
    assert found.token_logprobs
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:] == pytest.approx([-0.6931] * 3, abs=1e-3)
    assert found.top_logprobs
    assert found.top_logprobs[0] is None
    assert list(found.top_logprobs[1]) == ["b"]  # of two likely ones, the one that was asked for
    alone = client.completions.create(model="tiny", prompt="abz", max_tokens=0, logprobs=2, echo=True)
    assert alone.choices[0].text == "abz"
    assert alone.choices[0].logprobs
    assert alone.choices[0].logprobs.tokens == ["a", "b", "z"]
    assert alone.usage
    assert alone.usage.completion_tokens == 0


def test_every_sampling_field_arrives(client: openai.OpenAI, engine: FakeEngine) -> None:
    client.completions.create(
        model="tiny",
        prompt="a",
        temperature=0.5,
        top_p=0.25,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={"65": -100},
        seed=7,
        extra_body={"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "stop_token_ids": [9]},
    )
    sampling = engine.asked[0][1]
    assert (sampling.temperature, sampling.top_p, sampling.frequency_penalty) == (0.5, 0.25, 0.5)
    assert (sampling.presence_penalty, sampling.logit_bias, sampling.seed) == (-0.5, ((65, -100.0),), 7)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (3, 0.1, 1.1)
    assert (sampling.min_tokens, sampling.stop_token_ids) == (1, (9,))


def test_chat(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answers = ["<think>hm</think>\n\nHello"]
    answer = client.chat.completions.create(model="tiny", messages=USER, logprobs=True, top_logprobs=2)
    message = answer.choices[0].message
    assert message.content == "Hello"
    assert message.model_extra == {"reasoning_content": "hm"}
    assert answer.choices[0].finish_reason == "stop"
    assert "".join(map(chr, engine.asked[0][0])) == "user:hi;assistant:"
    assert engine.asked[0][1].max_tokens == 200 - len("user:hi;assistant:")
    logprobs = answer.choices[0].logprobs
    assert logprobs
    assert logprobs.content
    assert logprobs.content[0].token == "<"
    assert logprobs.content[0].bytes == [ord("<")]
    assert [top.token for top in logprobs.content[0].top_logprobs] == ["<", "z"]


def test_streamed_chat(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answers = [f"<think>hm</think>Hello {CALL}", "Bye"]
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=USER,
            tools=[TOOL],
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    deltas = [(c.choices[0].index, c.choices[0].delta) for c in chunks if c.choices]
    assert "".join(d.content or "" for i, d in deltas if i == 0) == "Hello"
    assert "".join(d.content or "" for i, d in deltas if i == 1) == "Bye"
    assert "".join((d.model_extra or {}).get("reasoning_content", "") for _, d in deltas) == "hm"
    calls = [call for _, d in deltas for call in d.tool_calls or ()]
    assert [(c.index, c.function and c.function.name) for c in calls] == [(0, "clock")]
    reasons = {c.choices[0].index: c.choices[0].finish_reason for c in chunks if c.choices}
    assert reasons == {0: "tool_calls", 1: "stop"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == len(engine.answers[0]) + len("Bye") + 2


def test_tools_go_there_and_back(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answers = [CALL + CALL]
    answer = client.chat.completions.create(model="tiny", messages=USER, tools=[TOOL])
    message = answer.choices[0].message
    assert message.content is None
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls
    assert len({call.id for call in message.tool_calls}) == 2
    one = client.chat.completions.create(
        model="tiny",
        messages=USER,
        tools=[TOOL],
        parallel_tool_calls=False,
    )
    assert one.choices[0].message.tool_calls
    assert len(one.choices[0].message.tool_calls) == 1
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "12:00"}
    history = [*USER, message.model_dump(exclude_none=True), result]
    client.chat.completions.create(model="tiny", messages=history, tools=[TOOL])
    prompt = "".join(map(chr, engine.asked[-1][0]))
    assert prompt.startswith("T:clock;user:hi;assistant:<tool_call>")
    assert prompt.count('{"zone": "BRT"}') == 2
    assert prompt.endswith("tool:12:00;assistant:")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "clock"}}])
def test_a_call_can_be_forced(client: openai.OpenAI, engine: FakeEngine, choice: object) -> None:
    engine.answers = ['{"name": "clock", "arguments": {}}']
    answer = client.chat.completions.create(
        model="tiny",
        messages=USER,
        tools=[TOOL],
        tool_choice=choice,
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    schema = engine.asked[0][1].json_schema
    assert schema
    assert json.loads(schema)["properties"]["name"] == {"const": "clock"}


def test_no_tool_may_be_called(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answers = [CALL]
    answer = client.chat.completions.create(
        model="tiny",
        messages=USER,
        tools=[TOOL],
        tool_choice="none",
    )
    assert answer.choices[0].message.content == CALL


def test_response_formats(client: openai.OpenAI, engine: FakeEngine) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    engine.answers = ['{"x": 1}']
    client.chat.completions.create(
        model="tiny",
        messages=USER,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    assert json.loads(engine.asked[0][1].json_schema or "") == schema
    client.chat.completions.create(model="tiny", messages=USER, response_format={"type": "json_object"})
    assert engine.asked[1][1].json_object
    client.chat.completions.create(model="tiny", messages=USER, response_format={"type": "text"})
    assert not engine.asked[2][1].is_structured


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "other-name"]
    assert client.models.retrieve("other-name").id == "other-name"
    with pytest.raises(openai.NotFoundError, match="no model"):
        client.models.retrieve("gpt-4")


def test_embeddings_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="not trained to embed"):
        client.embeddings.create(model="tiny", input="text")


def test_tokens(server: Running) -> None:
    found = server.post("/tokenize", prompt="h\u00ed!").json()
    assert found == {"tokens": [104, 63, 33], "count": 3, "max_model_len": 200}
    found = server.post("/tokenize", messages=USER).json()
    assert server.post("/detokenize", tokens=found["tokens"]).json() == {"prompt": "user:hi;assistant:"}
    assert server.post("/detokenize", tokens=[128]).status_code == 400
    assert server.get("/tokenizer_info").json()["model_max_length"] == 200
