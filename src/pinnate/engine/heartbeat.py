"""The engine process's heartbeat: a byte through a pipe, twice a second.

Knows: the pipe, whether the engine's loop gets on. Must not know: what the loop does. The beats come from a thread of
their own, so that a long step (which holds no GIL) does not stop them; a stopped or starved process does, and so does a
loop that has not come round for STUCK_SECONDS. That is longer than any step takes: no machine is so slow that it would
be ended for it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from time import monotonic

BEAT_SECONDS = 0.5
STUCK_SECONDS = 600.0


class Heart:
    """In the engine's process. Its loop calls `rest` before it sleeps and `work` whenever it goes on."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._working_since: float | None = clock()

    def work(self) -> None:
        self._working_since = self._clock()

    def rest(self) -> None:
        self._working_since = None

    @property
    def is_beating(self) -> bool:
        since = self._working_since
        return since is None or self._clock() - since < STUCK_SECONDS

    def start(self, pipe: int) -> None:
        """Beats into `pipe` for as long as this process lives and somebody may read it."""
        os.set_blocking(pipe, False)
        threading.Thread(target=self._beat, args=(pipe,), name="heartbeat", daemon=True).start()

    def _beat(self, pipe: int) -> None:
        pause = threading.Event()
        with contextlib.suppress(BrokenPipeError):  # nobody will read any more: the parent has gone
            while True:
                if self.is_beating:
                    with contextlib.suppress(BlockingIOError):  # full: they have not been read for hours
                        os.write(pipe, b".")
                pause.wait(BEAT_SECONDS)
