"""The database of the data directory: opened, checked, its errors in our words.

Knows: SQLite, the schema, what its error codes mean. Must not know: what the rows mean (`tables.py`), threads.

Write-ahead log, synchronous NORMAL: what is committed survives the end of this process at any moment, kill -9 included.
Should the machine lose power, the last transactions may be undone, as a whole and in order; their requests run again.
"""

from __future__ import annotations

import contextlib
import errno
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from pinnate.server.errors import StorageError

SCHEMA_VERSION = 1
_SCHEMA = """
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
"""
_FULL = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE})
_FULL_ERRNO = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def open_database(path: Path) -> sqlite3.Connection:
    """Opens or makes it, and reads all of it once to see that it is whole. For use in any one thread at a time.

    Raises:
        StorageError: damaged, made by a later version, or not to be opened. It is left as it is.
    """
    with storage_errors(path):
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            _check(connection, path)
        except BaseException:
            connection.close()
            raise
        return connection


def _check(connection: sqlite3.Connection, path: Path) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise StorageError(f"{path} was made by a later version of pinnate", code="storage_damaged")
    found = [row[0] for row in connection.execute("PRAGMA quick_check(1)")]
    if found != ["ok"]:
        raise _damaged(path, found[0])
    if version == 0:
        connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")


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
