"""The endpoints, as one ASGI application."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blockscale.errors import BlockscaleError
from blockscale.server.chat import chat
from blockscale.server.completions import complete
from blockscale.server.conversation import render_messages
from blockscale.server.embeddings import embed
from blockscale.server.failure import ApiError, api_error, wrong_value
from blockscale.server.limits import check_key, read_body
from blockscale.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
    parse,
)
from blockscale.server.service import Service

logger = logging.getLogger("blockscale.server")
Lifespan = Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]


def make_app(service: Service, routers: Sequence[APIRouter] = (), lifespan: Lifespan | None = None) -> FastAPI:
    """The application. `routers` are further endpoints, such as those of the page."""
    # Bodies are read by hand, within limits; a page that describes them would describe little
    app = FastAPI(title="blockscale", openapi_url=None, redirect_slashes=False, lifespan=lifespan)
    app.add_middleware(_Gate, service=service)
    for kind in (BlockscaleError, HTTPException, Exception):
        app.add_exception_handler(kind, lambda _, error: _on_error(service, error))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = parse(ChatRequest, await read_body(request, service.limits))
        _log(request, body.user or body.safety_identifier)
        return await chat(service, request, body)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = parse(CompletionRequest, await read_body(request, service.limits))
        _log(request, body.user or body.safety_identifier)
        return await complete(service, request, body)

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        body = parse(EmbeddingRequest, await read_body(request, service.limits))
        _log(request, body.user)
        return await embed(service, request, body)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(service, name) for name in service.names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(_model(service, name))

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await _tokenize(service, parse(TokenizeRequest, await read_body(request, service.limits)))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await _detokenize(service, parse(DetokenizeRequest, await read_body(request, service.limits)))

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        t = service.tokenizer
        names = ("bos_token", "eos_token", "pad_token", "chat_template")
        return JSONResponse({**{name: getattr(t, name, None) for name in names}, "model_max_length": service.context})

    @app.get("/health")
    async def health() -> Response:
        if not service.engine.is_alive:
            raise ApiError("the engine is not running", status=503, code="engine_dead", hint="restart the server")
        if service.traffic.is_draining:
            raise ApiError("the server is shutting down", status=503, code="shutting_down")
        if service.engine.busy_s > service.limits.stuck_seconds:
            message = "the engine is stuck in one step"
            raise ApiError(message, status=503, code="engine_stuck", hint="restart the server")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        await service.ask_figures()
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    for router in routers:
        app.include_router(router)
    return app


class _Gate:
    """Around the application: asks for the key, and counts answers by endpoint and status."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500  # of what ends before it has one

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            check_key(Request(scope), self._service.api_key)
            await self._app(scope, receive, sent)
        except ApiError as error:  # of the key: the application answers its own
            await _on_error(self._service, error)(scope, receive, sent)
        finally:
            path = getattr(scope.get("route"), "path", "other")  # not the path itself: it may hold anything
            self._service.metrics.requests.labels(endpoint=path, status=status).inc()


def _on_error(service: Service, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # the router's own: no such path, no such method
        error = ApiError(str(error.detail), status=error.status_code, code="no_such_endpoint")
    answer = api_error(error)
    service.metrics.errors.labels(code=answer.code or "unknown").inc()
    if answer.status >= 500:
        logger.error("%s: %s", type(error).__name__, error)
    return JSONResponse(answer.body(), answer.status, answer.headers())


def _model(service: Service, name: str) -> dict[str, Any]:
    facts = {"id": name, "object": "model", "created": service.created, "owned_by": "blockscale"}
    return {**facts, "max_model_len": service.context}


async def _tokenize(service: Service, body: TokenizeRequest) -> Response:
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise wrong_value("prompt", "give one of prompt and messages")
    if body.messages is not None:
        rendered = await render_messages(service, body.messages, add_generation_prompt=body.add_generation_prompt)
        tokens = list(rendered.ids)
    else:
        text, special = body.prompt, body.add_special_tokens
        tokens = await service.with_tokenizer(lambda t: list(t(text, add_special_tokens=special)["input_ids"]))
    return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": service.context})


async def _detokenize(service: Service, body: DetokenizeRequest) -> Response:
    service.check_model(body.model)
    service.check_tokens("tokens", body.tokens)
    special = service.vocabulary.special if body.skip_special_tokens else frozenset()
    return JSONResponse({"prompt": service.text_of([token for token in body.tokens if token not in special])})


def _log(request: Request, user: str | None) -> None:
    host = request.client.host if request.client else "?"
    logger.info("%s from %s, user %r", request.scope["path"], host, user)
