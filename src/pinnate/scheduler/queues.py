"""Queues: the sequences that run and those that wait, each in its order.

Knows: priority and order of arrival, background work. Must not know: pages, budgets, why a sequence starts or stops.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from pinnate.core.request import RequestStatus, Sequence


class Queues:
    """`running`: the first is the last to be preempted. `waiting`: in order of arrival, preempted ones first.

    Both begin with the most urgent priority, so that background sequences are at the end. They are read by all and
    changed by the methods alone.
    """

    def __init__(self) -> None:
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._running_ids: dict[int, Sequence] = {}

    def find_running(self, seq_id: int) -> Sequence | None:
        return self._running_ids.get(seq_id)

    def start(self, seq: Sequence) -> None:
        """`seq`, which waits no more, runs."""
        seq.status = RequestStatus.RUNNING
        self._running_ids[seq.seq_id] = seq
        insort(self.running, seq, key=_rank)

    def stop(self, seq: Sequence) -> None:
        """`seq` runs no more. What it does instead is the caller's to say."""
        del self._running_ids[seq.seq_id]
        self.running.remove(seq)

    def wait(self, seq: Sequence) -> None:
        """Waits in the place that its status gives it: at the front of its priority if it is PREEMPTED."""
        insort(self.waiting, seq, key=_place)

    def leave(self, seq: Sequence) -> list[Sequence]:
        """`seq` waits no more. Returns those that have waited longer."""
        place = self.waiting.index(seq)
        del self.waiting[place]
        return self.waiting[:place]

    @property
    def num_live_waiting(self) -> int:
        return len(split_background(self.waiting)[0])


def split_background(sequences: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Live and background ones, of a list that is sorted by priority first."""
    if not sequences or not sequences[-1].request.is_background:
        return sequences, []
    first = bisect_left(sequences, True, key=lambda seq: seq.request.is_background)
    return sequences[:first], sequences[first:]


def _rank(seq: Sequence) -> tuple[int, int, int]:
    return seq.request.priority, seq.arrival, seq.index


def _place(seq: Sequence) -> tuple[int, bool, int, int]:
    priority, arrival, index = _rank(seq)
    return priority, seq.status is not RequestStatus.PREEMPTED, arrival, index
