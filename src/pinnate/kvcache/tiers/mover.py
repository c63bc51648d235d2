"""PageMover: the thread that copies pages between the KV pool and a tier, beside the steps.

Knows: queues, pace, who may touch a page when. Must not know: the prefix tree, sequences, files.

A page to be stored is not held: it stays evictable, and nobody waits for the disk. The thread copies it out of the pool
and only then looks whether it was dropped meanwhile; what it copied is then thrown away, for the pool may have given
the page to another. A page that must go before the thread got to it can be copied at once into the staging memory
(bounded), from where it is written, or loaded back.
A page to be loaded belongs to the caller until the load is finished: the thread alone writes into it.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections import deque
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Protocol

from pinnate.kvcache.tiers.cost import CostModel
from pinnate.kvcache.tiers.tier import PageName, Tier

log = logging.getLogger(__name__)

STAGING_BYTES = 64 << 20
BUSY_BYTES_PER_SECOND = 128 << 20  # of writes while steps run; in idle time there is no limit
IDLE_SECONDS = 0.05  # without a step
CLOSE_SECONDS = 2.0


class PageIO(Protocol):
    """The bytes of the pool's pages (executor.base.Executor)."""

    @property
    def page_bytes(self) -> int: ...

    def read_pages(self, pages: array[int], out: bytearray | memoryview) -> None: ...

    def write_pages(self, pages: array[int], data: bytes | bytearray | memoryview) -> None: ...


@dataclass(slots=True, eq=False)
class Store:
    """A page on its way to the tier. `data`: already out of the pool (staged)."""

    page: int
    name: PageName
    data: bytearray | None = None
    dropped: bool = False
    done: bool = False


@dataclass(slots=True, eq=False)
class Load:
    """Consecutive pages on their way to the pool. The first `num_loaded` are there."""

    names: list[PageName]
    pages: array[int]
    num_loaded: int = 0
    stop: bool = False  # asked to end early


class PageMover:
    """Methods are for the engine's thread. An error that nobody foresaw turns the mover off: nothing is found in the
    tier any more, and serving goes on."""

    def __init__(
        self,
        io: PageIO,
        tier: Tier,
        cost: CostModel,
        *,
        staging_bytes: int = STAGING_BYTES,
        busy_bytes_per_second: float = BUSY_BYTES_PER_SECOND,
        threaded: bool = True,
    ) -> None:
        """`threaded=False`: whoever made it calls `work` (tests, in an order of their own)."""
        self.num_stored = 0  # pages, lifetime
        self.num_loaded = 0
        self.is_off = False
        self._io = io
        self._tier = tier
        self._cost = cost
        self._staging_pages = staging_bytes // max(1, io.page_bytes)
        self._pause = io.page_bytes / busy_bytes_per_second
        self._loads: deque[Load] = deque()
        self._staged: deque[Store] = deque()
        self._stores: deque[Store] = deque()
        self._by_key: dict[bytes, Store] = {}  # staged
        self._finished: deque[Load] = deque()
        self._arrived = threading.Event()
        self._wake = threading.Condition()
        self._last_step = 0.0
        self._not_before = 0.0  # the next paced write
        self._close_by: float | None = None
        self._untidy = True
        self._failing = False  # the last write did
        self._buffer = bytearray(io.page_bytes)
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="pinnate-kv-tier", daemon=True)
            self._thread.start()

    def has(self, key: bytes) -> bool:
        return not self.is_off and (key in self._by_key or self._tier.has(key))

    @property
    def num_queued(self) -> int:
        """Pages that wait to be loaded."""
        return sum(len(load.pages) - load.num_loaded for load in list(self._loads))

    @property
    def num_unsaved(self) -> int:
        """Pages that wait to be stored."""
        return len(self._stores) + len(self._staged)

    def store(self, job: Store, *, urgent: bool = False) -> None:
        if self.is_off:
            return
        with self._wake:
            (self._stores.appendleft if urgent else self._stores.append)(job)
            self._wake.notify()

    def stage(self, job: Store) -> bool:
        """Copies the page of a store that is not done out of the pool now. False: there is no room, or no use."""
        if self.is_off or self._failing or len(self._staged) >= self._staging_pages:
            return False
        started = perf_counter()
        data = bytearray(self._io.page_bytes)
        self._io.read_pages(array("i", [job.page]), data)
        self._cost.copy.add(1, perf_counter() - started)
        staged = Store(job.page, job.name, data)
        with self._wake:
            self._by_key[job.name.key] = staged
            self._staged.append(staged)
            self._wake.notify()
        return True

    def load(self, load: Load) -> None:
        """`load.pages` are the thread's until `take_finished` returns the load."""
        with self._wake:
            self._loads.append(load)
            self._wake.notify()
            if self.is_off:
                self._finish_all()  # there is nobody else to

    def take_finished(self) -> list[Load]:
        if not self._finished:
            return []
        self._arrived.clear()
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def wait(self, seconds: float) -> None:
        """Until a load is finished, at most so long."""
        self._arrived.wait(seconds)

    def note_step(self) -> None:
        """A step has run: writes keep their pace for a while."""
        self._last_step = monotonic()

    def clear(self) -> None:
        """Empties the tier. Loads under way go on."""
        with self._wake:
            for job in (*self._stores, *self._staged):
                job.dropped = True
            self._stores.clear()
            self._staged.clear()
            self._by_key.clear()
            self._tier.clear()
            self._untidy = True
            self._wake.notify()

    def close(self) -> None:
        """Stores what waits for it, for at most CLOSE_SECONDS. Afterwards nothing touches the pool any more. In the
        thread itself (garbage is collected anywhere) it does not wait for its end."""
        with self._wake:
            self._close_by = monotonic() + CLOSE_SECONDS
            for load in self._loads:
                load.stop = True
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._tier.close()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while self.work(wait=True):
            pass

    def work(self, wait: bool = False) -> bool:
        """Does one job. False: there is none, or with `wait` there will be none any more."""
        job = self._next_job(wait)
        try:
            if isinstance(job, Load):
                self._do_load(job)
            elif isinstance(job, Store):
                self._do_store(job)
            elif job is not None:
                self._tier.tidy()
        except Exception:
            log.exception("the KV %s tier is turned off; serving goes on without it", self._tier.name)
            with self._wake:
                self.is_off = True
                self._finish_all()
        return job is not None

    def _next_job(self, wait: bool) -> Load | Store | bool | None:
        """Loads first, then tidying up (True), then what is staged, then stores as they may."""
        with self._wake:
            while True:
                now = monotonic()
                closing = self._close_by is not None
                if self._close_by is not None and now > self._close_by:
                    self._stores.clear()
                    self._staged.clear()
                if self._loads:
                    return self._loads[0]  # stays, so that num_queued counts it
                if self._untidy:
                    self._untidy = False
                    return True
                if self._staged:
                    return self._staged.popleft()
                while self._stores and (self._stores[0].dropped or self._stores[0].done):
                    self._stores.popleft()
                paced = not closing and now - self._last_step < IDLE_SECONDS
                if self._stores and not (paced and now < self._not_before):
                    self._not_before = max(now, self._not_before) + self._pause if paced else now
                    return self._stores.popleft()
                if closing or self.is_off:
                    return None
                if not wait:
                    return None
                self._wake.wait(self._not_before - now if self._stores else None)

    def _do_load(self, load: Load) -> None:
        for page, name in zip(load.pages, load.names, strict=True):
            if load.stop:
                break
            started = perf_counter()
            staged = self._by_key.get(name.key)
            data = memoryview(staged.data) if staged and staged.data else self._tier.read(name)
            if data is None:
                break
            self._io.write_pages(array("i", [page]), data)
            self._cost.load.add(1, perf_counter() - started)
            load.num_loaded += 1
            self.num_loaded += 1
        with self._wake:
            self._loads.popleft()
            self._finish(load)

    def _do_store(self, job: Store) -> None:
        job.done = self._tier.has(job.name.key)
        if not job.done and not job.dropped:
            data = job.data
            if data is None:
                data = self._buffer
                self._io.read_pages(array("i", [job.page]), data)
            if not job.dropped:  # not while the page was copied
                job.done = self._tier.write(job.name, data)
                self.num_stored += job.done
                self._failing = not job.done
        if job.data is not None and self._by_key.get(job.name.key) is job:
            del self._by_key[job.name.key]

    def _finish(self, load: Load) -> None:
        self._finished.append(load)
        self._arrived.set()

    def _finish_all(self) -> None:
        self._stores.clear()
        self._staged.clear()
        self._by_key.clear()
        while self._loads:
            self._finish(self._loads.popleft())
