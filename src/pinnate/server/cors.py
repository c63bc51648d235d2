"""CORS: which web pages may call this server from a browser.

Knows: origins, Starlette's middleware. Must not know: routes. Keys travel in headers, never in cookies, so credentials
are not allowed: a page of any origin can use only a key that it has been given.
"""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

METHODS = ("GET", "POST", "DELETE")
EXPOSED = ("X-Request-Id", "Retry-After")
MAX_AGE_SECONDS = 600


def cors(origins: tuple[str, ...]) -> Middleware:
    return Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=METHODS,
        allow_headers=("*",),  # clients send headers of their own (x-stainless-*, anthropic-version)
        expose_headers=EXPOSED,
        max_age=MAX_AGE_SECONDS,
    )
