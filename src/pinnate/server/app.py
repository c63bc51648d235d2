"""create_app: the routes, the errors and the key check, put together.

Knows: paths. Must not know: what happens behind them.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route as HTTPRoute

from pinnate.server import chat, completions
from pinnate.server.auth import KeyCheck
from pinnate.server.cache import CacheRoutes
from pinnate.server.endpoint import GenerationEndpoint, Route
from pinnate.server.errors import handlers
from pinnate.server.operator import Operator
from pinnate.server.replies import chat_completion, completion
from pinnate.server.state import ServerState
from pinnate.server.streaming import ChatChunkWriter, CompletionChunkWriter

CHAT = Route(chat.prepare, ChatChunkWriter, chat_completion)
COMPLETIONS = Route(completions.prepare, CompletionChunkWriter, completion)


def create_app(state: ServerState) -> Starlette:
    """The ASGI application. `state.engine` may still be None: requests then get 503, and so does /health."""
    routes = [*_openai(state), *_operator(state), *_cache(state)]
    middleware = [] if state.settings.api_key is None else [Middleware(KeyCheck, api_key=state.settings.api_key)]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers())
    app.router.redirect_slashes = False  # another spelling of a path is another path: 404, not a redirect
    return app


def _openai(state: ServerState) -> list[HTTPRoute]:
    operator = Operator(state)
    return [
        HTTPRoute("/v1/chat/completions", GenerationEndpoint(state, CHAT), methods=["POST"]),
        HTTPRoute("/v1/completions", GenerationEndpoint(state, COMPLETIONS), methods=["POST"]),
        HTTPRoute("/v1/models", operator.models, methods=["GET"]),
        HTTPRoute("/v1/models/{model:path}", operator.model, methods=["GET"]),
    ]


def _operator(state: ServerState) -> list[HTTPRoute]:
    operator = Operator(state)
    return [
        HTTPRoute("/health", operator.health, methods=["GET"]),
        HTTPRoute("/metrics", operator.metrics, methods=["GET"]),
        HTTPRoute("/version", operator.version, methods=["GET"]),
        HTTPRoute("/server_info", operator.server_info, methods=["GET"]),
        HTTPRoute("/tokenize", operator.tokenize, methods=["POST"]),
        HTTPRoute("/detokenize", operator.detokenize, methods=["POST"]),
    ]


def _cache(state: ServerState) -> list[HTTPRoute]:
    operator, cache = Operator(state), CacheRoutes(state)
    return [
        HTTPRoute("/flush_cache", operator.flush_cache, methods=["POST"]),
        HTTPRoute("/pin_prefix", cache.pin, methods=["POST"]),
        HTTPRoute("/unpin_prefix", cache.unpin, methods=["POST"]),
        HTTPRoute("/resync_kv_events", cache.resync, methods=["POST"]),
        HTTPRoute("/debug/cache", cache.describe, methods=["GET"]),
        HTTPRoute("/debug/match", cache.explain, methods=["POST"]),
    ]
