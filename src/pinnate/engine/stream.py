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

    async def take(self) -> OutputDelta | None:
        """The next delta, None at the end. Safe to cancel: nothing is lost.

        Raises:
            EngineError: the engine failed while it worked on this request.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._pending.pop(next(iter(self._pending)))


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
        abort: Callable[[], None],
        stop: Callable[[], None] | None = None,
    ) -> None:
        self.request_id = request_id
        self._channel = channel
        self._place = place
        self._abort = abort
        self._stop = stop or abort

    @property
    def is_waiting(self) -> bool:
        """Whether the engine has computed nothing of it so far."""
        return self._place.is_waiting

    def abort(self) -> None:
        """Tells the engine to stop; the iteration ends after what has arrived. No effect on an ended request."""
        self._abort()

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
