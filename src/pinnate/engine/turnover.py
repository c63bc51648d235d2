"""Turnover: how fast requests leave, to tell those that are refused when to come again.

Knows: a clock, amounts that left. Must not know: what the amounts are (sequences that ended, prompt tokens whose wait
was over).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_SECONDS = 30.0
MAX_NOTES = 256


class Turnover:
    """A rate over the last WINDOW_SECONDS of work. While there is nothing to do no time is counted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._notes: deque[tuple[float, int]] = deque(maxlen=MAX_NOTES)
        self._since = clock()
        self._forgotten = self._since  # the latest note that the deque has dropped

    def begin(self) -> None:
        """Work has come where there was none."""
        self._notes.clear()
        self._since = self._forgotten = self._clock()

    def note(self, amount: int) -> None:
        """So much has left now. Nothing is no note: background work must not push those of live requests out."""
        if not amount:
            return
        if len(self._notes) == MAX_NOTES:
            self._forgotten = self._notes[0][0]
        self._notes.append((self._clock(), amount))

    def seconds_for(self, amount: int) -> float:
        """How long `amount` will take to leave, at the rate so far. Where nothing has left yet, the time it is taking
        is a fair guess for each unit of it."""
        now = self._clock()
        while self._notes and self._notes[0][0] < now - WINDOW_SECONDS:
            self._notes.popleft()
        begin = max(self._since, self._forgotten, now - WINDOW_SECONDS)
        left = sum(amount for _, amount in self._notes)
        return max(amount, 0) * (now - begin) / max(left, 1)
