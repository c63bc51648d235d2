"""QueueGate: how much waits and runs, and whether more is taken.

Knows: counts of sequences and prompt tokens, the two limits, how fast both leave. Must not know: requests' content,
processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from pinnate.core.errors import QueueFullError
from pinnate.engine.turnover import Turnover


@dataclass(slots=True)
class Place:
    """What one request takes up."""

    num_sequences: int
    num_prompt_tokens: int
    is_waiting: bool = True  # no step has computed anything of it


class QueueGate:
    """A request `enter`s, `start`s once it is computed, `leave`s at its end, however that comes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_sequences = 0
        self.num_waiting_tokens = 0
        self._ends = Turnover(clock)  # of sequences
        self._starts = Turnover(clock)  # of prompt tokens

    def check(self, max_sequences: int, max_waiting_tokens: int | None, num_prompt_tokens: int = 0) -> None:
        """A prompt longer than the limit is taken where nothing else waits: it could never be taken otherwise.

        Raises:
            QueueFullError: the limit is reached; with the numbers, and when there should be room.
        """
        excess = self.num_sequences + 1 - max_sequences
        if excess > 0:
            raise QueueFullError(
                f"{self.num_sequences} sequences are in flight, the limit is {max_sequences}",
                retry_after=self._ends.seconds_for(excess),
            )
        if max_waiting_tokens is None or not self.num_waiting_tokens:
            return
        excess = self.num_waiting_tokens + max(num_prompt_tokens, 1) - max_waiting_tokens
        if excess > 0:
            more = f" and this prompt has {num_prompt_tokens}" if num_prompt_tokens else ""
            raise QueueFullError(
                f"{self.num_waiting_tokens} prompt tokens wait{more}, the limit is {max_waiting_tokens}",
                retry_after=self._starts.seconds_for(min(excess, self.num_waiting_tokens)),
            )

    def waiting_seconds(self) -> float:
        """Until all that wait now have started."""
        return self._starts.seconds_for(self.num_waiting_tokens)

    def enter(self, place: Place) -> None:
        if not self.num_sequences:
            self._ends.begin()
        if not self.num_waiting_tokens:
            self._starts.begin()
        self.num_sequences += place.num_sequences
        self.num_waiting_tokens += place.num_prompt_tokens

    def start(self, place: Place) -> None:
        if place.is_waiting:
            place.is_waiting = False
            self.num_waiting_tokens -= place.num_prompt_tokens
            self._starts.note(place.num_prompt_tokens)

    def leave(self, place: Place) -> None:
        self.start(place)
        self.num_sequences -= place.num_sequences
        self._ends.note(place.num_sequences)
