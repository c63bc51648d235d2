"""The tables: files, batches, their lines and results.

Knows: which rows there are, who owns them, what happens together. Must not know: threads, the engine, HTTP. One
thread at a time. Objects are kept as their JSON; what is searched or counted has a column.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from pinnate.core.errors import NotFoundError
from pinnate.server.body import shorten
from pinnate.server.database import Schema, transaction
from pinnate.server.errors import HTTPStatusError
from pinnate.server.protocol.batches import (
    Batch,
    BatchUsage,
    FileObject,
    InputTokensDetails,
    Order,
    RequestCounts,
)

T = TypeVar("T", FileObject, Batch)

SCHEMA = Schema(
    1,
    """
CREATE TABLE files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, purpose TEXT NOT NULL,
    expires_at INTEGER, object BLOB NOT NULL);
CREATE TABLE batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, status TEXT NOT NULL,
    input_file_id TEXT NOT NULL, output_seconds INTEGER, object BLOB NOT NULL,
    completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0, input_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0, output_tokens INTEGER NOT NULL DEFAULT 0);
CREATE INDEX batches_by_status ON batches (status);
CREATE TABLE lines (
    batch INTEGER NOT NULL, line INTEGER NOT NULL, custom_id TEXT NOT NULL, offset INTEGER NOT NULL,
    size INTEGER NOT NULL, order_key BLOB NOT NULL, UNIQUE (batch, line));
CREATE TABLE results (
    batch INTEGER NOT NULL, line INTEGER NOT NULL, ok INTEGER NOT NULL, output BLOB NOT NULL, UNIQUE (batch, line));
""",
)
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
_BATCH_COLUMNS = "object, status, completed, failed, input_tokens, cached_tokens, output_tokens"
_encode = msgspec.json.encode


class Line(NamedTuple):
    """Where a request is in the input file, and its place in the order of running."""

    number: int
    custom_id: str
    offset: int
    size: int
    order_key: bytes


class Result(NamedTuple):
    """`output`: the line of the output or error file. Tokens: what the request used."""

    number: int
    ok: bool
    output: bytes
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Unanswered(NamedTuple):
    number: int
    custom_id: str


class Tables:
    """Each method is one transaction. Unknown ids, and those of other owners, are not found."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    # ------------------------------------------------------------------ files

    def add_file(self, owner: str, file: FileObject) -> None:
        with transaction(self._db):
            self._add_file(owner, file)

    def get_file(self, owner: str, file_id: str) -> FileObject:
        row = self._db.execute("SELECT object FROM files WHERE id = ? AND owner = ?", (file_id, owner)).fetchone()
        if row is None:
            raise NotFoundError(f"no such file: {shorten(file_id)!r}", param="file_id")
        return msgspec.json.decode(row[0], type=FileObject)

    def list_files(
        self, owner: str, *, purpose: str | None, after: str | None, limit: int, order: Order
    ) -> tuple[list[FileObject], bool]:
        """A page, and whether more follow."""
        where, values = "owner = ?", [owner]
        if purpose is not None:
            where, values = f"{where} AND purpose = ?", [*values, purpose]
        rows, more = self._page("files", "object", where, values, after, limit, order)
        return [msgspec.json.decode(row[0], type=FileObject) for row in rows], more

    def delete_file(self, owner: str, file_id: str) -> None:
        """
        Raises:
            NotFoundError: not there.
            HTTPStatusError: 409, a batch that is not finished needs it.
        """
        with transaction(self._db):
            self.get_file(owner, file_id)
            marks = ", ".join("?" * len(UNFINISHED))
            user = self._db.execute(
                f"SELECT id FROM batches WHERE input_file_id = ? AND status IN ({marks})", (file_id, *UNFINISHED)
            ).fetchone()
            if user is not None:
                message = f"the file is the input of {user[0]}, which is not finished; cancel that first"
                raise HTTPStatusError(409, message, code="file_in_use")
            self._db.execute("DELETE FROM files WHERE id = ?", (file_id,))

    def expired_files(self, now: float) -> list[tuple[str, str]]:
        """(owner, id) of files whose time is over."""
        return self._db.execute("SELECT owner, id FROM files WHERE expires_at <= ?", (now,)).fetchall()

    def file_ids(self) -> set[str]:
        return {row[0] for row in self._db.execute("SELECT id FROM files")}

    def _add_file(self, owner: str, file: FileObject) -> None:
        self._db.execute(
            "INSERT INTO files (id, owner, purpose, expires_at, object) VALUES (?, ?, ?, ?, ?)",
            (file.id, owner, file.purpose, file.expires_at, _encode(file)),
        )

    # ------------------------------------------------------------------ batches

    def add_batch(self, owner: str, batch: Batch, output_seconds: int | None) -> None:
        """
        Raises:
            NotFoundError: no such input file.
            HTTPStatusError: 400, the file is not one for batches.
        """
        with transaction(self._db):
            if self.get_file(owner, batch.input_file_id).purpose != "batch":
                message = "input_file_id: the file's purpose must be batch"
                raise HTTPStatusError(400, message, code="invalid_request")
            self._db.execute(
                "INSERT INTO batches (id, owner, status, input_file_id, output_seconds, object) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (batch.id, owner, batch.status, batch.input_file_id, output_seconds, _encode(batch)),
            )

    def get_batch(self, owner: str | None, batch_id: str) -> Batch:
        """With its counts as of now. `owner` None: whoever's."""
        row = self._db.execute(
            f"SELECT {_BATCH_COLUMNS} FROM batches WHERE id = ? AND owner = coalesce(?, owner)", (batch_id, owner)
        ).fetchone()
        if row is None:
            raise NotFoundError(f"no such batch: {shorten(batch_id)!r}", param="batch_id")
        return _batch(row)

    def list_batches(self, owner: str, *, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """A page, newest first, and whether more follow."""
        rows, more = self._page("batches", _BATCH_COLUMNS, "owner = ?", [owner], after, limit, "desc")
        return [_batch(row) for row in rows], more

    def unfinished(self) -> list[tuple[str, str]]:
        """(id, status) of every batch that is not finished, oldest first."""
        marks = ", ".join("?" * len(UNFINISHED))
        query = f"SELECT id, status FROM batches WHERE status IN ({marks}) ORDER BY number"
        return self._db.execute(query, UNFINISHED).fetchall()

    def change_batch(self, batch_id: str, only_if: Sequence[str] = UNFINISHED, **changes: Any) -> Batch:
        """The batch with these fields changed; unchanged where its status is none of `only_if`."""
        with transaction(self._db):
            batch = self.get_batch(None, batch_id)
            if batch.status in only_if:
                batch = msgspec.structs.replace(batch, **changes)
                self._put(batch)
        return batch

    def finish_batch(self, batch_id: str, files: Iterable[FileObject] = (), **changes: Any) -> Batch:
        """The end: its output files, its last status, and its lines and results gone, all at once."""
        with transaction(self._db):
            batch = msgspec.structs.replace(self.get_batch(None, batch_id), **changes)
            number, owner = self._number(batch_id), self.owner(batch_id)
            for file in files:
                self._add_file(owner, file)
            self._put(batch)
            self._db.execute("DELETE FROM lines WHERE batch = ?", (number,))
            self._db.execute("DELETE FROM results WHERE batch = ?", (number,))
        return batch

    def owner(self, batch_id: str) -> str:
        return str(self._db.execute("SELECT owner FROM batches WHERE id = ?", (batch_id,)).fetchone()[0])

    def output_seconds(self, batch_id: str) -> int | None:
        """How long its output files are kept; None: for good."""
        row = self._db.execute("SELECT output_seconds FROM batches WHERE id = ?", (batch_id,)).fetchone()
        return None if row[0] is None else int(row[0])

    def _put(self, batch: Batch) -> None:
        self._db.execute(
            "UPDATE batches SET status = ?, object = ? WHERE id = ?", (batch.status, _encode(batch), batch.id)
        )

    # ------------------------------------------------------------------ lines and results

    def clear_lines(self, batch_id: str) -> None:
        with transaction(self._db):
            self._db.execute("DELETE FROM lines WHERE batch = ?", (self._number(batch_id),))

    def add_lines(self, batch_id: str, lines: Iterable[Line]) -> None:
        number = self._number(batch_id)
        with transaction(self._db):
            self._db.executemany("INSERT INTO lines VALUES (?, ?, ?, ?, ?, ?)", ((number, *line) for line in lines))

    def pending(self, batch_id: str) -> list[tuple[int, str, int, int]]:
        """(line, custom_id, offset, size) of what has no result, in the order in which it is to run."""
        query = (
            "SELECT line, custom_id, offset, size FROM lines WHERE batch = ?1 AND NOT EXISTS "
            "(SELECT 1 FROM results WHERE results.batch = ?1 AND results.line = lines.line) ORDER BY order_key, line"
        )
        return self._db.execute(query, (self._number(batch_id),)).fetchall()

    def add_results(self, batch_id: str, results: Sequence[Result]) -> None:
        """Commits answers with their counts. One that is there already stays as it is."""
        number = self._number(batch_id)
        with transaction(self._db):
            for result in results:
                added = self._db.execute(
                    "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)",
                    (number, result.number, result.ok, result.output),
                ).rowcount
                if added:
                    self._db.execute(
                        "UPDATE batches SET completed = completed + ?, failed = failed + ?, "
                        "input_tokens = input_tokens + ?, cached_tokens = cached_tokens + ?, "
                        "output_tokens = output_tokens + ? WHERE number = ?",
                        (result.ok, not result.ok, *result[3:], number),
                    )

    def outputs(self, batch_id: str, *, ok: bool, after: int, limit: int) -> list[tuple[int, bytes]]:
        """(line, output) of some of the results behind line `after`, in the order of the input file."""
        query = "SELECT line, output FROM results WHERE batch = ? AND ok = ? AND line > ? ORDER BY line LIMIT ?"
        return self._db.execute(query, (self._number(batch_id), ok, after, limit)).fetchall()

    def unanswered(self, batch_id: str, *, after: int, limit: int) -> list[Unanswered]:
        query = (
            "SELECT line, custom_id FROM lines WHERE batch = ?1 AND line > ?2 AND NOT EXISTS "
            "(SELECT 1 FROM results WHERE results.batch = ?1 AND results.line = lines.line) ORDER BY line LIMIT ?3"
        )
        return [Unanswered(*row) for row in self._db.execute(query, (self._number(batch_id), after, limit))]

    # ------------------------------------------------------------------ help

    def _number(self, batch_id: str) -> int:
        return int(self._db.execute("SELECT number FROM batches WHERE id = ?", (batch_id,)).fetchone()[0])

    def _page(
        self, table: str, columns: str, where: str, values: list[Any], after: str | None, limit: int, order: Order
    ) -> tuple[list[Any], bool]:
        if after is not None:
            mark = self._db.execute(f"SELECT number FROM {table} WHERE id = ? AND owner = ?", (after, values[0]))
            row = mark.fetchone()
            if row is None:
                raise NotFoundError(f"after: no such id: {shorten(after)!r}", param="after")
            where, values = f"{where} AND number {'<' if order == 'desc' else '>'} ?", [*values, row[0]]
        query = f"SELECT {columns} FROM {table} WHERE {where} ORDER BY number {order} LIMIT ?"
        rows = self._db.execute(query, (*values, limit + 1)).fetchall()
        return rows[:limit], len(rows) > limit


def _batch(row: tuple[Any, ...]) -> Batch:
    data, status, completed, failed, input_tokens, cached_tokens, output_tokens = row
    batch = msgspec.json.decode(data, type=Batch)
    batch.status = status
    batch.request_counts = RequestCounts(total=batch.request_counts.total, completed=completed, failed=failed)
    batch.usage = BatchUsage(
        input_tokens=input_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens),
        output_tokens=output_tokens,
        total_tokens=input_tokens + output_tokens,
    )
    return batch
