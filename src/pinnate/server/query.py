"""Parameters of a query: those that a route does not know get a warning, or a 400 where the server is strict.

Knows: which parameters each route has (`operations.py`). Must not know: what they mean. An answer need not be an object
that has room for warnings, so they are in its header `X-Warnings`, and in the log.
"""

from __future__ import annotations

from urllib.parse import parse_qsl, quote

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pinnate.server.body import FieldNotes, log_warnings

HEADER = b"x-warnings"
MAX_NAME = 64


class KnownQuery:
    """ASGI layer around one route."""

    def __init__(self, app: ASGIApp, path: str, *, strict: bool) -> None:
        self._app = app
        self._path = path
        self._strict = strict

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["query_string"]:
            send = self._checked(scope, send)
        await self._app(scope, receive, send)

    def _checked(self, scope: Scope, send: Send) -> Send:
        """
        Raises:
            InvalidRequestError: strict, or far too many.
        """
        from pinnate.server.operations import operations  # the types of all routes: only for who sends a query

        operation = operations().get(f"{scope['method']} {self._path}")
        known = frozenset() if operation is None else operation.query.keys()
        notes = FieldNotes(strict=self._strict)
        for name in dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)):
            if name.removesuffix("[]") not in known:
                notes.unknown(quote(name[:MAX_NAME]))
        if not notes.warnings:
            return send
        log_warnings(self._path, notes.warnings)
        text = ", ".join(warning.message for warning in notes.warnings).encode("latin-1")

        async def warn(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (HEADER, text)]}
            await send(message)

        return warn


def check_queries(routes: list[Route], *, strict: bool) -> None:
    """Puts the layer around each of `routes`."""
    for route in routes:
        route.app = KnownQuery(route.app, route.path, strict=strict)
