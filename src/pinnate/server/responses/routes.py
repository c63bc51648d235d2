"""The routes under /v1/responses.

Knows: HTTP of this API, who may see which response. Must not know: fields, events, how a job runs.

A response that is not a background one runs as a chat does: when its client leaves it ends, stored as `cancelled`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response as HTTPResponse
from starlette.routing import Route as HTTPRoute
from starlette.types import Receive, Scope, Send

from pinnate.core.errors import InvalidRequestError
from pinnate.server.auth import caller_of
from pinnate.server.body import log_warnings, read_json, read_nothing
from pinnate.server.endpoint import GenerationEndpoint, Route, refusals_counted
from pinnate.server.errors import ErrorObject, describe
from pinnate.server.generation import Job, attend
from pinnate.server.protocol.common import Usage
from pinnate.server.protocol.responses import DeletedResponse, ErrorEvent, InputTokens, ItemList, Response
from pinnate.server.replies import Gathered
from pinnate.server.request_record import record_of
from pinnate.server.responses import background
from pinnate.server.responses.assembler import Assembler
from pinnate.server.responses.request import RENAMES, Plan, prepare
from pinnate.server.responses.store import ENDED, MemoryStore, Record, Store
from pinnate.server.responses.writer import ResponseWriter, encode, finished
from pinnate.server.state import ServerState, shutting_down
from pinnate.server.streaming import stream_headers

DEFAULT_PAGE = 20
MAX_PAGE = 100


def responses_routes(state: ServerState, store: Store | None = None) -> list[HTTPRoute]:
    store = MemoryStore() if store is None else store
    stored = StoredResponses(state, store)
    return [
        HTTPRoute("/v1/responses", CreateResponse(state, store), methods=["POST"]),
        HTTPRoute("/v1/responses/input_tokens", stored.count, methods=["POST"]),
        HTTPRoute("/v1/responses/{id}", stored, methods=["GET", "DELETE"]),
        HTTPRoute("/v1/responses/{id}/cancel", stored.cancel, methods=["POST"]),
        HTTPRoute("/v1/responses/{id}/input_items", stored.input_items, methods=["GET"]),
    ]


class CreateResponse:
    """POST /v1/responses."""

    def __init__(self, state: ServerState, store: Store) -> None:
        self._state = state
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, namespace = self._state, caller_of(scope).namespace
        with refusals_counted(state):
            state.ready_engine().check_queue()
            fields = await read_json(Request(scope, receive), state.settings.max_body_bytes)
            if fields.get("background") is True:
                await attend(state, receive, self._background(fields, namespace, send))
                return
            exchange = _Exchange(self._store, namespace)
            try:
                await GenerationEndpoint(state, exchange.route()).serve(fields, receive, send, record_of(scope))
            finally:
                await exchange.leave()

    async def _background(self, fields: dict[str, Any], namespace: str, send: Send) -> None:
        try:
            record, is_stream = await self._start(fields, namespace)
        except asyncio.CancelledError:
            if self._state.stopping:
                raise shutting_down() from None
            raise
        if is_stream:
            await _send_stream(self._state, record, -1, send)
        else:
            await _send_json(send, record.response)

    async def _start(self, fields: dict[str, Any], namespace: str) -> tuple[Record, bool]:
        engine = self._state.ready_engine()
        plan = await prepare(self._state, engine, fields, self._store, namespace)
        assembler = _assembler(plan, engine.tokenizer)
        record = Record(response=plan.response, turn=plan.turn, namespace=namespace, snapshot=assembler.snapshot)
        if plan.job.stream:
            record.events = []
        await background.start(self._state, engine, self._store, plan.job, record, assembler)
        return record, plan.job.stream


class _Exchange:
    """One response whose client waits for it: the parts of its Route, which share what `prepare` found out."""

    def __init__(self, store: Store, namespace: str) -> None:
        self._store = store
        self._namespace = namespace
        self._plan: Plan | None = None
        self._assembler: Assembler | None = None
        self._record: Record | None = None  # None where nothing is to be stored

    def route(self) -> Route:
        return Route(self._prepare, self._writer, self._reply, self._fail, RENAMES, self._settle)

    async def leave(self) -> None:
        """At the end, however it came. A stream whose client has seen its id can be looked at afterwards."""
        if self._record is None:
            return
        if self._assembler is None:
            await background.forget(self._store, self._record)
            return
        if self._assembler.response.status not in ENDED:
            self._assembler.cancel()
        await self._settle()

    async def _prepare(self, state: ServerState, engine: Any, fields: dict[str, Any]) -> Job:
        plan = self._plan = await prepare(state, engine, fields, self._store, self._namespace)
        if plan.response.store:
            begun = msgspec.structs.replace(plan.response, status="in_progress")
            self._record = Record(response=begun, turn=plan.turn, namespace=self._namespace)
            await self._store.add(self._record)
        return plan.job

    def _writer(self, job: Job, vocabulary: Any) -> ResponseWriter:  # noqa: ARG002
        return ResponseWriter(self._begin(vocabulary))

    def _reply(self, job: Job, gathered: Gathered, usage: Usage, vocabulary: Any) -> Response:  # noqa: ARG002
        return finished(self._begin(vocabulary), gathered, usage)

    def _fail(self, error: ErrorObject) -> bytes:
        assert self._assembler is not None
        return b"".join(encode(self._assembler.fail(error)))

    def _begin(self, vocabulary: Any) -> Assembler:
        assert self._plan is not None
        self._assembler = _assembler(self._plan, vocabulary)
        if self._record is not None:
            self._record.snapshot = self._assembler.snapshot
        return self._assembler

    async def _settle(self) -> None:
        assert self._assembler is not None
        if self._record is not None and not self._record.ended:
            await self._store.settle(self._record, self._assembler.response)


class StoredResponses:
    """What can be done with a response by its id."""

    def __init__(self, state: ServerState, store: Store) -> None:
        self._state = state
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        namespace, response_id = caller_of(scope).namespace, request.path_params["id"]
        if request.method == "DELETE":
            await self._store.delete(namespace, response_id)
            await _send_json(send, DeletedResponse(id=response_id))
            return
        record = await self._store.get(namespace, response_id)
        if not _flag(request, "stream"):
            await _send_json(send, record.current())
            return
        if record.events is None:
            raise InvalidRequestError(
                "stream: only a background response that was created with stream: true can be streamed again",
                param="stream",
            )
        starting_after = _number(request, "starting_after", -1, 2**62, default=-1)
        await attend(self._state, receive, _send_stream(self._state, record, starting_after, send))

    async def cancel(self, request: Request) -> HTTPResponse:
        """A response that has ended is answered as it is, so that cancelling twice is no error."""
        record = await self._store.get(caller_of(request.scope).namespace, request.path_params["id"])
        if not record.response.background:
            raise InvalidRequestError("only responses created with background: true can be cancelled", param="id")
        notes = self._state.field_notes()
        await read_nothing(request, self._state.settings.max_body_bytes, notes)
        while not record.ended:
            changed = record.changed
            if record.cancel is not None:  # else it is being stored
                record.cancel()
            await changed.wait()
        if not notes.warnings:
            return _json(record.response)
        return _json(msgspec.structs.replace(record.response, **notes.members(record.id)))

    async def input_items(self, request: Request) -> HTTPResponse:
        """The conversation up to this response, newest first unless `order=asc`."""
        record = await self._store.get(caller_of(request.scope).namespace, request.path_params["id"])
        limit = _number(request, "limit", 1, MAX_PAGE, default=DEFAULT_PAGE)
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequestError("order must be asc or desc", param="order")
        items = record.turn.items()
        if order == "desc":
            items.reverse()
        after = request.query_params.get("after")
        if after is not None:
            places = [number for number, item in enumerate(items) if item["id"] == after]
            if not places:
                raise InvalidRequestError("after: no input item has this id", param="after")
            items = items[places[0] + 1 :]
        page = items[:limit]
        return _json(
            ItemList(
                data=page,
                first_id=page[0]["id"] if page else None,
                last_id=page[-1]["id"] if page else None,
                has_more=len(items) > len(page),
            )
        )

    async def count(self, request: Request) -> HTTPResponse:
        """POST /v1/responses/input_tokens: how long the prompt would be."""
        engine = self._state.ready_engine()
        fields = await read_json(request, self._state.settings.max_body_bytes)
        plan = await prepare(self._state, engine, fields, self._store, caller_of(request.scope).namespace)
        log_warnings("/v1/responses/input_tokens", plan.job.warnings)
        warnings = list(plan.job.warnings) or UNSET
        return _json(InputTokens(input_tokens=len(plan.job.prompts[0].token_ids), warnings=warnings))


def _assembler(plan: Plan, vocabulary: Any) -> Assembler:
    return Assembler(plan.response, plan.job.new_parser(), vocabulary, logprobs=plan.wants_logprobs)


def _flag(request: Request, name: str) -> bool:
    given = request.query_params.get(name, "false").lower()
    if given not in ("true", "false", "1", "0"):
        raise InvalidRequestError(f"{name} must be true or false", param=name)
    return given in ("true", "1")


def _number(request: Request, name: str, low: int, high: int, *, default: int) -> int:
    given = request.query_params.get(name)
    if given is None:
        return default
    if not given.lstrip("-").isdecimal() or len(given) > 18 or not low <= int(given) <= high:
        raise InvalidRequestError(f"{name} must be a whole number from {low} to {high}", param=name)
    return int(given)


def _json(body: msgspec.Struct) -> HTTPResponse:
    return HTTPResponse(msgspec.json.encode(body), media_type="application/json")


async def _send_json(send: Send, body: msgspec.Struct) -> None:
    encoded = msgspec.json.encode(body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(encoded)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": encoded})


async def _send_stream(state: ServerState, record: Record, starting_after: int, send: Send) -> None:
    """The record's events as they come. When the client leaves, the response goes on."""
    interval = state.settings.limits.keep_alive_interval
    await send({"type": "http.response.start", "status": 200, "headers": stream_headers(record.id)})
    try:
        async for data in background.watch(record, starting_after, interval):
            await send({"type": "http.response.body", "body": data, "more_body": True})
    except asyncio.CancelledError:
        if not state.stopping:
            raise
        error = describe(shutting_down())[1]
        number = len(record.events or ())
        last = encode([ErrorEvent(sequence_number=number, code=error.code, message=error.message)])
        await send({"type": "http.response.body", "body": b"".join(last), "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
