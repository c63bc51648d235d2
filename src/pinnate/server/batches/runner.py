"""The requests of one batch: sent in order, as many at once as the engine has places; answers stored as they come.

Knows: what is in flight, what is to be tried again, what is not stored yet. Must not know: statuses of a batch, HTTP.

A request is answered once: its result is one row, committed when it is there, and what has a row is never sent again.
After `run` was cancelled, or this process killed, another `run` goes on with the requests that have no row.

A request that fails for the engine's sake is tried again, alone: if it is what kills the engine, its neighbours are
not refused for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace

from pinnate.core.errors import EngineError
from pinnate.server.batches.progress import Progress
from pinnate.server.batches.request import TRY_AGAIN, answer, num_sequences, prepare, refusal
from pinnate.server.batches.storage import Storage
from pinnate.server.batches.tables import Result
from pinnate.server.endpoint import Route
from pinnate.server.errors import StorageError
from pinnate.server.generation import submit
from pinnate.server.state import ServerState

MAX_ATTEMPTS = 3  # at a request under which the engine fails
MAX_UNSAVED = 64  # results; more wait, and hold their places in the engine
RETRY_SECONDS = 0.5
FULL_DISK_SECONDS = 2.0

log = logging.getLogger("pinnate.server")


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    custom_id: str
    offset: int
    size: int
    attempts: int = 0


class BatchRunner:
    """One run of one batch. `run` is called once."""

    def __init__(
        self, state: ServerState, storage: Storage, routes: Mapping[str, Route], batch_id: str, file_id: str,
        progress: Progress,
    ) -> None:  # fmt: skip
        self._state = state
        self._storage = storage
        self._routes = routes
        self._batch_id = batch_id
        self._file_id = file_id
        self._progress = progress
        self._pending: deque[_Line] = deque()
        self._unsaved: list[Result] = []
        self._places = 0  # in use
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Returns when every request has its result in the database.

        Raises:
            StorageError: the input cannot be read, or the database not be used. A full disk is waited for.
        """
        rows = await self._storage.call(lambda tables: tables.pending(self._batch_id))
        self._pending.extend(_Line(*row) for row in rows)
        self._progress.begin(self._batch_id, len(self._pending))
        file = await self._storage.run(os.open, self._storage.content(self._file_id), os.O_RDONLY)
        try:
            async with asyncio.TaskGroup() as group:
                saving = group.create_task(self._save())
                await self._send_all(file, group)
                saving.cancel()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            os.close(file)
            with contextlib.suppress(StorageError):
                await self._save_once()
            self._progress.end()

    async def _send_all(self, file: int, group: asyncio.TaskGroup) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._pending or not self._places)
            if not self._pending:
                break
            line = self._pending.popleft()
            if not await self._send(file, line, group):
                self._pending.appendleft(line)
                await asyncio.sleep(RETRY_SECONDS)
        async with self._changed:
            await self._changed.wait_for(lambda: not self._unsaved)

    async def _send(self, file: int, line: _Line, group: asyncio.TaskGroup) -> bool:
        """Starts a request once there are places for it, or stores why it cannot start. False: try again later."""
        needed = 0
        try:
            engine = self._state.ready_engine()
            raw = await self._storage.run(os.pread, file, line.size, line.offset)
            job, route = await prepare(self._state, engine, self._routes, raw)
            limit = num_places(engine.info["max_num_seqs"])
            needed = limit if line.attempts else min(limit, num_sequences(job))
            await self._take_places(needed, limit)
            streams = await submit(engine, job)  # here, not in its task: requests must start in this order
        except TRY_AGAIN:
            await self._give_back(needed)
            return False
        except StorageError:
            raise
        except Exception as error:
            await self._give_back(needed)
            await self._store(refusal(line.number, line.custom_id, error))
            return True
        group.create_task(self._answer(line, answer(engine, job, route, streams, line.number, line.custom_id), needed))
        return True

    async def _answer(self, line: _Line, answering: Coroutine[None, None, Result], needed: int) -> None:
        again: _Line | None = None
        try:
            await self._store(await answering)
        except EngineError as error:
            if line.attempts + 1 < MAX_ATTEMPTS:
                again = replace(line, attempts=line.attempts + 1)
            else:
                await self._store(refusal(line.number, line.custom_id, error))
        except Exception as error:
            await self._store(refusal(line.number, line.custom_id, error))
        if again is not None:
            self._pending.appendleft(again)
        await self._give_back(needed)

    # ------------------------------------------------------------------ places in the engine

    async def _take_places(self, needed: int, limit: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._places + needed <= limit)
            self._places += needed
            self._progress.in_flight += 1

    async def _give_back(self, places: int) -> None:
        if places:
            async with self._changed:
                self._places -= places
                self._progress.in_flight -= 1
                self._changed.notify_all()

    # ------------------------------------------------------------------ results

    async def _store(self, result: Result) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._unsaved) < MAX_UNSAVED)
            self._unsaved.append(result)
            self._changed.notify_all()

    async def _save(self) -> None:
        """Until cancelled."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._unsaved)
            try:
                await self._save_once()
            except StorageError as error:
                if error.code != "storage_full":
                    raise
                log.error("%s: %s; trying again every %.0f s", self._batch_id, error, FULL_DISK_SECONDS)
                await asyncio.sleep(FULL_DISK_SECONDS)

    async def _save_once(self) -> None:
        """All that is there, in one transaction."""
        results = list(self._unsaved)
        await self._storage.call(lambda tables: tables.add_results(self._batch_id, results))
        async with self._changed:
            del self._unsaved[: len(results)]
            self._changed.notify_all()
        completed = sum(result.ok for result in results)
        self._progress.add(completed=completed, failed=len(results) - completed)


def num_places(max_num_seqs: int) -> int:
    """How many sequences of a batch the engine is given: all that it can run, and some that wait, so that a place is
    taken the moment it is free. Live requests do not queue behind them (core/request.py, BACKGROUND_PRIORITY)."""
    return max_num_seqs + max_num_seqs // 8 + 1
