"""The life of a generation request over HTTP: read, check, submit, answer; plain or streamed.

Knows: the order of these, ASGI. Must not know: fields (`chat.py`, `completions.py`), shapes (`replies.py`,
`streaming.py`). Nothing is sent before the first output is there, so that whatever is known by then is a real status,
never a 200; but a stream that waits longer than `keep_alive_interval` begins with a comment, lest it look dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from pinnate.core.errors import PinnateError
from pinnate.core.logs import log_fault
from pinnate.server.best_of import choose
from pinnate.server.body import Disconnected, log_warnings, read_json
from pinnate.server.cache_report import Vocabulary
from pinnate.server.clocks import Clocks
from pinnate.server.errors import ErrorObject, describe
from pinnate.server.field_names import Renames, renamed
from pinnate.server.generation import Job, Output, Tally, abort, attend, merge, submit
from pinnate.server.protocol.common import Usage
from pinnate.server.replies import Gathered
from pinnate.server.request_record import RequestRecord, record_of
from pinnate.server.state import ServerState, shutting_down
from pinnate.server.streaming import KEEP_ALIVE, ChunkWriter, error_event, stream_headers

if TYPE_CHECKING:
    from pinnate.engine.async_engine import AsyncEngine

_logger = logging.getLogger("pinnate.server")


async def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Route:
    """What differs between the APIs. `fail` makes the last bytes of a stream that an error ends. `names`: what the API
    calls fields that the engine refuses. `settle` is awaited when an answer is complete, before its last bytes are
    sent."""

    prepare: Callable[[ServerState, AsyncEngine, dict[str, Any]], Awaitable[Job]]
    writer: Callable[[Job, Vocabulary], ChunkWriter]
    reply: Callable[[Job, Gathered, Usage, Vocabulary], msgspec.Struct | Sequence[msgspec.Struct]]
    fail: Callable[[ErrorObject], bytes] = error_event
    names: Renames = ()
    settle: Callable[[], Awaitable[None]] = _nothing


@dataclass(frozen=True, slots=True)
class _Run:
    """A job that the engine works on."""

    job: Job
    outputs: AsyncGenerator[list[Output]]
    tally: Tally
    clocks: Clocks


class GenerationEndpoint:
    """ASGI application of one route. Errors before the first byte are raised to the app's handlers."""

    def __init__(self, state: ServerState, route: Route) -> None:
        self._state = state
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state
        with refusals_counted(state):
            state.ready_engine().check_queue()  # before a body is read that nobody will serve
            fields = await read_json(Request(scope, receive), state.settings.max_body_bytes)
            await self.serve(fields, receive, send, record_of(scope))

    async def serve(
        self, fields: dict[str, Any], receive: Receive, send: Send, record: RequestRecord | None = None
    ) -> None:
        """Answers a request whose body has been read. `record` is told what the generation came to."""
        engine = self._state.ready_engine()
        await attend(self._state, receive, self._answer(engine, fields, send, record))

    async def _answer(
        self, engine: AsyncEngine, fields: dict[str, Any], send: Send, record: RequestRecord | None
    ) -> None:
        try:
            job = await self._route.prepare(self._state, engine, fields)
            log_warnings(job.id, job.warnings)
            with renamed(self._route.names):
                streams = await submit(engine, job)
        except asyncio.CancelledError:
            self._raise_if_stopping()
            raise
        run = _Run(
            job,
            merge(streams, job),
            Tally(job, self._state, record),
            Clocks(streams, self._state.settings.limits, engine.queue_seconds),
        )
        running = self._state.running.add(job, streams)
        try:
            if job.stream:
                await self._stream(run, self._route.writer(job, engine.tokenizer), send)
            else:
                await self._plain(run, engine.tokenizer, send)
        finally:
            run.clocks.close()
            abort(streams)
            self._state.running.remove(running)
            run.tally.close()
            with contextlib.suppress(RuntimeError):  # still running: it is being cancelled with this task
                await run.outputs.aclose()

    async def _plain(self, run: _Run, vocabulary: Vocabulary, send: Send) -> None:
        gathered = Gathered(run.job)
        try:
            async for batch in run.outputs:
                run.tally.add(batch)
                gathered.add(batch)
        except asyncio.CancelledError:
            self._raise_if_stopping()
            raise
        shown, best = choose(run.job, gathered)
        answer = self._route.reply(shown, best, run.tally.usage(), vocabulary)
        await self._route.settle()
        body = msgspec.json.encode(answer)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", run.job.id.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, run: _Run, writer: ChunkWriter, send: Send) -> None:
        job, tally, clocks = run.job, run.tally, run.clocks
        started = False
        clocks.start_pulse()
        try:
            async for batch in run.outputs:
                tally.add(batch)
                data = writer.write(batch) if batch else KEEP_ALIVE
                if tally.is_complete:
                    data += writer.end(tally.usage())
                    await self._route.settle()
                if not started:
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": stream_headers(job.id)})
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": not tally.is_complete})
                    clocks.written()
        except (Exception, asyncio.CancelledError) as error:
            if not started:
                self._raise_if_stopping()
                raise
            if isinstance(error, asyncio.CancelledError) and not self._state.stopping:
                raise
            await send({"type": "http.response.body", "body": self._last_words(run, error), "more_body": False})

    def _last_words(self, run: _Run, error: BaseException) -> bytes:
        if isinstance(error, asyncio.CancelledError):
            error = shutting_down()
        elif not isinstance(error, PinnateError):
            log_fault(_logger, f"stream {run.job.id}", error)
        assert isinstance(error, Exception)
        described = describe(error)[1]
        run.tally.note_error(described.code)
        return self._route.fail(described)

    def _raise_if_stopping(self) -> None:
        if self._state.stopping:
            raise shutting_down() from None


@contextlib.contextmanager
def refusals_counted(state: ServerState) -> Iterator[None]:
    """Counts what a request is refused for. A client that left before the end of its body is nobody to answer."""
    try:
        yield
    except Disconnected:
        return
    except Exception as error:
        state.metrics.rejected[describe(error)[1].code or ""] += 1
        raise
