"""StepClock: where the time of an engine's loop goes. Knows: seconds. Must not know: what is done in them."""

from __future__ import annotations

from time import perf_counter


class StepClock:
    """Runs from `start` to `stop` of each step. Both sums are over the engine's life, in seconds; `step_seconds`
    includes the step under way, so what is read in the middle of one is true."""

    def __init__(self) -> None:
        self.execute_seconds = 0.0
        self._step_seconds = 0.0
        self._started: float | None = None

    def start(self) -> None:
        self._started = perf_counter()

    def stop(self) -> None:
        self._step_seconds = self.step_seconds
        self._started = None

    @property
    def step_seconds(self) -> float:
        return self._step_seconds + (0.0 if self._started is None else perf_counter() - self._started)
