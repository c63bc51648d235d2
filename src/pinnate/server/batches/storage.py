"""The folder of --data-dir: its lock, the database of files and batches, the files' contents.

    DIR/lock               held while a server uses the folder
    DIR/batches.sqlite     (and -wal, -shm)
    DIR/responses.sqlite   (likewise) stored responses, which are not this module's
    DIR/files/file-...     contents; what has no row in the database is removed at the next start
    DIR/files/*.part       not finished, likewise

Knows: paths, the lock. Must not know: what rows mean, the engine. The event loop never waits for the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import IO, ParamSpec, TypeVar

from pinnate.core.errors import ConfigError
from pinnate.server.batches.tables import SCHEMA, Tables
from pinnate.server.database import Database, storage_errors

P = ParamSpec("P")
R = TypeVar("R")

DATABASE = "batches.sqlite"
PART = ".part"


class Storage:
    """Made at start, before anything is served: the folder must be usable and nobody else's."""

    def __init__(self, folder: Path, name: str = "--data-dir") -> None:
        """`name`: what errors call the folder.

        Raises:
            ConfigError: the folder cannot be made, written, or is in use by another process.
        """
        self.folder = folder
        self._files = folder / "files"
        try:
            for each in (folder, self._files):  # prompts are in there: for the server's user alone
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock: IO[bytes] = (folder / "lock").open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ConfigError(f"{name} {folder}: another process uses it") from None
        except OSError as error:
            raise ConfigError(f"{name} {folder}: {error.strerror}") from None
        without = "/v1/files and /v1/batches are off"
        self._database = Database(folder / DATABASE, SCHEMA, self._make_tables, without)

    async def open(self) -> None:
        """
        Raises:
            StorageError: the database cannot be used; so does every later `call`.
        """
        await self._database.open()

    async def call(self, function: Callable[[Tables], R]) -> R:
        """`function` of the tables, in the thread.

        Raises:
            StorageError: the disk is full, the database is damaged; and what `function` raises.
        """
        return await self._database.call(function)

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """A function that reads or writes files of the folder, in another thread than the database's: a slow upload
        must not keep results from being stored."""

        def guarded() -> R:
            with storage_errors(self._files):
                return function(*args, **kwargs)

        return await asyncio.to_thread(guarded)

    def content(self, file_id: str) -> Path:
        """Where the bytes of a file are. `file_id` is one that the database knows."""
        return self._files / file_id

    def unfinished(self, file_id: str) -> Path:
        """Where they are written before they are all there."""
        return self._files / (file_id + PART)

    async def close(self) -> None:
        """What was asked for is done first."""
        await self._database.close()
        self._lock.close()

    def _make_tables(self, connection: sqlite3.Connection) -> Tables:
        tables = Tables(connection)
        self._remove_leftovers(tables.file_ids())
        return tables

    def _remove_leftovers(self, known: set[str]) -> None:
        """Contents without a row: of uploads and outputs that were cut off."""
        for path in self._files.iterdir():
            if path.name not in known:
                path.unlink()


def write_whole(path: Path, part: Path) -> None:
    """Makes a finished `part` the file: after this it is there, whole, whatever happens to the machine."""
    descriptor = os.open(part, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    part.rename(path)


def remove(*paths: Path) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
