"""What the server takes on: size of a body, sequences at once, who may ask."""

import asyncio
import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request

from blockscale.server.failure import ApiError

_OPEN_PATHS = ("/health", "/")
_OPEN_FOLDERS = ("/page/",)


@dataclass(frozen=True)
class Limits:
    """max_body_bytes   of one request (413)
    max_sequences    running and waiting, all requests together; one prompt makes `n` (429)
    max_choices      sequences of one request (400)
    max_tokens       new tokens of one sequence; None: what the context leaves (400)
    max_inputs       texts of one request for embeddings (400)
    drain_seconds    for requests that are running when the server is told to end
    body_seconds     for a body to arrive (408)
    stuck_seconds    that one step of the engine may take before the server says that it is not well
    """

    max_body_bytes: int = 8 << 20
    max_sequences: int = 1024
    max_choices: int = 128
    max_tokens: int | None = None
    max_inputs: int = 2048
    drain_seconds: float = 60.0
    body_seconds: float = 60.0
    stuck_seconds: float = 600.0


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body, read no further than the limit. ApiError: 408 too slow, 413 too large, 415 not JSON by its type."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a page of another site cannot send this type unasked
        raise ApiError("the content type is not application/json", status=415, code="unsupported_media_type")
    too_large = ApiError(f"the body is larger than {limits.max_body_bytes} bytes", status=413, code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limits.max_body_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.max_body_bytes:
                    raise too_large
    except TimeoutError:
        message = f"the body did not arrive in {limits.body_seconds:g} seconds"
        raise ApiError(message, status=408, code="body_too_slow") from None
    except ClientDisconnect:
        raise ApiError("the client is gone", status=499, code="client_gone") from None
    return bytes(body)


def check_key(request: Request, api_key: str | None) -> None:
    """ApiError (401) unless the request carries the key, as `Authorization: Bearer KEY`. Without a key all may ask."""
    path = request.scope["path"]  # not `request.url`, which a Host that is none breaks
    if api_key is None or path in _OPEN_PATHS or path.startswith(_OPEN_FOLDERS):
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), api_key.encode()):
        raise ApiError("the API key is missing or wrong", status=401, code="invalid_api_key")


class Traffic:
    """Sequences that are being answered. It belongs to the event loop's thread.

    num_sequences  at this moment
    is_draining    nothing new is taken on
    """

    def __init__(self, limits: Limits) -> None:
        self.num_sequences = 0
        self.is_draining = False
        self._limits = limits

    def check_choices(self, num_sequences: int) -> None:
        """ApiError (400) for more sequences than one request may have; before anything is made for each of them."""
        if num_sequences > self._limits.max_choices:
            raise ApiError(
                f"{num_sequences} sequences are asked for at once",
                code="too_many_choices",
                hint=f"up to {self._limits.max_choices}: prompts x n",
            )

    @contextmanager
    def admitted(self, num_sequences: int) -> Iterator[None]:
        """For as long as a request is answered. ApiError: 503 while draining, 429 for too many sequences."""
        limits = self._limits
        if self.is_draining:
            raise ApiError("the server is shutting down", status=503, code="shutting_down")
        if self.num_sequences + num_sequences > limits.max_sequences:
            raise ApiError("the queue is full", status=429, code="queue_full", hint="try again later")
        self.num_sequences += num_sequences
        try:
            yield
        finally:
            self.num_sequences -= num_sequences


def tokens_to_ask(asked: int | None, prompt_tokens: int, context: int, limits: Limits, field: str) -> int:
    """New tokens for a prompt: what was asked for, or all that the context and the server leave.

    ApiError (400) for a prompt without tokens, one that fills the context, and for more than there is room for.
    """
    if prompt_tokens == 0:
        raise ApiError("the prompt has no tokens", param="prompt", code="empty_prompt")
    room = context - prompt_tokens
    if room < 1:
        raise ApiError(
            f"the prompt has {prompt_tokens} tokens, and the context holds {context}",
            code="context_length_exceeded",
            hint="shorten the prompt",
        )
    most = room if limits.max_tokens is None else min(room, limits.max_tokens)
    if asked is None:
        return most
    if asked < 1:
        raise ApiError(f"{field} is {asked}", param=field, code="invalid_value", hint="ask for 1 token or more")
    if asked > room:
        raise ApiError(
            f"the prompt has {prompt_tokens} tokens and {field} is {asked}: the context holds {context}",
            param=field,
            code="context_length_exceeded",
            hint=f"ask for up to {room}, or leave {field} out",
        )
    if asked > most:
        raise ApiError(f"{field} is {asked}: this server gives up to {most}", param=field, code="invalid_value")
    return asked
