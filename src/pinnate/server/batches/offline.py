"""`pinnate run-batch`: a file of requests to a file of answers, without a server.

Knows: the order of such a run, the folder beside the output that makes it resumable. Must not know: flags. It is a
batch like any other, in a data directory of its own that is removed when the output is written. A run that is cut off
goes on where it was when it is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from pinnate.core.config import EngineConfig
from pinnate.core.errors import ConfigError, InvalidRequestError
from pinnate.engine.async_engine import AsyncEngine
from pinnate.engine.child import EngineChild
from pinnate.server.batches.batches import Batches, new_id
from pinnate.server.batches.lines import parse, split
from pinnate.server.batches.storage import Storage, write_whole
from pinnate.server.batches.tables import UNFINISHED
from pinnate.server.batches.validate import ANY_ENDPOINT
from pinnate.server.endpoint import Route
from pinnate.server.protocol.batches import Batch, BatchError, FileObject, RequestCounts
from pinnate.server.settings import ServerSettings
from pinnate.server.state import Phase, ServerState

WORK_SUFFIX = ".partial"  # of the data directory, beside the output
LOOK_SECONDS = 0.1
FOREVER = 10 * 365 * 86_400  # seconds: the batch does not expire
OWNER = ""

Report = Callable[[RequestCounts], None]


class _Id(msgspec.Struct):
    custom_id: str


class _Place(NamedTuple):
    file: BinaryIO
    offset: int
    size: int


async def run_batch(
    config: EngineConfig,
    settings: ServerSettings,
    routes: Mapping[str, Route],
    files: tuple[Path, Path],
    report: Report,
) -> RequestCounts:
    """Answers the requests of `files[0]` in `files[1]`, a line for each, in the order of the input.

    `report` is called with the counts now and then.

    Raises:
        ConfigError: the files cannot be used, or the unfinished run beside the output is one of another input.
        InvalidRequestError: the input has faults; with the first one's line.
        ModelError, EngineDeadError: as `AsyncEngine.start`.
    """
    source, target = files
    work = target.with_name(target.name + WORK_SUFFIX)
    child = EngineChild(config)  # loads the model while the input is copied
    starting = asyncio.create_task(AsyncEngine.start(config, child))
    try:
        storage = Storage(work, "the unfinished run in")
        try:
            state = ServerState(config.model, settings)
            batches = Batches(state, storage, routes)
            batch = await _find_or_make(storage, source, config)
            state.engine = await starting
            state.phase = Phase.SERVING
            batch = await _run(batches, batch, report)
            if batch.status == "completed":
                await storage.run(_write, storage, batch, target, settings.max_body_bytes)
        finally:
            await storage.close()
    finally:
        starting.cancel()
        await asyncio.wait((starting,))
        if not starting.cancelled() and starting.exception() is None:
            await starting.result().close()
    await asyncio.to_thread(shutil.rmtree, work)
    if batch.errors is not None:
        raise _refusal(source, batch.errors.data)
    return batch.request_counts


async def _find_or_make(storage: Storage, source: Path, config: EngineConfig) -> Batch:
    """The batch of an earlier run that did not come to its end, or a new one."""
    try:
        facts = await asyncio.to_thread(_facts, source, config)
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror}") from None
    known, _ = await storage.call(lambda tables: tables.list_batches(OWNER, after=None, limit=1))
    if known:
        earlier = known[0].metadata or {}
        changed = [name for name, value in facts.items() if earlier.get(name) != value]
        if changed:
            what = " and ".join(changed)
            raise ConfigError(f"{storage.folder} is an unfinished run with another {what}: remove it or run that again")
        return known[0]
    file_id, now = new_id("file-"), int(time.time())
    path = storage.content(file_id)
    await storage.run(shutil.copyfile, source, path)
    file = FileObject(id=file_id, bytes=path.stat().st_size, created_at=now, filename=source.name, purpose="batch")
    batch = Batch(
        id=new_id("batch_"),
        endpoint=ANY_ENDPOINT,
        input_file_id=file_id,
        completion_window="",
        created_at=now,
        expires_at=now + FOREVER,
        metadata=facts,
    )
    await storage.call(lambda tables: tables.add_file(OWNER, file))
    await storage.call(lambda tables: tables.add_batch(OWNER, batch, None))
    return batch


async def _run(batches: Batches, batch: Batch, report: Report) -> Batch:
    batches.start()
    try:
        while batch.status in UNFINISHED:
            await asyncio.sleep(LOOK_SECONDS)
            batch = await batches.storage.call(lambda tables: tables.get_batch(OWNER, batch.id))  # noqa: B023
            report(batch.request_counts)
    finally:
        await batches.stop()
    return batch


def _write(storage: Storage, batch: Batch, target: Path, max_line_bytes: int) -> None:
    """Answers and errors in one file, in the order of the input; it appears whole."""
    part = storage.folder / "output"
    with contextlib.ExitStack() as stack:
        places: dict[str, _Place] = {}
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id is not None:
                places |= _places(stack.enter_context(storage.content(file_id).open("rb")))
        lines = stack.enter_context(storage.content(batch.input_file_id).open("rb"))
        output = stack.enter_context(part.open("wb"))
        for _, raw in split(lines, max_line_bytes):
            assert raw is not None
            place = places[parse(raw).custom_id]
            place.file.seek(place.offset)
            output.write(place.file.read(place.size))
    write_whole(target, part)


def _places(file: BinaryIO) -> Iterator[tuple[str, _Place]]:
    offset = 0
    for line in file:
        yield msgspec.json.decode(line, type=_Id).custom_id, _Place(file, offset, len(line))
        offset += len(line)


def _facts(source: Path, config: EngineConfig) -> dict[str, str]:
    """What all answers of one run must have in common, kept as the batch's metadata."""
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "input": digest,
        "model": config.model,
        **{name: str(getattr(config, name)) for name in ("dtype", "quantization", "kv_cache_dtype", "executor")},
    }


def _refusal(source: Path, errors: list[BatchError]) -> InvalidRequestError:
    first = errors[0]
    where = "" if first.line is None else f" line {first.line}"
    more = f" ({len(errors) - 1} more faults)" if len(errors) > 1 else ""
    return InvalidRequestError(f"{source}{where}: {first.message}{more}", param=first.param, code=first.code)
