"""The check of an input file, and the order in which its requests will run.

Knows: what is stored of a line. Must not know: what becomes of the batch. Every line is read, checked and tokenised
here and once more when it runs: what is kept in between is its place, not its content.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import BinaryIO

from pinnate.core.errors import RequestError
from pinnate.server.batches.lines import LineChecker, Place, split
from pinnate.server.batches.order import order_key
from pinnate.server.batches.request import TRY_AGAIN, prepare
from pinnate.server.batches.storage import Storage
from pinnate.server.batches.tables import Line
from pinnate.server.endpoint import Route
from pinnate.server.protocol.batches import Batch, BatchError
from pinnate.server.state import ServerState

CHUNK_LINES = 64  # read and stored at once
CHUNK_BYTES = 4 << 20
RETRY_SECONDS = 0.5
YIELD_FACTOR = 3.0  # beside live requests, so much longer than a line took nothing is done

ANY_ENDPOINT = "any"  # of a batch whose lines may ask for different ones

_Lines = Iterator[tuple[Place, bytes | None]]


class Validator:
    """Checks the file of one batch. `run` is called once; the numbers are right afterwards."""

    def __init__(self, state: ServerState, storage: Storage, routes: Mapping[str, Route], batch: Batch) -> None:
        self._state = state
        self._storage = storage
        self._routes = routes
        self._batch = batch
        endpoints = tuple(routes) if batch.endpoint == ANY_ENDPOINT else (batch.endpoint,)
        self._checker = LineChecker(endpoints, state.settings.max_body_bytes)
        self.model: str | None = None

    @property
    def num_requests(self) -> int:
        return self._checker.num_lines

    @property
    def num_errors(self) -> int:
        return self._checker.num_errors

    async def run(self) -> list[BatchError]:
        """What is wrong with the file. If nothing is, the batch's lines are stored.

        Raises:
            StorageError: the file cannot be read, or the lines not be stored.
        """
        batch_id = self._batch.id
        await self._storage.call(lambda tables: tables.clear_lines(batch_id))
        path = self._storage.content(self._batch.input_file_id)
        file: BinaryIO = await self._storage.run(path.open, "rb")
        with file:
            lines = split(file, self._state.settings.max_body_bytes)
            while chunk := await self._storage.run(_take, lines):
                rows = [row for place, raw in chunk if (row := await self._check(place, raw)) is not None]
                await self._storage.call(lambda tables, rows=rows: tables.add_lines(batch_id, rows))  # type: ignore[misc]
        self._checker.finish()
        return self._checker.errors

    async def _check(self, place: Place, raw: bytes | None) -> Line | None:
        line = self._checker.check(place, raw)
        if line is None or raw is None or self._checker.num_errors:
            return None
        if self.model is None and isinstance(model := line.body.get("model"), str):
            self.model = model
        began = time.perf_counter()
        key = await self._order_key(raw)
        pause = YIELD_FACTOR * (time.perf_counter() - began) if self._state.ongoing else 0.0
        await asyncio.sleep(pause)
        return Line(place.number, line.custom_id, place.offset, place.size, key)

    async def _order_key(self, raw: bytes) -> bytes:
        """A request that will be refused has an empty one, and runs first."""
        while True:
            try:
                job, _ = await prepare(self._state, self._state.ready_engine(), self._routes, raw)
            except TRY_AGAIN:
                await asyncio.sleep(RETRY_SECONDS)
            except RequestError:
                return b""
            else:
                return order_key(job.prompts[0].token_ids, job.cache_salt)


def _take(lines: _Lines) -> list[tuple[Place, bytes | None]]:
    chunk: list[tuple[Place, bytes | None]] = []
    size = 0
    for place, raw in islice(lines, CHUNK_LINES):
        chunk.append((place, raw))
        size += len(raw or b"")
        if size >= CHUNK_BYTES:
            break
    return chunk
