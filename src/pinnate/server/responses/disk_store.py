"""A Store in the data directory: responses and conversations that outlive the server, kill -9 included.

Knows: which records are still being made or not yet written. Must not know: rows (`tables.py`), HTTP.

A response has its row before the engine works on it, so that a full disk or a damaged database is told before anything
is computed; its last state is committed before its last bytes are sent. Should that write fail, the response is
answered all the same, stays in memory, and is written as soon as there is room; until then new ones are refused.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec

from pinnate.server.database import Database
from pinnate.server.errors import StorageError
from pinnate.server.protocol.responses import Response
from pinnate.server.responses.items import Item
from pinnate.server.responses.store import LIFETIME_SECONDS, Record, Turn, not_found, previous_not_found
from pinnate.server.responses.tables import SCHEMA, Bounds, ResponseTables, StoredResponse

FILE = "responses.sqlite"
BOUNDS = Bounds(max_responses=100_000, max_bytes=2**30, lifetime=LIFETIME_SECONDS)

_Key = tuple[str, str]  # namespace, id
_log = logging.getLogger("pinnate.server")


class DiskStore:
    """The folder is this server's alone; whoever made it has its lock."""

    def __init__(self, folder: Path, bounds: Bounds = BOUNDS, clock: Callable[[], float] = time.time) -> None:
        def make(connection: sqlite3.Connection) -> ResponseTables:
            tables = ResponseTables(connection, bounds, clock)
            if tables.num_interrupted:
                _log.warning("%d responses were being made when the last server ended", tables.num_interrupted)
            return tables

        self._database = Database(folder / FILE, SCHEMA, make, "Responses are not stored")
        self._records: dict[_Key, Record] = {}  # being made, or not yet written
        self._unwritten: dict[_Key, tuple[Record, Response, list[bytes] | None]] = {}

    async def open(self) -> None:
        """At start, so that a fault is told then. It need not be called; a fault is told again by each use."""
        with contextlib.suppress(StorageError):
            await self._database.open()

    async def close(self) -> None:
        with contextlib.suppress(StorageError):
            await self._write_waiting()
        if self._unwritten:
            _log.error("%d responses could not be stored and are lost", len(self._unwritten))
        await self._database.close()

    async def add(self, record: Record) -> None:
        await self._write_waiting()
        turn, keeps_events = record.turn, record.events is not None
        before = None if turn.before is None else turn.before.number
        number = await self._database.call(
            lambda tables: tables.add(record.namespace, record.response, turn.input, before, keeps_events=keeps_events)
        )
        if number is None:
            raise previous_not_found(record.response.previous_response_id or "")
        turn.number = number
        self._records[record.namespace, record.id] = record

    async def settle(self, record: Record, response: Response, events: Sequence[bytes] = ()) -> None:
        record.cancel = record.snapshot = None  # what it shows meanwhile is not its end
        record.turn.output = msgspec.to_builtins(response.output)
        key = (record.namespace, record.id)
        try:
            if key in self._records:  # else deleted meanwhile
                kept = None if record.events is None else [*record.events, *events]
                self._unwritten[key] = (record, response, kept)
                await self._write_waiting()
        except StorageError as error:
            _log.error("%s is not stored yet: %s", record.id, error)
        finally:
            record.end(response, events)

    async def get(self, namespace: str, response_id: str) -> Record:
        record = self._records.get((namespace, response_id))
        if record is not None:
            return record
        found = await self._database.call(lambda tables: tables.get(namespace, response_id))
        if found is None:
            raise not_found(response_id)
        return _record(namespace, found)

    async def delete(self, namespace: str, response_id: str) -> None:
        key = (namespace, response_id)
        was_there = await self._database.call(lambda tables: tables.delete(namespace, response_id))
        self._unwritten.pop(key, None)
        record = self._records.pop(key, None)
        if record is None and not was_there:
            raise not_found(response_id)
        if record is not None and record.cancel is not None:
            record.cancel()

    async def find_items(self, namespace: str, item_ids: Collection[str]) -> dict[str, Item]:
        if not item_ids:
            return {}
        found = await self._database.call(lambda tables: tables.find_items(namespace, item_ids))
        for record, _, _ in self._unwritten.values():
            if record.namespace == namespace:
                found |= {item["id"]: item for item in record.turn.output if item["id"] in item_ids}
        return found

    async def _write_waiting(self) -> None:
        """
        Raises:
            StorageError: what ended could not be written; it waits on.
        """
        for key, (record, response, events) in list(self._unwritten.items()):
            await self._database.call(_settling(record, response, events))
            if self._unwritten.pop(key, None) is not None:
                self._records.pop(key, None)


def _settling(record: Record, response: Response, events: list[bytes] | None) -> Callable[[ResponseTables], None]:
    number, output = record.turn.number, record.turn.output
    assert number is not None
    return lambda tables: tables.settle(number, record.namespace, response, output, events)


def _record(namespace: str, found: StoredResponse) -> Record:
    turn: Turn | None = None
    for stored in found.conversation:
        turn = Turn(turn, stored.input, stored.number)
        turn.output = stored.output
    assert turn is not None
    return Record(
        response=found.response, turn=turn, namespace=namespace, events=found.events, stored_at=found.stored_at
    )
