"""The routes under /v1/messages.

Knows: HTTP of this API. Must not know: fields, events, how a job runs. `anthropic-version` and `anthropic-beta` are
accepted and make no difference: fields are known or not known by their names.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as HTTPRoute

from pinnate.server.anthropic.request import RENAMES, count_tokens, prepare
from pinnate.server.anthropic.writer import MessageWriter, fail, message
from pinnate.server.body import read_json
from pinnate.server.endpoint import GenerationEndpoint, Route
from pinnate.server.state import ServerState

MESSAGES = Route(prepare, MessageWriter, message, fail, RENAMES)


def anthropic_routes(state: ServerState) -> list[HTTPRoute]:
    return [
        HTTPRoute("/v1/messages", GenerationEndpoint(state, MESSAGES), methods=["POST"]),
        HTTPRoute("/v1/messages/count_tokens", CountTokens(state).post, methods=["POST"]),
    ]


class CountTokens:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def post(self, request: Request) -> Response:
        engine = self._state.ready_engine()
        fields = await read_json(request, self._state.settings.max_body_bytes)
        counted = await count_tokens(self._state, engine, fields)
        return Response(msgspec.json.encode(counted), media_type="application/json")
