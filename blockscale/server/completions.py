"""/v1/completions: text that goes on from a prompt."""

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from blockscale.engine.sampling import Sampling
from blockscale.server.failure import unserved, wrong_value
from blockscale.server.generation import Chunk, generate, joined, usage
from blockscale.server.limits import tokens_to_ask
from blockscale.server.logprobs import CompletionLogprobs
from blockscale.server.protocol import CompletionRequest, sampling_of, texts_or_tokens
from blockscale.server.service import Service
from blockscale.server.stream import event_stream, server_event, until_gone

_DEFAULT_TOKENS = 16  # as in OpenAI's API


@dataclass(frozen=True)
class _Sequence:
    """One choice of the answer. `echo`: the prompt's text, "" where it is not asked for."""

    index: int
    prompt_ids: tuple[int, ...]
    echo: str
    sampling: Sampling
    shows_output: bool  # False: no new token was asked for, only the prompt's log-probabilities
    is_first_of_prompt: bool

    def logprobs(self, service: Service) -> CompletionLogprobs:
        logprobs = CompletionLogprobs(service.vocabulary, self.sampling.logprobs or 0)
        if self.sampling.prompt_logprobs is None:
            logprobs.skip(self.echo)
        return logprobs

    def choice(self, chunk: Chunk, logprobs: CompletionLogprobs | None, is_first: bool) -> dict[str, Any]:
        text = chunk.text if self.shows_output else ""
        first = self.prompt_ids[0] if is_first and self.sampling.prompt_logprobs is not None else None
        tokens = chunk.prompt_logprobs + (chunk.logprobs if self.shows_output else ())
        return {
            "index": self.index,
            "text": self.echo + text if is_first else text,
            "finish_reason": chunk.finish_reason,
            "logprobs": None if logprobs is None else logprobs.next(tokens, first),
        }


async def complete(service: Service, request: Request, body: CompletionRequest) -> Response:
    service.check_model(body.model)
    sequences = await _sequences(service, body)
    answer_id = f"cmpl-{uuid.uuid4().hex}"
    head = {"id": answer_id, "object": "text_completion", "created": int(time.time()), "model": service.name}
    with service.traffic.admitted(len(sequences)):
        if not body.stream:
            return JSONResponse(await until_gone(request, _whole(service, head, sequences, body.logprobs is not None)))
    return await event_stream(request, _events(service, head, sequences, body))


async def _sequences(service: Service, body: CompletionRequest) -> list[_Sequence]:
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise unserved("best_of", "no answers are generated that are not returned; ask for n and choose")
    if body.stream_options is not None and not body.stream:
        raise wrong_value("stream_options", "stream_options without stream")
    prompts = texts_or_tokens(body.prompt)
    if not prompts:
        raise wrong_value("prompt", "the prompt is empty")
    service.traffic.check_choices(len(prompts) * n)
    sequences: list[_Sequence] = []
    for prompt in prompts:
        ids, text = await _tokens(service, prompt, body.add_special_tokens, bool(body.echo))
        is_scoring = body.max_tokens == 0 and bool(body.echo)
        asked = 1 if is_scoring else _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        if body.max_tokens is None:  # the default gives way to the context, a wish is refused
            asked = min(asked, max(service.context - len(ids), 1))
        max_tokens = tokens_to_ask(asked, len(ids), service.context, service.limits, "max_tokens")
        sampling = sampling_of(
            body, max_tokens, logprobs=body.logprobs, prompt_logprobs=body.logprobs if body.echo else None
        )
        for k in range(n):
            own = sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + k)
            sequences.append(_Sequence(len(sequences), ids, text, own, not is_scoring, k == 0))
    return sequences


async def _tokens(
    service: Service, prompt: str | list[int], add_special: bool, is_echo: bool
) -> tuple[tuple[int, ...], str]:
    """(token ids, the prompt's text if it is to be echoed)."""
    if isinstance(prompt, str):
        ids = await service.with_tokenizer(lambda t: t(prompt, add_special_tokens=add_special)["input_ids"])
        return tuple(ids), prompt if is_echo else ""
    service.check_tokens("prompt", prompt)
    return tuple(prompt), service.text_of(prompt) if is_echo else ""


async def _whole(
    service: Service, head: dict[str, Any], sequences: list[_Sequence], with_logprobs: bool
) -> dict[str, Any]:
    chunks: list[list[Chunk]] = [[] for _ in sequences]
    async with aclosing(service.streams.interleave(_streams(service, head["id"], sequences))) as pieces:
        async for index, chunk in pieces:
            chunks[index].append(chunk)
    choices = []
    for sequence, parts in zip(sequences, chunks, strict=True):
        whole = joined(parts)
        logprobs = sequence.logprobs(service) if with_logprobs else None
        choices.append(sequence.choice(whole, logprobs, is_first=True))
    return {**head, "choices": choices, "usage": _usage(sequences, [joined(parts) for parts in chunks])}


async def _events(
    service: Service, head: dict[str, Any], sequences: list[_Sequence], body: CompletionRequest
) -> AsyncGenerator[str]:
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    extra: dict[str, Any] = {"usage": None} if with_usage else {}
    logprobs = [None if body.logprobs is None else sequence.logprobs(service) for sequence in sequences]
    seen: list[Chunk | None] = [None] * len(sequences)  # all that came of each, without text and log-probabilities
    with service.traffic.admitted(len(sequences)):
        async with aclosing(service.streams.interleave(_streams(service, head["id"], sequences))) as pieces:
            async for index, chunk in pieces:
                before = seen[index]
                choice = sequences[index].choice(chunk, logprobs[index], is_first=before is None)
                bare = replace(chunk, text="", logprobs=(), prompt_logprobs=())
                seen[index] = bare if before is None else joined([before, bare])
                yield server_event({**head, "choices": [choice], **extra})
        if with_usage:
            counted = _usage(sequences, [chunk for chunk in seen if chunk is not None])
            yield server_event({**head, "choices": [], "usage": counted})


def _streams(service: Service, answer_id: str, sequences: list[_Sequence]) -> list[AsyncGenerator[Chunk]]:
    return [generate(service, s.prompt_ids, s.sampling, f"{answer_id}-{s.index}") for s in sequences]


def _usage(sequences: list[_Sequence], wholes: list[Chunk]) -> dict[str, Any]:
    """A prompt counts once, however many sequences go on from it."""
    firsts = [(s, whole) for s, whole in zip(sequences, wholes, strict=True) if s.is_first_of_prompt]
    return usage(
        sum(len(s.prompt_ids) for s, _ in firsts),
        sum(len(whole.token_ids) for s, whole in zip(sequences, wholes, strict=True) if s.shows_output),
        sum(whole.num_cached for _, whole in firsts),
    )
