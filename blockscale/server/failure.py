"""What goes wrong, in the shape that OpenAI's clients read: `{"error": {"message", "type", "param", "code"}}`."""

import json
from typing import Any

from blockscale.errors import BlockscaleError, BusyError, MissingDependencyError, UsageError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "server_error",
    503: "server_error",
}


class ApiError(BlockscaleError):
    """A request that gets no answer. `status` is the HTTP status, `param` the field at fault, `code` a word for it."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None, hint: str = ""
    ) -> None:
        super().__init__(message, hint)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        message = f"{self}. Hint: {self.hint}" if self.hint else str(self)
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        if self.status in (429, 503):
            return {"Retry-After": "1"}
        if self.status == 408:  # what is left of the body would be read as the next request
            return {"Connection": "close"}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}

    def event(self) -> str:
        """As a server-sent event, for a stream that has begun and cannot change its status any more."""
        return f"data: {json.dumps(self.body(), ensure_ascii=False)}\n\n"


def api_error(error: Exception) -> ApiError:
    """Any exception as an answer. What is not the project's own says its type alone: it may hold what is not public."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UsageError):
        return ApiError(str(error), hint=error.hint, code="invalid_value")
    if isinstance(error, BusyError):
        return ApiError(str(error), status=429, hint=error.hint, code="queue_full")
    if isinstance(error, MissingDependencyError):
        return ApiError(str(error), status=501, hint=error.hint, code="not_installed")
    if isinstance(error, BlockscaleError):
        return ApiError(str(error), status=503, hint=error.hint, code="engine_error")
    return ApiError(f"the server failed with {type(error).__name__}", status=500, code="internal_error")


def unserved(field: str, why: str) -> ApiError:
    """A field that the API knows and this server does not serve."""
    return ApiError(f"'{field}' is not served: {why}", param=field, code="unsupported_parameter")


def wrong_value(field: str, message: str, hint: str = "") -> ApiError:
    return ApiError(message, param=field, code="invalid_value", hint=hint)
