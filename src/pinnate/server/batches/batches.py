"""What a batch goes through, from validating to its end.

    validating -> in_progress -> finalizing -> completed
        |              |             |
      failed      cancelling     expired         (cancelling also from validating; expired when its window is over)
                       |
                   cancelled

Knows: statuses, times, files of a batch. Must not know: HTTP, how requests run (`runner.py`). One batch is checked and
one runs at a time, each the oldest that waits; what has only to be brought to its end does not wait for either. Every
status is stored before it is acted on, so that a batch whose server was killed is taken up where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pinnate.core.errors import PinnateError
from pinnate.core.logs import log_fault
from pinnate.server.batches.finalize import write_outputs
from pinnate.server.batches.progress import Progress
from pinnate.server.batches.runner import BatchRunner
from pinnate.server.batches.storage import Storage, remove
from pinnate.server.batches.tables import UNFINISHED, Tables
from pinnate.server.batches.validate import Validator
from pinnate.server.endpoint import Route
from pinnate.server.errors import HTTPStatusError, StorageError
from pinnate.server.protocol.batches import Batch, BatchError, BatchErrors, RequestCounts
from pinnate.server.state import ServerState

LOOK_SECONDS = 30.0  # how often it is looked for what has expired
RETRY_SECONDS = 5.0
CANCELLABLE = ("validating", "in_progress")

log = logging.getLogger("pinnate.server")


class Batches:
    """All batches of one data directory. Belongs to one event loop."""

    def __init__(self, state: ServerState, storage: Storage, routes: Mapping[str, Route]) -> None:
        self.storage = storage
        self.progress = Progress()
        self._state = state
        self._routes = routes
        self._wake = {name: asyncio.Event() for name in ("validating", "running", "ending")}
        self._loops: list[asyncio.Task[None]] = []
        state.metrics.sources.append(self.progress.collect)
        self._current: dict[str, asyncio.Task[None]] = {}  # what is being checked, run or ended, by the batch's id

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(self._routes)

    def start(self) -> None:
        """Takes up what is not finished. Requests are sent once the engine is ready."""
        self._loops = [
            asyncio.create_task(self._loop("validating", self._validate_next), name="batches-validate"),
            asyncio.create_task(self._loop("running", self._run_next), name="batches-run"),
            asyncio.create_task(self._loop("ending", self._end_next), name="batches-end"),
        ]

    async def stop(self) -> None:
        """Ends what is under way; another `start`, in this process or the next, goes on with it."""
        for task in self._loops:
            task.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)

    async def create(self, owner: str, batch: Batch, output_seconds: int | None) -> Batch:
        await self.storage.call(lambda tables: tables.add_batch(owner, batch, output_seconds))
        log.info("%s: made of %s for %s", batch.id, batch.input_file_id, batch.endpoint)
        self._wake["validating"].set()
        return batch

    async def cancel(self, owner: str, batch_id: str) -> Batch:
        """
        Raises:
            NotFoundError: no such batch.
            HTTPStatusError: 409, it is over.
        """
        batch = await self.storage.call(lambda tables: tables.get_batch(owner, batch_id))
        if batch.status not in UNFINISHED:
            raise HTTPStatusError(409, f"a batch that is {batch.status} cannot be cancelled", code="batch_finished")
        changes = {"status": "cancelling", "cancelling_at": _now()}
        batch = await self.storage.call(lambda tables: tables.change_batch(batch_id, CANCELLABLE, **changes))
        if batch.status == "cancelling" and batch_id in self._current:
            self._current[batch_id].cancel()
        self._wake["ending"].set()
        return batch

    # ------------------------------------------------------------------ loops

    async def _loop(self, name: str, work: Callable[[], Awaitable[bool]]) -> None:
        """Calls `work` until it finds nothing to do, again when it is woken or some time has passed."""
        wake = self._wake[name]
        while True:
            wake.clear()
            try:
                if await work():
                    continue
            except StorageError as error:
                if error.code == "storage_damaged":
                    return  # said by Storage; every call says it again
                log.error("batches: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            except PinnateError as error:
                log.error("batches: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            with contextlib.suppress(TimeoutError):  # not wait_for, which in Python 3.11 may swallow a cancellation
                async with asyncio.timeout(LOOK_SECONDS):
                    await wake.wait()

    async def _validate_next(self) -> bool:
        return await self._attend_oldest("validating", self._validate)

    async def _run_next(self) -> bool:
        return await self._attend_oldest("in_progress", self._run)

    async def _attend_oldest(self, status: str, work: Callable[[Batch], Awaitable[None]]) -> bool:
        """Whether a batch of this status was there that nobody attends to, and something was done about the oldest."""
        for batch_id, its in await self.storage.call(Tables.unfinished):
            if its == status and batch_id not in self._current:
                await self._attend(batch_id, self._work_if(status, batch_id, work))
                return True
        return False

    async def _end_next(self) -> bool:
        """The same for what only has to be brought to its end."""
        await self._remove_expired_files()
        for batch_id, status in await self.storage.call(Tables.unfinished):
            if status == "validating" or (status == "in_progress" and not await self._is_expired(batch_id)):
                continue
            if batch_id not in self._current:
                await self._attend(batch_id, self._work_if(status, batch_id, self._finish))
                return True
        return False

    async def _work_if(self, status: str, batch_id: str, work: Callable[[Batch], Awaitable[None]]) -> None:
        """The status is read once more: it may have changed before `cancel` could find who attends to the batch."""
        batch = await self._get(batch_id)
        if batch.status == status:
            await work(batch)

    async def _attend(self, batch_id: str, work: Awaitable[None]) -> None:
        """Does `work`, which `cancel` may end. A fault of ours fails the batch, not the others."""
        task = asyncio.ensure_future(work)
        self._current[batch_id] = task
        try:
            await asyncio.wait((task,))
        finally:
            task.cancel()
            await asyncio.wait((task,))
            del self._current[batch_id]
            for wake in self._wake.values():  # its next status may be any loop's
                wake.set()
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, StorageError) and error.code == "storage_error":  # its file is gone or unreadable
            log.error("%s failed: %s", batch_id, error)
            await self._fail(batch_id, [BatchError(code=error.code, message=str(error))])
        elif isinstance(error, PinnateError):
            raise error
        elif error is not None:
            log_fault(log, batch_id, error)
            await self._fail(batch_id, [BatchError(code="internal_error", message="internal error, see the log")])

    # ------------------------------------------------------------------ steps

    async def _validate(self, batch: Batch) -> None:
        validator = Validator(self._state, self.storage, self._routes, batch)
        errors = await validator.run()
        if errors:
            log.warning("%s: faults in its file: %d, the first: %s", batch.id, validator.num_errors, errors[0].message)
            await self._fail(batch.id, errors)
            return
        changes = {
            "status": "in_progress", "in_progress_at": _now(), "model": validator.model,
            "request_counts": RequestCounts(total=validator.num_requests),
        }  # fmt: skip
        await self.storage.call(lambda tables: tables.change_batch(batch.id, ("validating",), **changes))

    async def _run(self, batch: Batch) -> None:
        runner = BatchRunner(self._state, self.storage, self._routes, batch.id, batch.input_file_id, self.progress)
        try:
            async with asyncio.timeout(batch.expires_at - time.time()):
                await runner.run()
        except TimeoutError:
            log.warning("%s: its time is over", batch.id)
        await self._finish(await self._get(batch.id))

    async def _finish(self, batch: Batch) -> None:
        """Writes the output files of a batch that ran to its end, was cancelled, or whose time is over."""
        end = await self._end_of(batch)
        if batch.status == "in_progress":
            changes = {"status": "finalizing", "finalizing_at": _now()}
            batch = await self.storage.call(lambda tables: tables.change_batch(batch.id, ("in_progress",), **changes))
            if batch.status == "cancelling":  # at the last moment
                end = "cancelled"
        output, errors = await write_outputs(self.storage, batch, end)
        files = [file for file in (output, errors) if file is not None]
        last: dict[str, Any] = {
            "status": end, f"{end}_at": _now(),
            "output_file_id": output and output.id, "error_file_id": errors and errors.id,
        }  # fmt: skip
        try:
            batch = await self.storage.call(lambda tables: tables.finish_batch(batch.id, files, **last))
        except BaseException:
            remove(*(self.storage.content(file.id) for file in files))
            raise
        counts = batch.request_counts
        log.info("%s: %s, %d of %d completed, %d failed", batch.id, end, counts.completed, counts.total, counts.failed)

    async def _end_of(self, batch: Batch) -> str:
        if batch.status == "cancelling":
            return "cancelled"
        left = await self.storage.call(lambda tables: tables.unanswered(batch.id, after=0, limit=1))
        return "expired" if left else "completed"

    async def _fail(self, batch_id: str, errors: list[BatchError]) -> None:
        last: dict[str, Any] = {"status": "failed", "failed_at": _now(), "errors": BatchErrors(data=errors)}
        await self.storage.call(lambda tables: tables.finish_batch(batch_id, **last))

    # ------------------------------------------------------------------ help

    async def _is_expired(self, batch_id: str) -> bool:
        return (await self._get(batch_id)).expires_at <= time.time()

    async def _get(self, batch_id: str) -> Batch:
        return await self.storage.call(lambda tables: tables.get_batch(None, batch_id))

    async def _remove_expired_files(self) -> None:
        for owner, file_id in await self.storage.call(lambda tables: tables.expired_files(time.time())):
            try:
                await self.delete_file(owner, file_id)
            except HTTPStatusError:
                continue  # the input of a batch that is not finished

    async def delete_file(self, owner: str, file_id: str) -> None:
        """
        Raises:
            NotFoundError, HTTPStatusError: as Tables.delete_file.
        """
        await self.storage.call(lambda tables: tables.delete_file(owner, file_id))
        await self.storage.run(remove, self.storage.content(file_id))


def new_id(kind: str) -> str:
    return f"{kind}{uuid.uuid4().hex}"


def _now() -> int:
    return int(time.time())
