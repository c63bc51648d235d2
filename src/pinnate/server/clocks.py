"""Clocks: how long one job may wait and run, and when its client is told that it still lives.

Knows: the job's streams, the limits. Must not know: what is sent, HTTP. A limit that is reached ends the streams with
an error, which their consumer gets where it waits for output.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pinnate.server.errors import TimeLimitError
from pinnate.server.limits import ServerLimits

if TYPE_CHECKING:
    from pinnate.engine.stream import RequestStream


class Clocks:
    """Runs from its making to `close`. `queue_seconds` tells how long the present queue will take."""

    def __init__(
        self, streams: Sequence[RequestStream], limits: ServerLimits, queue_seconds: Callable[[], float]
    ) -> None:
        self._streams = streams
        self._limits = limits
        self._queue_seconds = queue_seconds
        self._loop = asyncio.get_running_loop()
        self._written = self._loop.time()
        self._timers: list[asyncio.TimerHandle] = []
        if limits.queue_timeout is not None:
            self._timers.append(self._loop.call_later(limits.queue_timeout, self._end_waiting))
        if limits.request_timeout is not None:
            self._timers.append(self._loop.call_later(limits.request_timeout, self._end_all))
        self._pulse: asyncio.TimerHandle | None = None

    def start_pulse(self) -> None:
        """From here on the first stream is nudged wherever nothing was written for `keep_alive_interval`."""
        rest = self._written + self._limits.keep_alive_interval - self._loop.time()
        if rest <= 0:
            self._streams[0].nudge()
            rest = self._limits.keep_alive_interval
        self._pulse = self._loop.call_later(rest, self.start_pulse)

    def written(self) -> None:
        """The client has got something just now."""
        self._written = self._loop.time()

    def close(self) -> None:
        for timer in (*self._timers, self._pulse):
            if timer is not None:
                timer.cancel()

    def _end_waiting(self) -> None:
        """Prompts of one request stand or fall together."""
        if any(stream.is_waiting for stream in self._streams):
            message = f"no room was found in {self._limits.queue_timeout:g} s in the queue"
            self._fail(TimeLimitError(message, code="queue_timeout", retry_after=self._queue_seconds()))

    def _end_all(self) -> None:
        message = f"the request was not complete after {self._limits.request_timeout:g} s"
        self._fail(TimeLimitError(message, code="request_timeout"))

    def _fail(self, error: TimeLimitError) -> None:
        for stream in self._streams:
            stream.fail(error)
