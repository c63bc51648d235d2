"""SGLang's routes for operators: server and model facts, a health check that generates, abort by id.

Knows: what SGLang's users find in each. Must not know: how requests are generated.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import pinnate
from pinnate.core.errors import EngineError, InvalidRequestError
from pinnate.core.sampling import SamplingParams
from pinnate.server.auth import require_admin
from pinnate.server.body import convert, read_json
from pinnate.server.operator import json_response
from pinnate.server.protocol.generate import AbortRequest
from pinnate.server.state import ServerState

HEALTH_SECONDS = 20.0  # SGLang's limit for one token


class SGLangOperator:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def server_info(self, request: Request) -> Response:  # noqa: ARG002
        """What the engine chose at its start and why, the server's own settings but the keys, and the main ones under
        SGLang's names."""
        engine, state = self._state.ready_engine(), self._state
        info = engine.info
        theirs = {
            **self._model(),
            "served_model_name": state.model_names[0],
            "context_length": engine.max_model_len,
            "page_size": info.get("page_size"),
            "max_running_requests": info.get("max_num_seqs"),
            "max_total_num_tokens": info.get("num_pages", 0) * info.get("page_size", 0),
            "internal_states": [msgspec.to_builtins(engine.stats)],
        }
        server = state.settings.public()
        return json_response({"version": pinnate.__version__, "engine": info, "server": server, **theirs})

    async def model_info(self, request: Request) -> Response:  # noqa: ARG002
        self._state.ready_engine()
        return json_response({**self._model(), "is_generation": True, "preferred_sampling_params": None})

    async def abort_request(self, request: Request) -> Response:
        """Ends what runs under `rid`, or everything; its answers end with `abort`. An id that is not known is no error:
        it may have ended just now. `abort_all` needs the admin key, where there is one."""
        state = self._state
        state.ready_engine()
        notes = state.field_notes()
        asked = convert(await read_json(request, state.settings.max_body_bytes), AbortRequest, notes=notes)
        if not (asked.rid or asked.abort_all):
            raise InvalidRequestError("one of rid and abort_all is needed", param="rid")
        if asked.abort_all:
            require_admin(request.scope)
        ended = state.running.abort(None if asked.abort_all else asked.rid)
        return json_response({"aborted": ended} | notes.members("/abort_request"))

    async def health_generate(self, request: Request) -> Response:  # noqa: ARG002
        """200 once a token has been generated; an engine that takes too long for it raises 500.

        Raises:
            EngineError: no token in HEALTH_SECONDS.
        """
        engine = self._state.ready_engine()
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                async for _ in await engine.submit([0], params, request_id=f"health-{uuid.uuid4().hex}"):
                    pass
        except TimeoutError:
            raise EngineError(f"the engine has generated no token for {HEALTH_SECONDS:.0f} s") from None
        return json_response({"status": "ok"})

    def _model(self) -> dict[str, Any]:
        path = self._state.model_path
        return {"model_path": path, "tokenizer_path": path}
