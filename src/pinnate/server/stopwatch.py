"""Stopwatch: where the time of one job went, for clients that ask for it (`return_timings`).

Knows: outputs as they pass by. Must not know: metrics, shapes of answers.
"""

from __future__ import annotations

import time

from pinnate.server.generation import Job, Output
from pinnate.server.protocol.common import Timings


class Stopwatch:
    """Fed with every output of a job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._cached = [0] * len(job.prompts)
        self._generated = 0
        self._first: float | None = None
        self._last = job.arrival

    def add(self, outputs: list[Output]) -> None:
        self._last = time.monotonic()
        if self._first is None:
            self._first = self._last
        for number, delta in outputs:
            self._cached[number] = max(self._cached[number], delta.num_cached_tokens)
            self._generated += len(delta.token_ids)

    def timings(self) -> Timings:
        first = self._last if self._first is None else self._first
        cached = sum(self._cached)
        computed = sum(len(prompt.token_ids) for prompt in self._job.prompts) - cached
        prompt_ms = 1000 * (first - self._job.arrival)
        predicted_ms = 1000 * (self._last - first)
        return Timings(
            cache_n=cached,
            prompt_n=computed,
            prompt_ms=prompt_ms,
            prompt_per_token_ms=_ratio(prompt_ms, computed),
            prompt_per_second=_ratio(1000 * computed, prompt_ms),
            predicted_n=self._generated,
            predicted_ms=predicted_ms,
            predicted_per_token_ms=_ratio(predicted_ms, self._generated),
            predicted_per_second=_ratio(1000 * self._generated, predicted_ms),
        )


def _ratio(value: float, by: float) -> float | None:
    return value / by if by > 0 else None
