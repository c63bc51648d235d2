"""Policies: orders of the waiting queue."""

from pinnate.core.request import RequestStatus, Sequence
from pinnate.scheduler.policy import LPM_PATIENCE, POLICIES, QUEUE_WINDOW
from tests.unit.scheduler.helpers import Engine, make_request


class Facts:
    def __init__(self, cached: dict[int, int], overtaken: dict[int, int] | None = None) -> None:
        self.cached, self.overtaken = cached, overtaken or {}

    def cached_tokens(self, seq: Sequence) -> int:
        return self.cached.get(seq.seq_id, 0)

    def times_overtaken(self, seq: Sequence) -> int:
        return self.overtaken.get(seq.seq_id, 0)


def queue(*priorities: int) -> list[Sequence]:
    return [Sequence(i, make_request(str(i), [1], priority=p), 0) for i, p in enumerate(priorities)]


def order(policy: str, waiting: list[Sequence], facts: Facts) -> list[int]:
    return [seq.seq_id for seq in POLICIES[policy](waiting, facts)]


def test_fcfs_keeps_the_order_of_arrival() -> None:
    assert order("fcfs", queue(0, 0, 0), Facts({2: 10})) == [0, 1, 2]


def test_lpm_prefers_the_longest_cached_prefix_within_a_priority() -> None:
    assert order("lpm", queue(0, 0, 0, 1), Facts({1: 5, 2: 10, 3: 99})) == [2, 1, 0, 3]


def test_lpm_lets_preempted_and_often_overtaken_ones_lead() -> None:
    waiting = queue(0, 0, 0, 0)
    waiting[1].status = RequestStatus.PREEMPTED
    assert order("lpm", waiting, Facts({3: 10}, {2: LPM_PATIENCE})) == [1, 2, 3, 0]


def test_lpm_looks_at_a_bounded_part_of_the_queue() -> None:
    waiting = queue(*[0] * (QUEUE_WINDOW + 5))
    assert len(order("lpm", waiting, Facts({QUEUE_WINDOW + 1: 9}))) == QUEUE_WINDOW


def test_under_lpm_nobody_starves() -> None:
    engine = Engine(policy="lpm", max_num_seqs=1, num_pages=64)
    hot = [1, 2, 3, 4, 5, 6, 7, 8]
    engine.add("warm", hot, max_tokens=1)
    engine.run()
    engine.add("cold", [50, 51], max_tokens=1)
    order = []
    for i in range(LPM_PATIENCE + 10):
        engine.add(f"hot{i}", [*hot, 60 + i], max_tokens=1)
        engine.add(f"more{i}", [*hot, 200 + i], max_tokens=1)
        order += [output.request_id for output in engine.step()]
    assert order.index("cold") == LPM_PATIENCE
