"""/v1/chat/completions: the assistant's next turn, through the model's chat template."""

import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from blockscale.engine.request import TokenLogprob
from blockscale.engine.sampling import Sampling
from blockscale.server import harmony
from blockscale.server.answer import AnswerReader, ChannelReader, Piece, Thought, answer_reader
from blockscale.server.conversation import Rendered, render
from blockscale.server.failure import unserved, wrong_value
from blockscale.server.generation import Chunk, generate, usage
from blockscale.server.limits import tokens_to_ask
from blockscale.server.logprobs import chat_logprobs
from blockscale.server.protocol import ChatRequest, ChosenTool, Function, sampling_of
from blockscale.server.service import Service
from blockscale.server.stream import event_stream, server_event, until_gone
from blockscale.server.tools import Call, call_schema


@dataclass
class _Choice:
    """One answer as it grows."""

    reader: AnswerReader | ChannelReader
    max_calls: int | None
    end_texts: Mapping[int, str]  # of special tokens, where those leave text
    num_calls: int = 0
    num_tokens: int = 0
    num_cached: int = 0
    finish_reason: str | None = None
    pieces: list[Piece] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def push(self, chunk: Chunk) -> list[Piece]:
        self.num_tokens += len(chunk.token_ids)
        self.num_cached += chunk.num_cached
        text = chunk.text
        if chunk.finish_reason == "stop" and chunk.token_ids:  # the token that ended the turn is no part of it
            text = text.removesuffix(self.end_texts.get(chunk.token_ids[-1], ""))
        pieces = self.reader.push(text)
        if chunk.finish_reason is not None:
            pieces = pieces + self.reader.finish()
        kept = []
        for piece in pieces:
            if isinstance(piece, Call):
                if self.num_calls == self.max_calls:
                    continue
                self.num_calls += 1
            kept.append(piece)
        if chunk.finish_reason is not None:
            was_whole = chunk.finish_reason == "stop" and self.num_calls
            self.finish_reason = "tool_calls" if was_whole else chunk.finish_reason
        return kept


@dataclass(frozen=True)
class _Asked:
    """A request, read. `offered` are the tools that may be called; `forced`: one of them must be."""

    rendered: Rendered
    sampling: Sampling
    offered: tuple[Function, ...]
    is_forced: bool
    n: int
    num_top: int | None  # likeliest tokens to show; None: no log-probabilities
    max_calls: int | None

    def choices(self, service: Service) -> list[_Choice]:
        vocabulary, shows_special = service.vocabulary, not self.sampling.skip_special_tokens
        special = vocabulary.special if shows_special else frozenset[int]()
        ends = {token: vocabulary.piece(token).decode("utf-8", "replace") for token in special}
        return [_Choice(self._reader(service), self.max_calls, ends) for _ in range(self.n)]

    def _reader(self, service: Service) -> AnswerReader | ChannelReader:
        return answer_reader(
            service.form,
            self.rendered.text,
            [function.name for function in self.offered],
            is_forced=self.is_forced,
            is_structured=self.sampling.is_structured,
        )


async def chat(service: Service, request: Request, body: ChatRequest) -> Response:
    service.check_model(body.model)
    service.traffic.check_choices(body.n or 1)
    asked = await _read(service, body)
    answer_id = f"chatcmpl-{uuid.uuid4().hex}"
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    head = {"id": answer_id, "object": kind, "created": int(time.time()), "model": service.name}
    if body.stream:
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        return await event_stream(request, _events(service, head, asked, with_usage))
    with service.traffic.admitted(asked.n):
        return JSONResponse(await until_gone(request, _whole(service, head, asked)))


async def _read(service: Service, body: ChatRequest) -> _Asked:
    if body.stream_options is not None and not body.stream:
        raise wrong_value("stream_options", "stream_options without stream")
    if body.top_logprobs is not None and not body.logprobs:
        raise wrong_value("top_logprobs", "top_logprobs without logprobs")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise wrong_value("max_tokens", "max_tokens and max_completion_tokens differ", hint="give one of them")
    offered, is_forced = _offered(service, body)
    structure = _structure(body, offered if is_forced else ())
    is_structured = bool(structure) or body.regex is not None or body.grammar is not None
    if is_structured and offered and not is_forced:
        raise unserved("tools", "an output of a given structure leaves no room for calls; use one of the two")
    rendered = await render(service, body, [] if is_forced and service.form.calls is None else offered, is_structured)
    if is_structured and service.form.is_harmony:
        rendered = await rendered.followed_by(service, harmony.FINAL)
    field_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    max_tokens = tokens_to_ask(wanted, len(rendered.ids), service.context, service.limits, field_name)
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    sampling = sampling_of(body, max_tokens, logprobs=num_top, **structure)
    if any(service.is_special(marker) for marker in service.form.markers(bool(offered))) and not is_structured:
        sampling = replace(sampling, skip_special_tokens=False)
    max_calls = 1 if body.parallel_tool_calls is False else None
    return _Asked(rendered, sampling, tuple(offered), is_forced, body.n or 1, num_top, max_calls)


def _offered(service: Service, body: ChatRequest) -> tuple[list[Function], bool]:
    """(the tools that may be called, whether one must be)."""
    functions = [tool.function for tool in body.tools or ()]
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise wrong_value("tools", "two tools have the same name")
    choice = body.tool_choice
    if body.parallel_tool_calls is not None and not functions:
        raise wrong_value("parallel_tool_calls", "parallel_tool_calls without tools")
    if choice is not None and choice != "none" and not functions:
        raise wrong_value("tool_choice", "tool_choice without tools")
    if isinstance(choice, ChosenTool):
        chosen = [function for function in functions if function.name == choice.function.name]
        if not chosen:
            raise wrong_value("tool_choice", f"there is no tool '{choice.function.name}'")
        return chosen, True
    if choice == "required":
        return functions, True
    if choice == "none" or not functions:
        return [], False
    if service.form.calls is None and not service.form.is_harmony:
        raise unserved("tools", "the model's chat template teaches no form of calls that is read here")
    if any(function.strict for function in functions):
        raise unserved("tools", "strict arguments need tool_choice 'required' or a named function")
    return functions, False


def _structure(body: ChatRequest, forced: list[Function] | tuple[()]) -> dict[str, Any]:
    """The sampler's field for the structure that is asked for."""
    wanted = body.response_format
    if wanted is not None and wanted.type == "text":
        wanted = None
    if forced:
        if wanted is not None:
            raise unserved("response_format", "a forced call has a structure of its own")
        return {"json_schema": call_schema([function.model_dump() for function in forced])}
    if wanted is None:
        return {}
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise wrong_value("response_format", "response_format.json_schema has no schema")
    return {"json_schema": json.dumps(wanted.json_schema.schema_)}


def _streams(service: Service, answer_id: str, asked: _Asked) -> list[AsyncGenerator[Chunk]]:
    seed = asked.sampling.seed
    samplings = [asked.sampling if seed is None else replace(asked.sampling, seed=seed + k) for k in range(asked.n)]
    return [generate(service, asked.rendered.ids, s, f"{answer_id}-{k}") for k, s in enumerate(samplings)]


def _usage(asked: _Asked, choices: list[_Choice]) -> dict[str, Any]:
    return usage(len(asked.rendered.ids), sum(c.num_tokens for c in choices), choices[0].num_cached)


async def _whole(service: Service, head: dict[str, Any], asked: _Asked) -> dict[str, Any]:
    choices = asked.choices(service)
    async with aclosing(service.streams.interleave(_streams(service, head["id"], asked))) as chunks:
        async for index, chunk in chunks:
            choices[index].pieces += choices[index].push(chunk)
            choices[index].logprobs += chunk.logprobs
    shown = [
        {
            "index": index,
            "message": _message(choice.pieces),
            "finish_reason": choice.finish_reason,
            "logprobs": _shown_logprobs(service, choice.logprobs, asked.num_top),
        }
        for index, choice in enumerate(choices)
    ]
    return {**head, "choices": shown, "usage": _usage(asked, choices)}


def _shown_logprobs(service: Service, logprobs: Any, num_top: int | None) -> dict[str, Any] | None:
    return None if num_top is None else chat_logprobs(service.vocabulary, logprobs, num_top)


def _message(pieces: list[Piece]) -> dict[str, Any]:
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    calls = [piece for piece in pieces if isinstance(piece, Call)]
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


async def _events(service: Service, head: dict[str, Any], asked: _Asked, with_usage: bool) -> AsyncGenerator[str]:
    extra: dict[str, Any] = {"usage": None} if with_usage else {}
    choices = asked.choices(service)
    has_begun = [False] * asked.n

    def event(index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return server_event({**head, "choices": [choice], **extra})

    with service.traffic.admitted(asked.n):
        async with aclosing(service.streams.interleave(_streams(service, head["id"], asked))) as chunks:
            async for index, chunk in chunks:
                if not has_begun[index]:
                    has_begun[index] = True
                    yield event(index, {"role": "assistant", "content": ""})
                choice = choices[index]
                num_calls = choice.num_calls
                deltas = [_delta(piece) for piece in choice.push(chunk)]
                for delta in deltas:
                    if "tool_calls" in delta:
                        delta["tool_calls"][0]["index"] = num_calls
                        num_calls += 1
                logprobs = _shown_logprobs(service, chunk.logprobs, asked.num_top)
                if not deltas and logprobs and chunk.logprobs:
                    deltas = [{}]
                for i, delta in enumerate(deltas):
                    yield event(index, delta, logprobs if i == 0 else None)
                if choice.finish_reason is not None:
                    yield event(index, {}, None, choice.finish_reason)
        if with_usage:
            yield server_event({**head, "choices": [], "usage": _usage(asked, choices)})


def _delta(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, Thought):
        return {"reasoning_content": piece.text}
    return {"tool_calls": [_call(piece)]} if isinstance(piece, Call) else {"content": piece}
