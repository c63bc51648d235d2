"""The tables of stored responses: turns of conversations, their items, and the responses that are shown.

Knows: which rows there are, who owns them, the bounds. Must not know: threads, HTTP, what an item is. One thread at a
time. A turn stays while its response is stored or a later turn follows it, so that a conversation keeps what it needs.
Triggers count responses and bytes (of JSON and of events), in the same transaction as what they count.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import msgspec

from pinnate.server.database import Schema, transaction
from pinnate.server.protocol.responses import Response, ResponseError
from pinnate.server.responses.items import Item

SCHEMA = Schema(
    1,
    """
CREATE TABLE turns (number INTEGER PRIMARY KEY AUTOINCREMENT, before INTEGER);
CREATE INDEX turns_by_before ON turns (before);
CREATE TABLE items (
    turn INTEGER NOT NULL, is_output INTEGER NOT NULL, place INTEGER NOT NULL, owner TEXT NOT NULL, id TEXT NOT NULL,
    object BLOB NOT NULL, UNIQUE (turn, is_output, place));
CREATE INDEX items_by_id ON items (id, owner);
CREATE TABLE responses (
    turn INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, ended INTEGER NOT NULL,
    stored_at REAL NOT NULL, object BLOB NOT NULL, events BLOB);
CREATE TABLE totals (responses INTEGER NOT NULL, bytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);
CREATE TRIGGER item_added AFTER INSERT ON items BEGIN
    UPDATE totals SET bytes = bytes + length(NEW.object); END;
CREATE TRIGGER item_removed AFTER DELETE ON items BEGIN
    UPDATE totals SET bytes = bytes - length(OLD.object); END;
CREATE TRIGGER response_added AFTER INSERT ON responses BEGIN
    UPDATE totals SET responses = responses + 1, bytes = bytes + length(NEW.object) + ifnull(length(NEW.events), 0);
    END;
CREATE TRIGGER response_removed AFTER DELETE ON responses BEGIN
    UPDATE totals SET responses = responses - 1, bytes = bytes - length(OLD.object) - ifnull(length(OLD.events), 0);
    END;
CREATE TRIGGER response_changed AFTER UPDATE ON responses BEGIN
    UPDATE totals SET bytes = bytes + length(NEW.object) + ifnull(length(NEW.events), 0)
        - length(OLD.object) - ifnull(length(OLD.events), 0); END;
""",
)
INTERRUPTED = ResponseError("server_error", "the server ended before the response was complete")
_encode = msgspec.json.encode


class Bounds(NamedTuple):
    """`lifetime` in seconds."""

    max_responses: int
    max_bytes: int
    lifetime: float


class StoredTurn(NamedTuple):
    number: int
    input: list[Item]
    output: list[Item]


class StoredResponse(NamedTuple):
    """`conversation`: its turns from the first to its own. `events` are None where none are kept."""

    response: Response
    stored_at: float
    events: list[bytes] | None
    conversation: list[StoredTurn]


class ResponseTables:
    """Each method is one transaction. What is not there, too old or another owner's is None or False. `add` and
    `settle` drop the oldest responses that have ended, the one at hand excepted, until the bounds hold."""

    def __init__(self, connection: sqlite3.Connection, bounds: Bounds, clock: Callable[[], float] = time.time) -> None:
        """Responses that were being made when the server before ended become failed ones."""
        self._db = connection
        self._bounds = bounds
        self._clock = clock
        self.num_interrupted = self._fail_unfinished()

    def add(
        self, owner: str, response: Response, items: list[Item], before: int | None, *, keeps_events: bool
    ) -> int | None:
        """The number of its turn; None where the turn `before` is gone."""
        with transaction(self._db):
            if before is not None and not self._has("SELECT 1 FROM turns WHERE number = ?", before):
                return None
            turn = self._db.execute("INSERT INTO turns (before) VALUES (?)", (before,)).lastrowid
            assert turn is not None
            self._add_items(turn, owner, items, is_output=False)
            events = msgspec.msgpack.encode([]) if keeps_events else None
            self._db.execute(
                "INSERT INTO responses VALUES (?, ?, ?, 0, ?, ?, ?)",
                (turn, response.id, owner, self._clock(), _encode(response), events),
            )
            self._trim(turn)
        return turn

    def settle(self, turn: int, owner: str, response: Response, output: list[Item], events: list[bytes] | None) -> None:
        """The last state; nothing where the response was deleted meanwhile."""
        packed = None if events is None else msgspec.msgpack.encode(events)
        with transaction(self._db):
            changed = self._db.execute(
                "UPDATE responses SET ended = 1, object = ?, events = ? WHERE turn = ?",
                (_encode(response), packed, turn),
            ).rowcount
            if changed:
                self._db.execute("DELETE FROM items WHERE turn = ? AND is_output", (turn,))
                self._add_items(turn, owner, output, is_output=True)
                self._trim(turn)

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        row = self._db.execute(
            "SELECT turn, object, stored_at, events FROM responses WHERE id = ? AND owner = ? AND stored_at >= ?",
            (response_id, owner, self._oldest()),
        ).fetchone()
        if row is None:
            return None
        turn, data, stored_at, packed = row
        events = None if packed is None else msgspec.msgpack.decode(packed, type=list[bytes])
        return StoredResponse(msgspec.json.decode(data, type=Response), stored_at, events, self._conversation(turn))

    def delete(self, owner: str, response_id: str) -> bool:
        """Whether it was there."""
        with transaction(self._db):
            row = self._db.execute(
                "SELECT turn, stored_at FROM responses WHERE id = ? AND owner = ?", (response_id, owner)
            ).fetchone()
            if row is not None:
                self._drop(row[0])
        return row is not None and row[1] >= self._oldest()

    def find_items(self, owner: str, item_ids: Collection[str]) -> dict[str, Item]:
        found = {}
        for item_id in item_ids:
            query = "SELECT object FROM items WHERE id = ? AND owner = ? ORDER BY turn DESC LIMIT 1"
            row = self._db.execute(query, (item_id, owner)).fetchone()
            if row is not None:
                found[item_id] = msgspec.json.decode(row[0])
        return found

    def totals(self) -> tuple[int, int]:
        """How many responses there are, and how many bytes."""
        count, size = self._db.execute("SELECT responses, bytes FROM totals").fetchone()
        return count, size

    # ------------------------------------------------------------------ help

    def _conversation(self, turn: int | None) -> list[StoredTurn]:
        turns: list[StoredTurn] = []
        while turn is not None:
            runs: tuple[list[Item], list[Item]] = ([], [])
            query = "SELECT is_output, object FROM items WHERE turn = ? ORDER BY is_output, place"
            for is_output, data in self._db.execute(query, (turn,)):
                runs[is_output].append(msgspec.json.decode(data))
            turns.append(StoredTurn(turn, *runs))
            turn = self._db.execute("SELECT before FROM turns WHERE number = ?", (turn,)).fetchone()[0]
        return turns[::-1]

    def _add_items(self, turn: int, owner: str, items: Sequence[Item], *, is_output: bool) -> None:
        rows = [(turn, is_output, place, owner, item["id"], _encode(item)) for place, item in enumerate(items)]
        self._db.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?)", rows)

    def _trim(self, kept: int) -> None:
        while True:
            query = "SELECT turn, stored_at FROM responses WHERE ended AND turn != ? ORDER BY turn LIMIT 1"
            oldest = self._db.execute(query, (kept,)).fetchone()
            if oldest is None or not (self._is_over() or oldest[1] < self._oldest()):
                return
            self._drop(oldest[0])

    def _is_over(self) -> bool:
        count, size = self.totals()
        return count > self._bounds.max_responses or size > self._bounds.max_bytes

    def _oldest(self) -> float:
        return self._clock() - self._bounds.lifetime

    def _drop(self, turn: int | None) -> None:
        """The response, and what of its conversation nobody needs any more."""
        self._db.execute("DELETE FROM responses WHERE turn = ?", (turn,))
        while turn is not None:
            if self._has("SELECT 1 FROM responses WHERE turn = ?", turn):
                return
            if self._has("SELECT 1 FROM turns WHERE before = ?", turn):
                return
            before = self._db.execute("SELECT before FROM turns WHERE number = ?", (turn,)).fetchone()[0]
            self._db.execute("DELETE FROM items WHERE turn = ?", (turn,))
            self._db.execute("DELETE FROM turns WHERE number = ?", (turn,))
            turn = before

    def _fail_unfinished(self) -> int:
        with transaction(self._db):
            rows = self._db.execute("SELECT turn, object FROM responses WHERE NOT ended").fetchall()
            for turn, data in rows:
                response = msgspec.json.decode(data, type=Response)
                failed = msgspec.structs.replace(response, status="failed", error=INTERRUPTED)
                query = "UPDATE responses SET ended = 1, object = ? WHERE turn = ?"
                self._db.execute(query, (_encode(failed), turn))
        return len(rows)

    def _has(self, query: str, number: int) -> bool:
        return self._db.execute(query, (number,)).fetchone() is not None
