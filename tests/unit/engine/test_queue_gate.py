"""The queue's door: counts, the two limits, and when to come again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinnate.core.errors import QueueFullError
from pinnate.engine.queue_gate import Place, QueueGate
from pinnate.engine.turnover import MAX_NOTES, WINDOW_SECONDS, Turnover


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def refusal(gate: QueueGate, max_sequences: int, max_tokens: int | None = None, prompt: int = 0) -> QueueFullError:
    with pytest.raises(QueueFullError) as caught:
        gate.check(max_sequences, max_tokens, prompt)
    return caught.value


def test_sequences_are_counted_until_their_request_leaves() -> None:
    clock = Clock()
    gate = QueueGate(clock)
    places = [Place(2, 10) for _ in range(6)]
    for place in places[:-1]:
        gate.check(12, None)
        gate.enter(place)
    gate.check(11, None)
    gate.enter(places[-1])
    assert "12 sequences are in flight, the limit is 12" in str(refusal(gate, 12))
    clock.now += 4
    gate.leave(places[0])
    gate.leave(places[1])
    gate.check(12, None)
    clock.now += 4  # 4 sequences left in 8 s, 3 must leave
    assert refusal(gate, 6).retry_after == pytest.approx(6.0)


def test_waiting_tokens_are_counted_until_the_request_starts() -> None:
    clock = Clock()
    gate = QueueGate(clock)
    gate.check(99, 100, 5000)  # alone, it would be refused for ever
    first, second = Place(1, 60), Place(1, 30)
    gate.enter(first)
    gate.check(99, 100, 40)
    gate.enter(second)
    error = refusal(gate, 99, 100, 11)
    assert str(error) == "90 prompt tokens wait and this prompt has 11, the limit is 100"
    gate.check(99, 100)
    clock.now += 3
    gate.start(first)
    gate.start(first)
    assert gate.num_waiting_tokens == 30
    assert refusal(gate, 99, 100, 90).retry_after == pytest.approx(20 * 3 / 60)
    gate.leave(second)
    assert (gate.num_waiting_tokens, gate.num_sequences) == (0, 1)


def test_nothing_has_left_yet() -> None:
    clock = Clock()
    gate = QueueGate(clock)
    gate.enter(Place(1, 1))
    clock.now += 9
    assert refusal(gate, 1).retry_after == pytest.approx(9)


def test_idle_time_and_the_distant_past_do_not_count() -> None:
    clock = Clock()
    turnover = Turnover(clock)
    turnover.note(1)
    clock.now += 1000
    turnover.begin()
    clock.now += 2
    turnover.note(4)
    assert turnover.seconds_for(2) == pytest.approx(1.0)
    clock.now += WINDOW_SECONDS
    turnover.note(10)
    clock.now += 1
    assert turnover.seconds_for(1) == pytest.approx(WINDOW_SECONDS / 10)
    assert turnover.seconds_for(-3) == 0


@given(st.lists(st.tuples(st.floats(0.001, 3), st.integers(1, 50)), min_size=1, max_size=3 * MAX_NOTES))
def test_the_rate_is_that_of_some_stretch_of_the_past(notes: list[tuple[float, int]]) -> None:
    clock = Clock()
    turnover = Turnover(clock)
    rates = []
    for wait, amount in notes:
        clock.now += wait
        turnover.note(amount)
        rates.append(amount / wait)
    slowest, fastest = min(rates), max(rates)
    longest = max(wait for wait, _ in notes)
    # A window's edge may cut the first stretch: at most one note more or less than its time accounts for.
    assert turnover.seconds_for(1) <= (1 / slowest) + longest
    assert turnover.seconds_for(1) >= 1 / (fastest + 50 / min(WINDOW_SECONDS, clock.now - 100.0) + 1e-9) - 1e-9


@pytest.mark.parametrize("background", [0, 4 * MAX_NOTES])
def test_background_work_leaves_the_rates_of_live_requests_as_they_are(background: int) -> None:
    clock = Clock()
    gate = QueueGate(clock)
    for place in [Place(1, 10) for _ in range(4)]:
        stays = Place(1, 10)
        gate.enter(stays)
        gate.enter(place)
        clock.now += 1
        gate.leave(place)
    for place in [Place(0, 0) for _ in range(background)]:
        gate.enter(place)
        gate.start(place)
        gate.leave(place)
    assert (gate.num_sequences, gate.num_waiting_tokens) == (4, 40)
    assert gate.waiting_seconds() == pytest.approx(4.0)  # 40 tokens left in 4 s
    assert refusal(gate, 4).retry_after == pytest.approx(1.0)  # and 4 sequences
