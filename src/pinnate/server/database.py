"""A SQLite database of the data directory: opened, checked, its errors in our words, and the one thread that uses it.

Knows: SQLite, what its error codes mean. Must not know: what the rows mean (`tables.py` of batches/ and responses/).

Write-ahead log, synchronous NORMAL: what is committed survives the end of this process at any moment, kill -9 included.
Should the machine lose power, the last transactions may be undone, as a whole and in order; their requests run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from pinnate.server.errors import StorageError

T = TypeVar("T")
R = TypeVar("R")

_FULL = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE})
_FULL_ERRNO = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

log = logging.getLogger("pinnate.server")


class Schema(NamedTuple):
    """`sql` makes an empty database's tables."""

    version: int
    sql: str


class Database(Generic[T]):
    """One database file, its tables, and its thread. It is opened and checked at the first use, in the thread; where it
    is damaged every call says so, and nothing else of the server suffers."""

    def __init__(self, path: Path, schema: Schema, make: Callable[[sqlite3.Connection], T], without: str) -> None:
        """`make` is called with the open database, in the thread. `without`: what does not work without it, for the
        log."""
        self.path = path
        self._schema = schema
        self._make = make
        self._without = without
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"pinnate-{path.stem}")
        self._connection: sqlite3.Connection | None = None
        self._tables: T | None = None
        self._broken: StorageError | None = None

    async def open(self) -> None:
        """
        Raises:
            StorageError: the database cannot be used; so does every later `call`.
        """
        await self.call(lambda _: None)

    async def call(self, function: Callable[[T], R]) -> R:
        """`function` of the tables, in the thread.

        Raises:
            StorageError: the disk is full, the database is damaged; and what `function` raises.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._call, function)

    async def close(self) -> None:
        """What was asked for is done first."""
        await asyncio.to_thread(self._thread.shutdown)
        if self._connection is not None:
            self._connection.close()

    def _call(self, function: Callable[[T], R]) -> R:
        if self._broken is not None:
            raise self._broken
        try:
            if self._tables is None:
                self._tables = self._open()
            with storage_errors(self.path):
                return function(self._tables)
        except StorageError as error:
            if error.code == "storage_damaged":
                self._broken = error
                log.error("%s. %s", error, self._without)
            raise

    def _open(self) -> T:
        if self._connection is None:
            self._connection = open_database(self.path, self._schema)
        with storage_errors(self.path):
            return self._make(self._connection)


def open_database(path: Path, schema: Schema) -> sqlite3.Connection:
    """Opens or makes it, and reads all of it once to see that it is whole. For use in any one thread at a time.

    Raises:
        StorageError: damaged, made by a later version, or not to be opened. It is left as it is.
    """
    with storage_errors(path):
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            _check(connection, path, schema)
        except BaseException:
            connection.close()
            raise
        return connection


def _check(connection: sqlite3.Connection, path: Path, schema: Schema) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > schema.version:
        raise StorageError(f"{path} was made by a later version of pinnate", code="storage_damaged")
    found = [row[0] for row in connection.execute("PRAGMA quick_check(1)")]
    if found != ["ok"]:
        raise _damaged(path, found[0])
    if version == 0:
        connection.executescript(f"BEGIN; {schema.sql} PRAGMA user_version = {schema.version}; COMMIT;")


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """All or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # a full disk has rolled it back already
            connection.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """SQLite's and the file system's errors as StorageError."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", None)
        if code in _FULL:
            raise _full(path, str(error)) from error
        if code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise _damaged(path, str(error)) from error
        raise StorageError(f"{path}: {error}", code="storage_error") from error
    except OSError as error:
        if error.errno in _FULL_ERRNO:
            raise _full(path, error.strerror or "") from error
        raise StorageError(f"{path}: {error.strerror}", code="storage_error") from error


def _full(path: Path, why: str) -> StorageError:
    return StorageError(f"no room in the data directory {path.parent}: {why}", code="storage_full")


def _damaged(path: Path, why: str) -> StorageError:
    return StorageError(
        f"the database {path} is damaged ({why}); nothing was changed. Restore it, or move it away, and start again",
        code="storage_damaged",
    )
