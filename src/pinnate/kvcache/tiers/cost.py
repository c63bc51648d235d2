"""Load or recompute: what is faster, by what was measured.

Knows: rates and one comparison. Must not know: where pages are, who asks.

A page that is loaded costs its bytes at the bandwidth of loads so far (reading, checking and copying it); one that is
computed again costs its tokens at the speed of the prompts so far. What was never measured counts as fast: the first
load measures, and it is ended early if it turns out slow. A bandwidth that is old counts as never measured, so
that a disk that was busy for a while gets another chance.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

MEMORY_SECONDS = 2.0  # of measured work; what is older counts for less and less
STALE_SECONDS = 60.0
LOAD_SECONDS = 0.002  # what a load delays its sequence by, however small: two more turns of the loop


class Rate:
    """Units of work per second, over the latest work. Written by one thread, read by any."""

    def __init__(self, clock: Callable[[], float] = monotonic, stale: float = float("inf")) -> None:
        self._clock = clock
        self._stale = stale
        self._seen: tuple[float, float, float] = (0.0, 0.0, 0.0)  # units, seconds, when

    def add(self, units: float, seconds: float) -> None:
        before_units, before_seconds, _ = self._seen
        keep = min(1.0, MEMORY_SECONDS / before_seconds) if before_seconds else 0.0
        self._seen = (before_units * keep + units, before_seconds * keep + seconds, self._clock())

    def seconds_for(self, units: float) -> float | None:
        """None: not measured, or long ago."""
        seen_units, seen_seconds, when = self._seen
        if not seen_units or self._clock() - when > self._stale:
            return None
        return units * seen_seconds / seen_units

    @property
    def per_second(self) -> float:
        """For people; 0: never measured."""
        seen_units, seen_seconds, _ = self._seen
        return seen_units / seen_seconds if seen_seconds else 0.0


class CostModel:
    """`prefill` in tokens, `load` and `copy` (out of the pool, at the step's expense) in pages."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.prefill = Rate(clock)
        self.load = Rate(clock, STALE_SECONDS)
        self.copy = Rate(clock)

    def prefers_load(self, num_tokens: int, num_pages: int, queued_pages: int = 0) -> bool:
        """Whether `num_pages` pages, behind others that wait to be loaded, are there sooner than `num_tokens` tokens
        are computed."""
        return self._load_wins(num_tokens, num_pages + queued_pages, LOAD_SECONDS)

    def goes_on(self, num_tokens: int, num_pages: int) -> bool:
        """Whether a load that has begun should go on to its last `num_pages` pages; also whether pages are worth
        keeping at all."""
        return self._load_wins(num_tokens, num_pages, 0.0)

    def prefers_swap(self, num_tokens: int, num_pages: int) -> bool:
        """Whether a sequence that gives up `num_pages` pages now should get them back by loading them."""
        return self._load_wins(num_tokens, num_pages, LOAD_SECONDS + (self.copy.seconds_for(num_pages) or 0.0))

    def _load_wins(self, num_tokens: int, num_pages: int, extra_seconds: float) -> bool:
        load = self.load.seconds_for(num_pages)
        compute = self.prefill.seconds_for(num_tokens)
        return load is None or compute is None or load + extra_seconds < compute
