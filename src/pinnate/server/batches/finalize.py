"""The output and error files of a batch.

Knows: their lines. Must not know: when a batch ends. A file appears whole or not at all: it is written beside its name,
and its row is made together with the batch's last status.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import BinaryIO

from pinnate.server.batches.request import never_run
from pinnate.server.batches.storage import Storage, remove, write_whole
from pinnate.server.batches.tables import Tables
from pinnate.server.protocol.batches import Batch, FileObject

CHUNK = 256  # lines
_NEVER_RUN = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed: the batch was cancelled before."),
}

_Rows = list[tuple[int, bytes]]


async def write_outputs(storage: Storage, batch: Batch, end: str) -> tuple[FileObject | None, FileObject | None]:
    """The files of answers and of errors, None where there are none; requests that never ran are among the errors.

    Raises:
        StorageError: no room; nothing is left behind.
    """

    def answers(ok: bool) -> Callable[[Tables, int], _Rows]:
        return lambda tables, after: tables.outputs(batch.id, ok=ok, after=after, limit=CHUNK)

    def left(tables: Tables, after: int) -> _Rows:
        rows = tables.unanswered(batch.id, after=after, limit=CHUNK)
        return [(row.number, never_run(row.custom_id, *_NEVER_RUN[end])) for row in rows]

    seconds = await storage.call(lambda tables: tables.output_seconds(batch.id))
    output = await _write(storage, [answers(True)], f"{batch.id}_output.jsonl", seconds)
    try:
        sources = [answers(False), *([left] if end in _NEVER_RUN else [])]
        errors = await _write(storage, sources, f"{batch.id}_error.jsonl", seconds)
    except BaseException:
        if output is not None:
            remove(storage.content(output.id))
        raise
    return output, errors


async def _write(
    storage: Storage, sources: Sequence[Callable[[Tables, int], _Rows]], filename: str, seconds: int | None
) -> FileObject | None:
    file_id = f"file-{uuid.uuid4().hex}"
    part = storage.unfinished(file_id)
    size = 0
    try:
        file: BinaryIO = await storage.run(part.open, "wb")
        with file:
            for source in sources:
                size += await _copy(storage, source, file)
        if size:
            await storage.run(write_whole, storage.content(file_id), part)
    finally:
        remove(part)
    if not size:
        return None
    now = int(time.time())
    expires_at = None if seconds is None else now + seconds
    return FileObject(
        id=file_id, bytes=size, created_at=now, expires_at=expires_at, filename=filename, purpose="batch_output"
    )


async def _copy(storage: Storage, source: Callable[[Tables, int], _Rows], file: BinaryIO) -> int:
    """Returns the bytes written."""
    after = size = 0
    while rows := await storage.call(lambda tables: source(tables, after)):  # noqa: B023
        size += await storage.run(_append, file, [row[1] for row in rows])
        after = rows[-1][0]
    return size


def _append(file: BinaryIO, lines: list[bytes]) -> int:
    file.writelines(lines)
    file.flush()
    return sum(map(len, lines))
