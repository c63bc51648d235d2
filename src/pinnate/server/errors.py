"""The one place where errors become HTTP: statuses, the error object, and its two carriers (answer, SSE event).

Knows: the exception tree, statuses, the two shapes: OpenAI's `{"error": {message, type, param, code}}`, and on the
paths of Anthropic's API `{"type": "error", "error": {type, message}, "request_id"}`. Must not know: routes.

| error | status | code |
|---|---|---|
| InvalidRequestError | 400 (404, 405, 413, 415 where the HTTP layer says so) | `invalid_request` or its own |
| UnsupportedError | 400 | `unsupported` |
| ContextLengthError | 400 | `context_length_exceeded` |
| NotFoundError | 404 | `model_not_found`, `not_found` |
| QueueFullError | 429 with Retry-After | `queue_full` |
| TimeLimitError | 503 with Retry-After, 504 | `queue_timeout`, `request_timeout` |
| NotReadyError, EngineDeadError | 503 with Retry-After | `starting`, `shutting_down`, `engine_dead` |
| StorageError | 500, 507 | `storage_error`, `storage_damaged`; `storage_full` |
| GrammarError | 400 | `structured_output_failed` |
| EngineError, anything else | 500 | `engine_error`, `internal_error` |

429 says: this server is well and its queue is full, come again. 503 says: it cannot serve this now, try another one.
`Retry-After` is in whole seconds, 1 to MAX_RETRY_AFTER: what the error itself says, else 1. Anthropic's clients know
"overloaded" as status 529, so a full queue is that on their paths.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from pinnate.core.errors import (
    EngineDeadError,
    EngineError,
    GrammarError,
    NotFoundError,
    PinnateError,
    QueueFullError,
    RequestError,
)

MAX_RETRY_AFTER = 120
ANTHROPIC_PATH = "/v1/messages"
MODELS_PATH = "/v1/models"
ANTHROPIC_VERSION = b"anthropic-version"  # a header of all requests of Anthropic's clients
OVERLOADED = 529

_logger = logging.getLogger("pinnate.server")


class ErrorObject(msgspec.Struct, frozen=True):
    """OpenAI's error. All four keys are always there."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorObject


class AnthropicError(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True, tag="error"):
    error: AnthropicError
    request_id: str | None


class HTTPStatusError(RequestError):
    """A refusal whose status is more exact than 400: 401, 405, 413, 415."""

    def __init__(self, status: int, message: str, *, code: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message, code=code)
        self.status = status
        self.headers = headers


class TimeLimitError(PinnateError):
    """The request has waited or run for as long as it may. `code`: `queue_timeout`, `request_timeout`."""

    def __init__(self, message: str, *, code: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after


class NotReadyError(PinnateError):
    """The server cannot take requests now: it starts, or shuts down. `code` says which."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class StorageError(PinnateError):
    """The data directory cannot be used. `code`: `storage_full`, `storage_damaged`, `storage_error`."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


def describe(error: Exception) -> tuple[int, ErrorObject]:
    """Status and error object of `error`. What is not ours is reported without its text: it may name private things."""
    if isinstance(error, HTTPStatusError):
        return error.status, ErrorObject(error.message, "invalid_request_error", error.param, error.code)
    if isinstance(error, QueueFullError):
        return 429, ErrorObject(error.message, "rate_limit_error", error.param, error.code)
    if isinstance(error, RequestError):
        status = 404 if isinstance(error, NotFoundError) else 400
        return status, ErrorObject(error.message, "invalid_request_error", error.param, error.code)
    if isinstance(error, TimeLimitError):
        status = 503 if error.code == "queue_timeout" else 504
        return status, ErrorObject(str(error), "timeout_error", None, error.code)
    if isinstance(error, NotReadyError):
        return 503, ErrorObject(str(error), "service_unavailable_error", None, error.code)
    if isinstance(error, EngineDeadError):
        return 503, ErrorObject(str(error), "service_unavailable_error", None, "engine_dead")
    if isinstance(error, StorageError):
        return 507 if error.code == "storage_full" else 500, ErrorObject(str(error), "server_error", None, error.code)
    if isinstance(error, GrammarError):
        return 400, ErrorObject(str(error), "invalid_request_error", None, "structured_output_failed")
    if isinstance(error, EngineError):
        return 500, ErrorObject(str(error), "server_error", None, "engine_error")
    return 500, ErrorObject("internal error, see the server's log", "server_error", None, "internal_error")


def headers_of(error: Exception) -> dict[str, str]:
    """Headers of the answer that `describe` is the rest of."""
    if isinstance(error, HTTPStatusError):
        return dict(error.headers or {})
    if describe(error)[0] not in (429, 503):
        return {}
    seconds: float = getattr(error, "retry_after", 1.0)
    return {"Retry-After": str(min(max(1, math.ceil(seconds)), MAX_RETRY_AFTER))}


def error_bytes(error: ErrorObject) -> bytes:
    """The error object as JSON: the body of an answer, or the data of an SSE event."""
    return msgspec.json.encode(ErrorBody(error))


def error_response(
    status: int, error: ErrorObject, headers: Mapping[str, str] | None = None, *, scope: Scope | None = None
) -> Response:
    """The answer to the request of `scope`, in the form that clients of its path read; without one in OpenAI's."""
    merged = dict(headers or {})
    if status == 503 or error.code == QueueFullError.code:
        merged.setdefault("Retry-After", "1")
    if scope is None or not from_anthropic(scope):
        return Response(error_bytes(error), status, merged, media_type="application/json")
    record = _record(scope)
    request_id = None if record is None else record.request_id
    if error.code == QueueFullError.code:
        status = OVERLOADED
    body = anthropic_error_bytes(error, status, request_id)
    return Response(body, status, merged, media_type="application/json")


def speaks_anthropic(path: str) -> bool:
    return path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")


def from_anthropic(scope: Scope) -> bool:
    """Whether a request is one of Anthropic's API. Paths that OpenAI's has too are told apart by a header."""
    path = scope["path"]
    if path == MODELS_PATH or path.startswith(MODELS_PATH + "/"):
        return any(name == ANTHROPIC_VERSION for name, _ in scope.get("headers", ()))
    return speaks_anthropic(path)


def anthropic_error_bytes(error: ErrorObject, status: int | None = None, request_id: str | None = None) -> bytes:
    """`status` None: an error in a stream, whose kind is told by the error's own."""
    if status is None:
        refused = error.type == "invalid_request_error"
        status = 400 if refused else OVERLOADED if error.code == QueueFullError.code else 500
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode(AnthropicErrorBody(AnthropicError(kind, error.message), request_id))


_ANTHROPIC_TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        504: "timeout_error",
        OVERLOADED: "overloaded_error",
    }
)


async def on_pinnate_error(request: Request, error: Exception) -> Response:
    """Every error of our own tree, raised before the first byte of an answer."""
    status, described = describe(error)
    if status >= 500 and status not in (503, 504):
        _logger.error("%s %s: %s", request.method, quote(request.url.path), error)
    _note(request, described)
    return error_response(status, described, headers_of(error), scope=request.scope)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """What the router itself refuses: no such route, or not this method."""
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    known: dict[int, tuple[str, str]] = {
        404: (f"no such route: {method} {path}", "not_found"),
        405: (f"{method} is not allowed on {path}", "method_not_allowed"),
    }
    message, code = known.get(error.status_code, (error.detail, "invalid_request"))
    described = ErrorObject(message, "invalid_request_error", None, code)
    _note(request, described)
    return error_response(error.status_code, described, error.headers, scope=request.scope)


def _note(request: Request, error: ErrorObject) -> None:
    record = _record(request.scope)
    if record is not None:
        record.error_code = error.code


def _record(scope: Scope) -> Any:
    """The RequestRecord, whose module knows of this one; None where nobody keeps any."""
    return scope.get("state", {}).get("record")


def handlers() -> dict[Any, Any]:
    """What Starlette calls for which exception. Anything else is a fault of ours, which the Observer answers."""
    return {PinnateError: on_pinnate_error, HTTPException: on_http_exception}
