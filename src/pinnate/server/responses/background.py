"""Responses that nobody waits for: run to their end, watched or not.

Knows: the shared machinery of generation, a record's events. Must not know: fields, HTTP. A run belongs to the server's
`ongoing` requests: a draining server waits for it, and a server that ends it says so in the response.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from pinnate.core.errors import NotFoundError, PinnateError
from pinnate.core.logs import log_fault
from pinnate.server.body import log_warnings
from pinnate.server.clocks import Clocks
from pinnate.server.errors import StorageError, describe
from pinnate.server.field_names import renamed
from pinnate.server.generation import Job, Tally, abort, merge, submit
from pinnate.server.protocol.responses import Event, ResponseEvent
from pinnate.server.responses.assembler import Assembler
from pinnate.server.responses.request import RENAMES
from pinnate.server.responses.store import Record, Store
from pinnate.server.responses.writer import ResponseWriter, encode
from pinnate.server.state import ServerState, shutting_down
from pinnate.server.streaming import KEEP_ALIVE

if TYPE_CHECKING:
    from pinnate.engine.async_engine import AsyncEngine
    from pinnate.engine.stream import RequestStream

_logger = logging.getLogger("pinnate.server")


async def start(
    state: ServerState, engine: AsyncEngine, store: Store, job: Job, record: Record, assembler: Assembler
) -> None:
    """Submits the job and returns; the record is in the store from here on.

    Raises:
        RequestError, EngineError: the engine does not take it; nothing is stored.
        StorageError: as `Store.add`; nothing is submitted.
    """
    log_warnings(job.id, job.warnings)
    try:
        await store.add(record)
        with renamed(RENAMES):
            streams = await submit(engine, job)
    except BaseException:
        await forget(store, record)
        raise
    run = _Run(state, engine, store, record, assembler)
    run.note(assembler.queue())
    task = asyncio.create_task(run.follow(job, streams))
    record.cancel = task.cancel
    state.ongoing.add(task)
    task.add_done_callback(state.ongoing.discard)
    await asyncio.sleep(0)  # a task that is cancelled before its first step would end without a word


async def forget(store: Store, record: Record) -> None:
    """Of a response that never began there is nothing to see."""
    with contextlib.suppress(NotFoundError, StorageError):
        await store.delete(record.namespace, record.id)


class _Run:
    """One background response."""

    def __init__(
        self, state: ServerState, engine: AsyncEngine, store: Store, record: Record, assembler: Assembler
    ) -> None:
        self._state = state
        self._engine = engine
        self._store = store
        self._record = record
        self._assembler = assembler

    def note(self, events: list[Event]) -> None:
        self._record.response = self._assembler.response
        if self._record.events is not None:
            self._record.events += encode(events)
        self._record.notify()

    async def follow(self, job: Job, streams: list[RequestStream]) -> None:
        writer = ResponseWriter(self._assembler)
        tally = Tally(job, self._state)
        outputs = merge(streams, job)
        clocks = Clocks(streams, self._state.settings.limits, self._engine.queue_seconds)
        running = self._state.running.add(job, streams)
        try:
            async for batch in outputs:
                tally.add(batch)
                self.note(writer.events(batch))
            last = writer.last_events(tally.usage())
        except asyncio.CancelledError:
            stopping = self._state.stopping
            last = self._assembler.fail(describe(shutting_down())[1]) if stopping else self._assembler.cancel()
        except Exception as error:
            if not isinstance(error, PinnateError):
                log_fault(_logger, f"background response {job.id}", error)
            last = self._assembler.fail(describe(error)[1])
        finally:
            clocks.close()
            abort(streams)
            self._state.running.remove(running)
            tally.close()
            self._state.metrics.record_stats(self._engine.stats)
            with contextlib.suppress(RuntimeError):
                await outputs.aclose()
        await self._store.settle(self._record, self._assembler.response, encode(last))


async def watch(record: Record, starting_after: int, interval: float) -> AsyncIterator[bytes]:
    """The events after that number, as they come, until the response has ended; a comment where `interval` seconds
    brought none. The events of one that the end of a server cut off are lost, but for how it ended."""
    assert record.events is not None
    position = starting_after + 1
    if record.ended and not record.events:
        last = ResponseEvent(type="response.failed", sequence_number=position, response=record.response)
        yield b"".join(encode([last]))
        return
    while True:
        ended, changed = record.ended, record.changed
        waiting = record.events[position:]
        position += len(waiting)
        if waiting:
            yield b"".join(waiting)
        if ended:
            return
        try:
            async with asyncio.timeout(interval):
                await changed.wait()
        except TimeoutError:
            yield KEEP_ALIVE
