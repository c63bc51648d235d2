"""Queues: against a sorted list, whatever comes and goes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pinnate.core.request import BACKGROUND_PRIORITY, RequestStatus, Sequence
from pinnate.scheduler.queues import Queues, split_background
from tests.unit.scheduler.helpers import make_request


def sequences(priorities: list[int]) -> list[Sequence]:
    return [
        Sequence(number, make_request(str(number), [1], priority=priority), 0, number)
        for number, priority in enumerate(priorities)
    ]


def expected(waiting: list[Sequence]) -> list[Sequence]:
    return sorted(
        waiting, key=lambda seq: (seq.request.priority, seq.status is not RequestStatus.PREEMPTED, seq.arrival)
    )


@given(st.lists(st.integers(-1, 2), min_size=1, max_size=8), st.lists(st.tuples(st.integers(0, 7), st.booleans())))
def test_both_stay_sorted_and_nobody_is_lost(priorities: list[int], moves: list[tuple[int, bool]]) -> None:
    queues = Queues()
    everyone = sequences(priorities)
    for seq in everyone:
        queues.wait(seq)
    for which, starts in moves:
        if starts and queues.waiting:
            seq = queues.waiting[which % len(queues.waiting)]
            longer = queues.leave(seq)
            assert longer == [other for other in expected([*queues.waiting, seq]) if other in longer]
            assert seq not in queues.waiting
            queues.start(seq)
            assert seq.status is RequestStatus.RUNNING
            assert queues.find_running(seq.seq_id) is seq
        elif not starts and queues.running:
            seq = queues.running[which % len(queues.running)]
            queues.stop(seq)
            assert queues.find_running(seq.seq_id) is None
            seq.status = RequestStatus.PREEMPTED
            queues.wait(seq)
        assert queues.waiting == expected(queues.waiting)
        assert queues.running == sorted(queues.running, key=lambda seq: (seq.request.priority, seq.arrival))
        assert {seq.seq_id for seq in queues.waiting + queues.running} == set(range(len(everyone)))


def test_choices_of_one_request_run_in_the_order_of_their_index() -> None:
    queues = Queues()
    request = make_request("a", [1], n=3)
    for seq_id, index in ((5, 2), (3, 0), (4, 1)):
        queues.start(Sequence(seq_id, request, index, 1))
    assert [seq.index for seq in queues.running] == [0, 1, 2]


def test_background_work_is_at_the_end_and_does_not_count_as_waiting() -> None:
    queues = Queues()
    live, background = sequences([0, 1]), sequences([BACKGROUND_PRIORITY, BACKGROUND_PRIORITY])
    assert all(seq.request.is_background for seq in background)
    for seq in (background[0], live[1], background[1], live[0]):
        queues.wait(seq)
    assert split_background(queues.waiting) == (live, background)
    assert queues.num_live_waiting == 2
