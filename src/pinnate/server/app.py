"""create_app: the routes, the errors and the key check, put together.

Knows: paths. Must not know: what happens behind them. A route that generates is a GenerationEndpoint (endpoint.py)
around a Route, which is what differs between the APIs; the rest are methods of small classes. What a route takes and
gives is told to /openapi.json by operations.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route as HTTPRoute

from pinnate.server import chat, completions
from pinnate.server.anthropic.routes import anthropic_routes
from pinnate.server.auth import OPEN_PATHS, AdminOnly, KeyCheck
from pinnate.server.cache import CacheRoutes
from pinnate.server.cors import cors
from pinnate.server.endpoint import GenerationEndpoint, Route
from pinnate.server.errors import handlers
from pinnate.server.generate import GenerateEndpoint
from pinnate.server.no_data_dir import NoDataDir
from pinnate.server.observability import add_sources, listeners
from pinnate.server.observer import Observer
from pinnate.server.openapi import Document
from pinnate.server.operator import Operator
from pinnate.server.query import check_queries
from pinnate.server.replies import chat_completion, completion
from pinnate.server.responses.batch import batch_route
from pinnate.server.responses.routes import responses_routes
from pinnate.server.score import ScoreEndpoint
from pinnate.server.sglang import SGLangOperator
from pinnate.server.state import ServerState
from pinnate.server.streaming import ChatChunkWriter, CompletionChunkWriter

CHAT = Route(chat.prepare_own, ChatChunkWriter, chat_completion)
COMPLETIONS = Route(completions.prepare, CompletionChunkWriter, completion)

# What a line of a batch may ask for.
BATCH_ROUTES: Mapping[str, Route] = MappingProxyType(
    {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETIONS, "/v1/responses": batch_route()}
)


def create_app(state: ServerState) -> Starlette:
    """The ASGI application. `state.engine` may still be None: requests then get 503, and so does /health."""
    add_sources(state)
    routes = [*_openai(state), *responses_routes(state, state.responses), *anthropic_routes(state), *_sglang(state)]
    routes += [*_scores(state), *_operator(state), *_cache(state), *_batches(state)]
    routes.append(_document(state, routes))
    layers = _layers(state, routes)
    check_queries(routes, strict=state.settings.strict)
    app = Starlette(routes=routes, middleware=layers, exception_handlers=handlers())
    app.router.redirect_slashes = False  # another spelling of a path is another path: 404, not a redirect
    return app


def operator_route(path: str, endpoint: Callable[..., Any], methods: list[str]) -> HTTPRoute:
    """A route that needs the admin key, where there is one."""
    return HTTPRoute(path, endpoint, methods=methods, middleware=[Middleware(AdminOnly)])


def _layers(state: ServerState, routes: list[HTTPRoute]) -> list[Middleware]:
    """What is around the routes, from the outside in: CORS, the Observer, the key check. A page's preflight has no key
    and is answered in front of the check; it opens nothing, the request that follows is checked."""
    settings = state.settings
    paths = {route.endpoint: route.path for route in reversed(routes)}
    layers = [Middleware(Observer, routes=paths, listeners=listeners(state))]
    if settings.allowed_origins:
        layers.insert(0, cors(settings.allowed_origins))
    if settings.api_keys or settings.admin_api_keys:
        layers.append(Middleware(KeyCheck, api_keys=settings.api_keys, admin_keys=settings.admin_api_keys))
    return layers


def _document(state: ServerState, routes: list[HTTPRoute]) -> HTTPRoute:
    has_key = bool(state.settings.api_keys or state.settings.admin_api_keys)
    document = Document(routes, open_paths=OPEN_PATHS, has_key=has_key)
    return HTTPRoute("/openapi.json", document.get, methods=["GET"])


def _openai(state: ServerState) -> list[HTTPRoute]:
    operator = Operator(state)
    return [
        HTTPRoute("/v1/chat/completions", GenerationEndpoint(state, CHAT), methods=["POST"]),
        HTTPRoute("/v1/completions", GenerationEndpoint(state, COMPLETIONS), methods=["POST"]),
        HTTPRoute("/v1/models", operator.models, methods=["GET"]),
        HTTPRoute("/v1/models/{model:path}", operator.model, methods=["GET"]),
    ]


def _sglang(state: ServerState) -> list[HTTPRoute]:
    operator = SGLangOperator(state)
    return [
        HTTPRoute("/generate", GenerateEndpoint(state), methods=["POST", "PUT"]),
        HTTPRoute("/abort_request", operator.abort_request, methods=["POST"]),
        operator_route("/get_server_info", operator.server_info, ["GET"]),
        operator_route("/server_info", operator.server_info, ["GET"]),
        HTTPRoute("/model_info", operator.model_info, methods=["GET"]),
        HTTPRoute("/get_model_info", operator.model_info, methods=["GET"]),
        HTTPRoute("/health_generate", operator.health_generate, methods=["GET"]),
    ]


def _scores(state: ServerState) -> list[HTTPRoute]:
    endpoint = ScoreEndpoint(state)
    return [HTTPRoute(path, endpoint, methods=["POST"]) for path in ("/score", "/v1/score", "/generative_scoring")]


def _operator(state: ServerState) -> list[HTTPRoute]:
    operator = Operator(state)
    return [
        HTTPRoute("/health", operator.health, methods=["GET"]),
        HTTPRoute("/metrics", operator.metrics, methods=["GET"]),
        HTTPRoute("/version", operator.version, methods=["GET"]),
        HTTPRoute("/load", operator.load, methods=["GET"]),
        HTTPRoute("/ready", operator.health, methods=["GET"]),
        HTTPRoute("/ping", operator.health, methods=["GET", "POST"]),
        HTTPRoute("/tokenize", operator.tokenize, methods=["POST"]),
        HTTPRoute("/detokenize", operator.detokenize, methods=["POST"]),
        HTTPRoute("/tokenizer_info", operator.tokenizer_info, methods=["GET"]),
    ]


def _cache(state: ServerState) -> list[HTTPRoute]:
    operator, cache = Operator(state), CacheRoutes(state)
    return [
        operator_route("/flush_cache", operator.flush_cache, ["GET", "POST"]),
        operator_route("/pin_prefix", cache.pin, ["POST"]),
        operator_route("/unpin_prefix", cache.unpin, ["POST"]),
        operator_route("/resync_kv_events", cache.resync, ["POST"]),
        operator_route("/debug/cache", cache.describe, ["GET"]),
        operator_route("/debug/match", cache.explain, ["POST"]),
        operator_route("/debug/check_integrity", cache.check_integrity, ["POST"]),
    ]


def _batches(state: ServerState) -> list[HTTPRoute]:
    if state.batches is None:
        handlers: Any = NoDataDir()
    else:
        from pinnate.server.batches.routes import BatchRoutes  # SQLite and a form parser, for those who want them

        handlers = BatchRoutes(state, state.batches)
    return [
        HTTPRoute("/v1/files", handlers.upload, methods=["POST"]),
        HTTPRoute("/v1/files", handlers.list_files, methods=["GET"]),
        HTTPRoute("/v1/files/{file_id}", handlers.get_file, methods=["GET"]),
        HTTPRoute("/v1/files/{file_id}", handlers.delete_file, methods=["DELETE"]),
        HTTPRoute("/v1/files/{file_id}/content", handlers.content, methods=["GET"]),
        HTTPRoute("/v1/batches", handlers.create, methods=["POST"]),
        HTTPRoute("/v1/batches", handlers.list_batches, methods=["GET"]),
        HTTPRoute("/v1/batches/{batch_id}", handlers.get_batch, methods=["GET"]),
        HTTPRoute("/v1/batches/{batch_id}/cancel", handlers.cancel, methods=["POST"]),
    ]
