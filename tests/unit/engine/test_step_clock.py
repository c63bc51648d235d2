"""The loop's clock, over a time that the test moves."""

from __future__ import annotations

import pytest

from pinnate.engine import step_clock
from pinnate.engine.step_clock import StepClock


def test_it_runs_in_steps_alone_and_may_be_read_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(step_clock, "perf_counter", lambda: now)
    clock = StepClock()
    assert (clock.step_seconds, clock.execute_seconds) == (0, 0)
    for step in range(3):
        now += 50  # idle
        assert clock.step_seconds == 2 * step
        clock.start()
        now += 1
        assert clock.step_seconds == 2 * step + 1
        now += 1
        clock.stop()
    now += 50
    assert clock.step_seconds == 6
