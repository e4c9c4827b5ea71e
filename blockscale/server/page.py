"""The web page at `/`, and `/info`, which it reads: a chat, what the model is, and how the server is doing."""

import asyncio
from hashlib import blake2b
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from blockscale.errors import BlockscaleError
from blockscale.server.facts import ModelFacts
from blockscale.server.service import Service

# Path -> (file, media type)
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/page/stream.js": ("stream.js", "text/javascript; charset=utf-8"),
    "/page/style.css": ("style.css", "text/css; charset=utf-8"),
}
# The page runs its own script and asks its own server, whatever a model writes
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # kept, and asked for again: a new version is seen at once
}
_STATS_S = 1.0  # a long step may keep the engine busy


def page_router(service: Service, facts: ModelFacts | None = None) -> APIRouter:
    """`/`, its files below `/page/`, and `/info`. Without `facts` the page shows the model's name alone."""
    router = APIRouter()
    for path, (name, media_type) in FILES.items():
        router.add_api_route(path, _file(name, media_type), methods=["GET", "HEAD"])

    @router.get("/info")
    async def info() -> Response:
        return JSONResponse(await _info(service, facts), headers={"Cache-Control": "no-store"})

    return router


def _file(name: str, media_type: str) -> Any:
    content = files("blockscale.server").joinpath("page", name).read_bytes()
    headers = {**_HEADERS, "ETag": f'"{blake2b(content, digest_size=16).hexdigest()}"'}

    async def answer(request: Request) -> Response:
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return answer


async def _info(service: Service, facts: ModelFacts | None) -> dict[str, Any]:
    return {
        "model": service.name,
        "context": service.context,
        "has_chat": bool(service.form.template),
        "facts": None if facts is None else facts.to_dict(),
        "is_draining": service.traffic.is_draining,
        "is_alive": service.engine.is_alive,
        "now": await _now(service),
    }


async def _now(service: Service) -> dict[str, Any] | None:
    """The engine's figures; None where it does not answer in time, or any more.

    output_tokens, aborted, failed, finished  since the start
    """
    try:
        stats = await asyncio.wait_for(service.stats(), _STATS_S)
    except (TimeoutError, BlockscaleError):
        return None
    pages = stats.pages
    return {
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "page_size": stats.page_size,
        "pages": pages.free + pages.kept + pages.held,
        "pages_held": pages.held,
        "pages_kept": pages.kept,
        "output_tokens": stats.num_output_tokens,
        "prompt_tokens": stats.num_prompt_tokens,
        "cached_tokens": stats.num_cached_tokens,
        "finished": stats.num_finished,
        "failed": stats.num_failed,
        "aborted": stats.num_aborted,
        "preempted": stats.num_preempted,
    }
