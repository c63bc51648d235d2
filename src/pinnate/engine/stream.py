"""RequestStream: one request's outputs on their way to one consumer.

Knows: waiting, merging, leaving. Must not know: the engine, text.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from pinnate.core.errors import PinnateError
from pinnate.engine.output_processor import OutputDelta
from pinnate.engine.queue_gate import Place


class Channel:
    """Between the engine's reader task (put, end) and one consumer (take). Both in one event loop.

    Holds at most one delta of each choice: a slow consumer gets several steps in one, and memory stays bounded by the
    request's own output.
    """

    def __init__(self) -> None:
        self._pending: dict[int, OutputDelta] = {}
        self._error: PinnateError | None = None
        self._ended = False
        self._nudged = False
        self._changed = asyncio.Event()

    def put(self, delta: OutputDelta) -> None:
        before = self._pending.get(delta.index)
        self._pending[delta.index] = delta if before is None else before.merged_with(delta)
        self._changed.set()

    def end(self, error: PinnateError | None = None) -> None:
        """Nothing follows what has been put. With an error, the consumer gets it after that."""
        if not self._ended:
            self._ended, self._error = True, error
            self._changed.set()

    def nudge(self) -> None:
        """Lets whoever waits in `take_all` come back once with nothing, unless there is something."""
        self._nudged = True
        self._changed.set()

    async def take(self) -> OutputDelta | None:
        """The next delta, None at the end. Safe to cancel: nothing is lost.

        Raises:
            PinnateError: the stream was ended with it (EngineError: the engine failed while it worked on the request).
        """
        while not self._pending:
            if await self._wait():
                return None
        return self._pending.pop(next(iter(self._pending)))

    async def take_all(self) -> list[OutputDelta] | None:
        """What there is of each choice; empty after a nudge, None at the end. Otherwise as `take`."""
        self._nudged = False
        while not self._pending:
            if await self._wait():
                return None
            if self._nudged:
                break
        deltas = list(self._pending.values())
        self._pending.clear()
        return deltas

    async def _wait(self) -> bool:
        """Until something changes; whether the end has come."""
        if self._error is not None:
            raise self._error
        if self._ended:
            return True
        self._changed.clear()
        await self._changed.wait()
        return False


class RequestStream:
    """Async iterator of the OutputDeltas of one request, all its choices interleaved; ends when the last one has ended.

    Leaving an `async for` early (break, exception, cancellation of its task), `abort` or dropping the stream aborts the
    request, once.

    Raises (while iterating):
        EngineError: the engine failed while it worked on this request (EngineDeadError: its process ended).
    """

    def __init__(
        self,
        request_id: str,
        channel: Channel,
        place: Place,
        abort: Callable[[PinnateError | None], None],
        stop: Callable[[], None] | None = None,
    ) -> None:
        """`abort` ends the request here and in the engine, with an error for the consumer where one is given; `stop`
        asks the engine alone."""
        self.request_id = request_id
        self._channel = channel
        self._place = place
        self._abort = abort
        self._stop = stop or (lambda: abort(None))

    @property
    def is_waiting(self) -> bool:
        """Whether the engine has computed nothing of it so far."""
        return self._place.is_waiting

    def abort(self) -> None:
        """Tells the engine to stop; the iteration ends after what has arrived. No effect on an ended request."""
        self._abort(None)

    def fail(self, error: PinnateError) -> None:
        """The same, but the iteration ends with `error`."""
        self._abort(error)

    def nudge(self) -> None:
        """Lets whoever waits in `take_all` come back once with nothing, unless there is something."""
        self._channel.nudge()

    async def take_all(self) -> list[OutputDelta] | None:
        """What each choice has got since the last call; empty after a nudge, None at the end. Safe to cancel. The
        caller aborts the stream if it leaves early."""
        return await self._channel.take_all()

    def stop(self) -> None:
        """Asks the engine to end the request. Its consumer goes on until the choices end, with FinishReason.ABORT."""
        self._stop()

    async def __aiter__(self) -> AsyncIterator[OutputDelta]:
        try:
            while (delta := await self._channel.take()) is not None:
                yield delta
        finally:
            self.abort()

    async def __anext__(self) -> OutputDelta:
        delta = await self._channel.take()
        if delta is None:
            raise StopAsyncIteration
        return delta

    async def aclose(self) -> None:
        self.abort()

    def __del__(self) -> None:
        self.abort()
