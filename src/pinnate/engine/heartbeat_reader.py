"""HeartbeatReader: how long ago the engine process showed that it is alive (heartbeat.py is the other end).

Knows: the pipe, the event loop. Must not know: what follows from a silence.
"""

from __future__ import annotations

import asyncio
import os
from time import monotonic


class HeartbeatReader:
    """Belongs to the event loop in which it is made. The pipe stays the caller's to close, after `close`."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._latest = monotonic()
        self._loop = asyncio.get_running_loop()
        os.set_blocking(pipe, False)
        self._loop.add_reader(pipe, self._read)

    @property
    def age(self) -> float:
        """Seconds since the latest beat, or since the start."""
        return monotonic() - self._latest

    def close(self) -> None:
        self._loop.remove_reader(self._pipe)

    def _read(self) -> None:
        if os.read(self._pipe, 4096):
            self._latest = monotonic()
        else:  # the process has ended
            self.close()
