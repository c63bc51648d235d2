"""Observer: the ASGI layer around all routes and the key check that sees every request begin and end.

Knows: the request's record, its id in and out, who is told at the end. Must not know: what routes do. For a stream it
costs one plain call per write.

Each answer carries `X-Request-Id`: the client's own if it gave a valid one, else the id of the object in the answer,
else a new one. What goes wrong in ways nobody foresaw ends here, with a 500; the log gets its place and type, and its
text at no level, since that may quote a request.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pinnate.core.logs import log_fault
from pinnate.server.auth import caller_of
from pinnate.server.body import Disconnected
from pinnate.server.errors import describe, error_response, from_anthropic
from pinnate.server.request_ids import ANTHROPIC_HEADER, HEADER
from pinnate.server.request_record import RequestRecord

CLIENT_LEFT = 499  # in logs and metrics: the client was gone before an answer began; nginx's number for it

_logger = logging.getLogger("pinnate.server")

Listener = Callable[[RequestRecord], None]


class AnswerCutOffError(Exception):
    """A fault after the beginning of an answer, which is in the log under this request's id."""


class Observer:
    """`routes` maps endpoints to the patterns of their paths, for versions of Starlette whose router does not tell the
    route. `listeners` get each record once, when its request has ended."""

    def __init__(self, app: ASGIApp, routes: Mapping[Any, str], listeners: Sequence[Listener]) -> None:
        self._app = app
        self._routes = routes
        self._listeners = tuple(listeners)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord.begin(scope)
        scope.setdefault("state", {})["record"] = record

        def watch(message: Message) -> Awaitable[None]:
            begins = message["type"] == "http.response.start"
            return send(_start(message, record, from_anthropic(scope)) if begins else message)

        try:
            await self._app(scope, receive, watch)
        except Disconnected:
            pass  # in the middle of its body: there is nobody to answer
        except Exception as error:
            where = record.route or quote(record.path)
            log_fault(_logger, f"{quote(record.method)} {where}, request {record.request_id}", error)
            if record.status:
                # In the middle of an answer: the connection is cut, so that it does not look complete. The HTTP server
                # logs what it catches, so it gets nothing that could quote a request.
                raise AnswerCutOffError(record.request_id) from None
            status, described = describe(error)
            record.error_code = described.code
            await error_response(status, described, scope=scope)(scope, receive, watch)
        finally:
            record.status = record.status or CLIENT_LEFT
            record.route = getattr(scope.get("route"), "path", None) or self._routes.get(scope.get("endpoint"))
            record.caller = caller_of(scope)
            for listener in self._listeners:
                listener(record)


def _start(message: Message, record: RequestRecord, anthropic: bool) -> Message:
    """The beginning of the answer, with the request's id."""
    record.status = message["status"]
    headers = []
    for name, value in message["headers"]:
        if name.lower() == ANTHROPIC_HEADER:
            continue
        if name.lower() != HEADER:
            headers.append((name, value))
        elif not record.has_given_id:
            record.request_id = value.decode("latin-1")
    headers.append((HEADER, record.request_id.encode("latin-1")))
    if anthropic:
        headers.append((ANTHROPIC_HEADER, record.request_id.encode("latin-1")))
    return {**message, "headers": headers}
