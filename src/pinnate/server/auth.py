"""Who calls: the key check in front of every route, known or not, and the mark of routes that need the admin key.

Knows: keys, which one path is open. Must not know: what the routes do. The check is by exact path and default
refusal, so that a new route, a doubled slash or another spelling of a path is never open by accident. That a route is
for the operator is said by the route itself (`AdminOnly`), after routing, for the same reason.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from pinnate.server.errors import HTTPStatusError, describe, error_response, from_anthropic

OPEN_PATHS = frozenset({"/health"})  # liveness alone; it says nothing but ready or not
_NAMESPACE_LABEL = b"pinnate namespace\0"
_CHALLENGE = {"WWW-Authenticate": "Bearer"}


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose key came with a request. `namespace`: a short digest of the key, the same in every run, to keep what one
    key stored apart from another's; empty where no key was needed."""

    namespace: str = ""
    is_admin: bool = True


EVERYONE = Caller()
_NOBODY = Caller(is_admin=False)


def caller_of(scope: Scope) -> Caller:
    """The caller of this HTTP request. Without any key set everybody is the operator."""
    caller: Caller = scope.get("state", {}).get("caller", EVERYONE)
    return caller


def require_admin(scope: Scope) -> None:
    """For a route, or a part of one, that is the operator's.

    Raises:
        HTTPStatusError: 401 without a key, 403 with one that is not an admin key.
    """
    caller = caller_of(scope)
    if caller.is_admin:
        return
    if not caller.namespace:
        raise HTTPStatusError(401, "this route needs the admin key", code="admin_key_required", headers=_CHALLENGE)
    raise HTTPStatusError(403, "this route needs the admin key, not an API key", code="admin_key_required")


class AdminOnly:
    """ASGI layer around one route: only the operator passes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        require_admin(scope)
        await self._app(scope, receive, send)


class KeyCheck:
    """Lets a request pass with `Authorization: Bearer KEY` (`x-api-key: KEY` too of Anthropic's API); anything else
    gets 401 before its body is read. An admin key passes everywhere. With admin keys alone, other routes are open."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], admin_keys: Sequence[str] = ()) -> None:
        self._app = app
        self._is_open = not api_keys
        known = [(key, True) for key in admin_keys] + [(key, not admin_keys) for key in api_keys]
        # Digests have one length, so compare_digest does not tell the keys' length either.
        self._callers = [(_digest(key.encode()), Caller(namespace(key), is_admin)) for key, is_admin in known]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        caller = self._find(_tokens(scope))
        if caller is None and (self._is_open or _is_open_path(scope)):
            caller = _NOBODY
        if caller is None:
            error = HTTPStatusError(401, "a valid key is needed: Authorization: Bearer KEY", code="invalid_api_key")
            response = error_response(*describe(error), _CHALLENGE, scope=scope)
            await response(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)

    def _find(self, tokens: Iterable[bytes]) -> Caller | None:
        """Compares with every key, whether one has matched or not: the time tells nothing."""
        found = None
        for token in tokens:
            digest = _digest(token)
            for known, caller in self._callers:
                if hmac.compare_digest(digest, known) and found is None:
                    found = caller
        return found


def namespace(key: str) -> str:
    """16 hexadecimal digits."""
    return _digest(_NAMESPACE_LABEL + key.encode()).hex()[:16]


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _is_open_path(scope: Scope) -> bool:
    return scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD")


def _tokens(scope: Scope) -> list[bytes]:
    """What may be a key. A header given twice counts as none."""
    tokens = []
    scheme, _, token = _only_header(scope, b"authorization").partition(b" ")
    if scheme.lower() == b"bearer":
        tokens.append(token.strip())
    if from_anthropic(scope):  # Anthropic's clients send their key in a header of their own
        tokens.append(_only_header(scope, b"x-api-key").strip())
    return tokens


def _only_header(scope: Scope, name: bytes) -> bytes:
    values = [value for key, value in scope["headers"] if key == name]
    return values[0] if len(values) == 1 else b""
