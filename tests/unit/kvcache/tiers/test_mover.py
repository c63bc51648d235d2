"""The mover: order, pace, staging, and that nothing it does can go wrong for anybody else."""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Callable

import pytest

from pinnate.kvcache.tiers.cost import CostModel
from pinnate.kvcache.tiers.mover import Load, PageMover, Store
from tests.unit.kvcache.tiers.helpers import PAGE_BYTES, MemoryIO, MemoryTier, content, names


class Rig:
    def __init__(self, *, threaded: bool = False, **options: object) -> None:
        self.io, self.tier, self.cost = MemoryIO(), MemoryTier(), CostModel()
        self.mover = PageMover(self.io, self.tier, self.cost, threaded=threaded, **options)
        if not threaded:
            assert self.mover.work()  # what an earlier process left is tidied up
            assert self.tier.tidied == 1

    def store(self, *pages: int) -> list[Store]:
        jobs = [Store(page, name) for page, name in zip(pages, names(len(pages)), strict=True)]
        for job in jobs:
            self.mover.store(job)
        return jobs

    def load(self, *pages: int) -> Load:
        load = Load(names(len(pages)), array("i", pages))
        self.mover.load(load)
        return load

    def work(self) -> int:
        done = 0
        while self.mover.work():
            done += 1
        return done


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_pages_go_down_and_come_up_again() -> None:
    rig = Rig()
    jobs = rig.store(1, 2, 3)
    assert rig.mover.num_unsaved == 3
    rig.work()
    assert [rig.tier.pages[job.name.key] for job in jobs] == [content(1), content(2), content(3)]
    load = rig.load(7, 8, 9)
    assert (rig.mover.num_queued, rig.mover.take_finished()) == (3, [])
    rig.work()
    assert rig.mover.take_finished() == [load]
    assert (load.num_loaded, rig.mover.num_queued, rig.mover.num_loaded, rig.mover.num_stored) == (3, 0, 3, 3)
    assert [bytes(rig.io.pages[page]) for page in (7, 8, 9)] == [content(1), content(2), content(3)]
    assert rig.cost.load.per_second > 0


def test_loads_go_first_and_urgent_stores_before_others() -> None:
    rig = Rig()
    rig.store(1, 2)
    rig.work()
    later = [Store(5, names(1, 40)[0]), Store(6, names(1, 50)[0])]
    rig.mover.store(later[0])
    rig.mover.store(later[1], urgent=True)
    rig.load(7, 8)
    rig.mover.work()
    assert len(rig.mover.take_finished()) == 1
    rig.mover.work()
    assert (later[0].done, later[1].done) == (False, True)


def test_a_missing_page_ends_the_load_before_it() -> None:
    rig = Rig()
    rig.store(1, 2, 3)
    rig.work()
    del rig.tier.pages[names(3)[1].key]
    load = rig.load(7, 8, 9)
    rig.work()
    assert (rig.mover.take_finished(), load.num_loaded) == ([load], 1)
    assert bytes(rig.io.pages[8]) == content(8)


def test_a_load_that_is_stopped_ends_there() -> None:
    rig = Rig()
    rig.store(1, 2)
    rig.work()
    load = rig.load(7, 8)
    load.stop = True
    rig.work()
    assert (rig.mover.take_finished(), load.num_loaded) == ([load], 0)


def test_what_is_staged_survives_its_page_and_can_be_loaded_at_once() -> None:
    rig = Rig(staging_bytes=2 * PAGE_BYTES)
    jobs = rig.store(1, 2, 3)
    for job in jobs:
        job.dropped = True
    assert [rig.mover.stage(job) for job in jobs] == [True, True, False]  # there is room for two
    rig.io.pages[1][:] = rig.io.pages[2][:] = content(99)
    assert [rig.mover.has(name.key) for name in names(3)] == [True, True, False]
    rig.load(7, 8)
    rig.mover.work()
    assert [bytes(rig.io.pages[page]) for page in (7, 8)] == [content(1), content(2)]
    assert rig.tier.pages == {}
    rig.work()
    assert [rig.tier.pages.get(name.key) for name in names(3)] == [content(1), content(2), None]
    assert rig.mover._by_key == {}
    assert rig.mover.stage(jobs[2])
    assert rig.cost.copy.per_second > 0


def test_a_page_is_stored_once() -> None:
    rig = Rig()
    for job in (*rig.store(1), *rig.store(2)):
        assert not job.done
    rig.work()
    assert rig.mover.num_stored == 1
    assert rig.tier.pages[names(1)[0].key] == content(1)


def test_a_tier_that_takes_nothing_gets_no_copies_until_it_does() -> None:
    rig = Rig()
    rig.tier.full = True
    (job,) = rig.store(1)
    rig.work()
    assert not job.done
    assert not rig.mover.stage(job)
    rig.tier.full = False
    rig.mover.store(job, urgent=True)
    rig.work()
    assert job.done
    assert rig.mover.stage(Store(2, names(2)[1]))


def test_cleared_is_cleared() -> None:
    rig = Rig()
    rig.store(1, 2)
    rig.mover.work()
    staged = Store(3, names(3)[2])
    assert rig.mover.stage(staged)
    rig.mover.clear()
    assert not any(rig.mover.has(name.key) for name in names(3))
    rig.mover.work()
    assert rig.tier.tidied == 2
    rig.work()
    assert rig.tier.pages == {}


def test_writes_keep_their_pace_while_steps_run_and_hurry_when_idle() -> None:
    rig = Rig(busy_bytes_per_second=PAGE_BYTES)  # a page a second
    rig.store(*range(1, 10))
    rig.mover.note_step()
    assert rig.mover.work()
    assert not rig.mover.work()
    assert rig.mover.num_stored == 1
    rig.load(11)  # not held up
    rig.mover.note_step()
    rig.mover.work()
    assert len(rig.mover.take_finished()) == 1
    rig.mover._last_step -= 1
    rig.work()
    assert rig.mover.num_stored == 9


def test_pages_that_are_gone_take_no_turn_from_others() -> None:
    rig = Rig(busy_bytes_per_second=PAGE_BYTES)  # a page a second
    jobs = rig.store(*range(1, 10))
    for job in jobs[:-1]:
        job.dropped = True
    rig.mover.note_step()
    assert rig.mover.work()
    assert jobs[-1].done
    assert rig.mover.num_unsaved == 0


def test_the_thread_works_by_itself_and_wakes_who_waits() -> None:
    rig = Rig(threaded=True)
    jobs = rig.store(1, 2, 3)
    until(lambda: all(job.done for job in jobs))
    load = rig.load(4, 5, 6)
    rig.mover.wait(10)
    assert rig.mover.take_finished() == [load]
    assert load.num_loaded == 3
    rig.mover.close()
    assert rig.tier.closed


def test_closing_stores_what_waits() -> None:
    rig = Rig(threaded=True, busy_bytes_per_second=1)
    rig.mover.note_step()
    rig.store(*range(1, 9))
    rig.mover.stage(Store(9, names(9)[8]))
    rig.mover.close()
    assert len(rig.tier.pages) == 9
    assert not rig.mover._thread.is_alive()


def test_a_defect_turns_the_mover_off_and_nobody_waits_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    rig = Rig(threaded=True)
    (job,) = rig.store(1)
    until(lambda: job.done)
    rig.tier.broken = True
    loads = [rig.load(4), rig.load(5)]
    until(lambda: rig.mover.is_off)
    loads.append(rig.load(6))
    assert rig.mover.take_finished() == loads
    assert [load.num_loaded for load in loads] == [0, 0, 0]
    assert not rig.mover.has(names(1)[0].key)
    assert not rig.mover.stage(job)
    rig.store(2)
    assert rig.mover.num_unsaved == 0
    assert [record.message for record in caplog.records] == [
        "the KV memory tier is turned off; serving goes on without it"
    ]
    rig.mover.close()
    assert rig.tier.closed


def test_a_page_dropped_while_it_is_copied_is_not_written() -> None:
    """With a real thread: the copy stops half-way until the page has been given away."""
    rig = Rig()
    reading, go_on = threading.Event(), threading.Event()
    read = rig.io.read_pages

    def slow(pages: array[int], out: bytearray | memoryview) -> None:
        reading.set()
        assert go_on.wait(10)
        read(pages, out)

    rig.io.read_pages = slow  # type: ignore[method-assign]
    (job,) = rig.store(1)
    thread = threading.Thread(target=rig.mover.work)
    thread.start()
    assert reading.wait(10)
    job.dropped = True
    rig.io.pages[1][:] = content(77)
    go_on.set()
    thread.join()
    assert rig.tier.pages == {}
    assert not job.done
