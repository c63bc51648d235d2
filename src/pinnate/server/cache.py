"""Routes of the prefix cache: pin, unpin, and what explains it.

Knows: how a body names a prefix, that a prefix must be computed before it can be pinned. Must not know: pages, the
tree.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pinnate.core.errors import InvalidRequestError, QueueFullError
from pinnate.core.messages import CacheReport
from pinnate.core.sampling import SamplingParams
from pinnate.server.body import FieldNotes, convert, read_json, read_nothing
from pinnate.server.cache_report import show_report, text_of
from pinnate.server.params import check_cache_salt, check_model
from pinnate.server.protocol.operator import PrefixRequest, UnpinRequest
from pinnate.server.rendering import render_and_tokenize
from pinnate.server.state import ServerState
from pinnate.server.tokenizing import tokenize

if TYPE_CHECKING:
    from pinnate.engine.async_engine import AsyncEngine

TRIES = 3  # between computing a prefix and pinning it, others may push it out


class CacheRoutes:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def pin(self, request: Request) -> Response:
        """Computes what of the prefix is not cached, then keeps its whole pages cached until it is unpinned or the
        engine ends."""
        engine, notes = self._state.ready_engine(), self._state.field_notes()
        asked = convert(await read_json(request, self._state.settings.max_body_bytes), PrefixRequest, notes=notes)
        salt = check_cache_salt(asked.cache_salt)
        tokens = await self._tokens(engine, asked, notes)
        for _ in range(TRIES):
            result = await engine.command("pin", token_ids=tokens, cache_salt=salt)
            if result["pinned"]:
                return _json(result | notes.members("/pin_prefix"))
            await _compute(engine, tokens, salt)
        raise QueueFullError("the prefix was evicted before it could be pinned; try again when there is less load")

    async def unpin(self, request: Request) -> Response:
        engine, notes = self._state.ready_engine(), self._state.field_notes()
        asked = convert(await read_json(request, self._state.settings.max_body_bytes), UnpinRequest, notes=notes)
        return _json(await engine.command("unpin", pin_id=asked.pin_id) | notes.members("/unpin_prefix"))

    async def resync(self, request: Request) -> Response:
        return await self._command(request, "resync_kv_events")

    async def check_integrity(self, request: Request) -> Response:
        """Proves that the KV memory's books balance, between two steps; a 500 that says what is wrong where not."""
        return await self._command(request, "check_integrity")

    async def describe(self, request: Request) -> Response:  # noqa: ARG002
        """The tree, page states, the prefixes that save most, the pins; tokens as text beside their ids."""
        engine = self._state.ready_engine()
        cache = await engine.command("describe_cache")
        for entry in (*cache["tree"]["nodes"], *cache["top_prefixes"]):
            entry["text"] = text_of(entry["tokens"], engine.tokenizer)
        return _json(cache)

    async def explain(self, request: Request) -> Response:
        """The report that a request with this prompt would get now; nothing is computed."""
        engine, notes = self._state.ready_engine(), self._state.field_notes()
        asked = convert(await read_json(request, self._state.settings.max_body_bytes), PrefixRequest, notes=notes)
        salt = check_cache_salt(asked.cache_salt)
        tokens = await self._tokens(engine, asked, notes)
        if not tokens:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        reply = await engine.command("explain_match", token_ids=tokens, cache_salt=salt)
        report = show_report(msgspec.convert(reply["report"], CacheReport), tokens, engine.tokenizer)
        return _json(msgspec.to_builtins(report) | notes.members("/debug/match"))

    async def _command(self, request: Request, name: str) -> Response:
        """One that takes no body."""
        engine, notes = self._state.ready_engine(), self._state.field_notes()
        await read_nothing(request, self._state.settings.max_body_bytes, notes)
        return _json(await engine.command(name) | notes.members(name))

    async def _tokens(self, engine: AsyncEngine, asked: PrefixRequest, notes: FieldNotes) -> list[int]:
        """
        Raises:
            InvalidRequestError: no prefix, two of them, or an id outside the vocabulary.
        """
        state = self._state
        check_model(asked.model, state.model_names)
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidRequestError("one of prompt and messages is needed", param="prompt")
        if asked.messages is not None:
            if asked.add_generation_prompt is None:
                asked.add_generation_prompt = False  # other messages follow
            return await render_and_tokenize(state, engine, asked.messages, asked, notes)
        assert asked.prompt is not None
        if isinstance(asked.prompt, str):
            special = asked.add_special_tokens is not False
            return await tokenize(state, engine, asked.prompt, add_special_tokens=special, param="prompt")
        for token_id in asked.prompt:
            if not 0 <= token_id < engine.vocab_size:
                raise InvalidRequestError(f"prompt: token id {token_id} is not in the vocabulary", param="prompt")
        return asked.prompt


async def _compute(engine: AsyncEngine, tokens: list[int], cache_salt: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1)
    stream = await engine.submit(tokens, params, request_id=f"pin-{uuid.uuid4().hex}", cache_salt=cache_salt)
    async for _ in stream:
        pass


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
