"""The key check: an ASGI layer in front of every route, known or not.

Knows: the key, which one path is open. Must not know: what the routes do. The check is by exact path and default
refusal, so that a new route, a doubled slash or another spelling of a path is never open by accident.
"""

from __future__ import annotations

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from pinnate.server.errors import HTTPStatusError, describe, error_response

OPEN_PATHS = frozenset({"/health"})  # liveness alone; it says nothing but ready or not


class KeyCheck:
    """Lets a request pass with `Authorization: Bearer KEY`; anything else gets 401 before its body is read."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        # Digests have one length, so compare_digest does not tell the key's length either.
        self._digest = hashlib.sha256(api_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope) or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        error = HTTPStatusError(401, "a valid key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        status, described = describe(error)
        response = error_response(status, described, {"WWW-Authenticate": "Bearer"}, path=scope["path"])
        await response(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD")

    def _has_key(self, scope: Scope) -> bool:
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, token = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
        digest = hashlib.sha256(token.strip()).digest()
        return hmac.compare_digest(digest, self._digest) and scheme.lower() == b"bearer"
