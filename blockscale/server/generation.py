"""From the engine's events to chunks of an answer: the only file here that knows what an event holds."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from blockscale.engine.request import Event, FinishReason, TokenLogprob
from blockscale.engine.sampling import Sampling
from blockscale.errors import BlockscaleError
from blockscale.server.failure import ApiError
from blockscale.server.service import Service


@dataclass(frozen=True)
class Chunk:
    """What came at once.

    prompt_logprobs  of the prompt's tokens but the first, in a sequence's first chunk
    finish_reason    "stop" or "length", in the last
    num_cached       tokens of the prompt that were found in the prefix cache, in the last
    vector           of the prompt, where it was to be pooled
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    num_cached: int = 0
    vector: tuple[float, ...] | None = None


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """All chunks of a sequence as one."""
    return Chunk(
        "".join(chunk.text for chunk in chunks),
        tuple(token for chunk in chunks for token in chunk.token_ids),
        tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        tuple(logprob for chunk in chunks for logprob in chunk.prompt_logprobs),
        chunks[-1].finish_reason,
        sum(chunk.num_cached for chunk in chunks),
    )


def usage(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


async def generate(
    service: Service, prompt_ids: Sequence[int], sampling: Sampling, request_id: str
) -> AsyncGenerator[Chunk]:
    """One sequence. Closing it takes the request out of the engine. ApiError (503) where the engine fails."""
    metrics = service.metrics
    began = last = time.monotonic()
    num_output, reason = 0, "aborted"
    metrics.prompt_tokens.inc(len(prompt_ids))
    try:
        async with aclosing(service.engine.submit(prompt_ids, sampling, request_id)) as events:
            async for event in events:
                chunk = chunk_of(event)
                now = time.monotonic()
                if chunk.token_ids:
                    if num_output == 0:
                        metrics.first_token_s.observe(now - began)
                    else:
                        for _ in chunk.token_ids:
                            metrics.between_tokens_s.observe((now - last) / len(chunk.token_ids))
                    metrics.count_output(len(chunk.token_ids))
                    num_output += len(chunk.token_ids)
                    last = now
                if chunk.finish_reason is not None:
                    reason = chunk.finish_reason
                    metrics.cached_tokens.inc(chunk.num_cached)
                    metrics.sequence_s.observe(now - began)
                yield chunk
        if reason == "aborted":
            raise ApiError("the engine ended the request", status=503, code="aborted", hint="try again")
    except BlockscaleError:
        reason = "error"
        raise
    finally:
        metrics.sequences.labels(finish_reason=reason).inc()


def chunk_of(event: Event) -> Chunk:
    """ApiError or the engine's own error for an event that ends a request without an answer."""
    reason = event.finish_reason
    if reason is FinishReason.ERROR:
        raise event.error or ApiError("the engine failed", status=503, code="engine_error")
    if reason is FinishReason.ABORT:
        raise ApiError("the engine ended the request", status=503, code="aborted", hint="try again")
    return Chunk(
        event.text,
        event.token_ids,
        event.logprobs,
        event.prompt_logprobs,
        None if reason is None else reason.value,
        0 if event.usage is None else event.usage.cached_tokens,
        event.vector,
    )
