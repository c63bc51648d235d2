"""KV events: a router that follows them holds exactly the tree, whatever happens, over real sockets too."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from pinnate.core.kv_events import EventBatch, KVEventsConfig
from pinnate.core.request import Sequence
from pinnate.engine.kv_event_publisher import END_OF_REPLAY, KVEventPublisher, to_event
from pinnate.kvcache.event_log import Cleared, EventLog, snapshot
from pinnate.kvcache.manager import KVCacheManager
from pinnate.kvcache.page_hashes import PageHashes
from tests.property.kv_index import KVIndex, prefixes_in_tree
from tests.property.test_kv_manager import KVManagerMachine
from tests.unit.kvcache.helpers import compute, start

PAGE = 4
SECONDS = 10_000  # a limit in milliseconds, never a wait


class EventMachine(KVManagerMachine):
    """Without sockets, so that every step can be looked at."""

    @initialize(page_size=st.sampled_from([1, 4, 16]), num_tokens=st.sampled_from([32, 64, 128]), caching=st.just(True))
    def start_engine(self, page_size: int, num_tokens: int, caching: bool) -> None:
        super().start_engine(page_size, num_tokens, caching)
        self.log = EventLog()
        self.hashes = PageHashes(page_size, [self.log])
        self.cache.tree.watch = self.hashes
        self.index = KVIndex()

    @invariant()
    def the_index_is_the_tree(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.apply(to_event(change, self.page_size) for change in self.log.take(self.hashes))
        assert self.index.prefixes() == prefixes_in_tree(self.cache)
        fresh = KVIndex()
        fresh.apply(
            to_event(change, self.page_size) for change in snapshot(self.cache.tree, self.hashes, self.page_size)
        )
        assert fresh.blocks == self.index.blocks


EventMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestEvents = EventMachine.TestCase


class Rig:
    """A cache whose events are published, and work for it."""

    def __init__(self, folder: Path, *, seed: int = 0, num_pages: int = 48, **config: object) -> None:
        self.endpoint, self.replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        self.log = EventLog()
        self.hashes = PageHashes(PAGE, [self.log])
        self.cache = KVCacheManager(num_pages, PAGE, watch=self.hashes)
        self.publisher = KVEventPublisher(
            KVEventsConfig(endpoint=self.endpoint, replay_endpoint=self.replay, topic="kv", **config),  # type: ignore[arg-type]
            PAGE,
            take=lambda: self.log.take(self.hashes),
            snapshot=lambda: snapshot(self.cache.tree, self.hashes, PAGE),
        )
        self.rng = random.Random(seed)
        self.live: list[Sequence] = []
        self.known: list[list[int]] = [[]]
        self.num_sequences = 10

    def work(self, steps: int) -> None:
        for _ in range(steps):
            self._one()
            self.publisher.publish()

    def _one(self) -> None:
        kind = self.rng.random()
        prompt = self.rng.choice(self.known)[: self.rng.randrange(30)] + [
            self.rng.randrange(3) for _ in range(self.rng.randrange(1, 20))
        ]
        if kind < 0.02:
            self.cache.flush()
        elif kind < 0.5:
            compute(self.cache, prompt, cache_salt=self.rng.choice(("", "", "salt")))
            self.known = [*self.known[-20:], prompt]
        elif kind < 0.7 and len(self.live) < 3:
            self.num_sequences += 1
            seq = start(self.cache, prompt, self.num_sequences)
            if self.cache.allocate(seq, len(prompt) - seq.num_computed_tokens):
                self.cache.take_copies()
                seq.num_computed_tokens = len(prompt)
                self.cache.commit(seq)
            self.cache.end_step()
            self.live.append(seq)
        elif self.live:
            self.cache.release(self.live.pop(self.rng.randrange(len(self.live))))
        self.cache.check_integrity()

    def last(self) -> int:
        return self.publisher._next - 1

    def until_sent(self) -> None:
        """Returns when the publisher's thread has sent all: it answers replays after that."""
        list(self.replayed(self.last()))

    def replayed(self, first: int, kind: int = zmq.DEALER) -> Iterator[tuple[int, EventBatch]]:
        with zmq.Context() as context, context.socket(kind) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self.replay)
            socket.send(first.to_bytes(8, "big"))
            while socket.poll(SECONDS):
                name, payload = socket.recv_multipart()[-2:]
                if name == END_OF_REPLAY:
                    assert payload == b""
                    return
                yield int.from_bytes(name, "big"), msgspec.msgpack.decode(payload, type=EventBatch)
        raise AssertionError("no end of the replay")


class Subscriber:
    """What the field's documentation tells a router to do: follow, notice gaps, ask for what is missing."""

    def __init__(self, rig: Rig, **options: int) -> None:
        self.rig = rig
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"kv")
        self.socket.connect(rig.endpoint)
        self.index = KVIndex()
        self.next = 0
        self.gaps = 0

    def follow(self, until: int) -> None:
        while self.next <= until:
            if not self.socket.poll(200):
                self.catch_up()  # joined late, or the last batches were dropped on the way here
                continue
            topic, name, payload = self.socket.recv_multipart()
            assert (topic, len(name)) == (b"kv", 8)
            self.take(int.from_bytes(name, "big"), msgspec.msgpack.decode(payload, type=EventBatch))

    def take(self, number: int, batch: EventBatch) -> None:
        if number > self.next:
            self.gaps += 1
            self.catch_up()
        if number == self.next:
            self.index.apply(batch.events)
            self.next += 1

    def catch_up(self) -> None:
        for number, batch in self.rig.replayed(self.next):
            if number == self.next:
                self.index.apply(batch.events)
                self.next += 1

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def start_one(**options: object) -> Rig:
        rigs.append(Rig(tmp_path, **options))  # type: ignore[arg-type]
        return rigs[-1]

    yield start_one
    for rig in rigs:
        rig.publisher.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_router_rebuilds_the_tree_from_the_stream(make: Callable[..., Rig], seed: int) -> None:
    rig = make(seed=seed)
    router = Subscriber(rig)
    for _ in range(5):
        rig.work(200)
        router.follow(rig.last())
        assert router.index.prefixes() == prefixes_in_tree(rig.cache)
        assert len(router.index.blocks) > 5
    late = Subscriber(rig)
    late.follow(rig.last())
    assert late.index.blocks == router.index.blocks
    assert rig.publisher.num_lost == 0
    router.close()
    late.close()


def test_a_stalled_subscriber_costs_the_engine_and_the_others_nothing(make: Callable[..., Rig]) -> None:
    rig = make(hwm=3)
    stalled = Subscriber(rig, RCVHWM=1)
    rig.work(300)
    rig.until_sent()  # nothing waits for the one who does not read
    assert len(rig.publisher._queue) == 0
    assert rig.publisher.num_lost == 0
    reader = Subscriber(rig)
    for _ in range(10):
        rig.work(20)
        reader.follow(rig.last())
    assert reader.index.prefixes() == prefixes_in_tree(rig.cache)
    stalled.follow(rig.last())  # it wakes up, sees what it lacks, and asks for it
    assert stalled.index.blocks == reader.index.blocks
    stalled.close()
    reader.close()


def test_what_the_queue_cannot_take_leaves_a_gap_and_then_a_snapshot(make: Callable[..., Rig]) -> None:
    rig = make()
    router = Subscriber(rig)
    rig.work(100)
    router.follow(rig.last())
    rig.publisher._limit = 0  # as if the thread did not get to run
    before = rig.last()
    rig.work(50)
    lost = rig.publisher.num_lost
    assert lost == rig.last() - before > 10
    rig.publisher._limit = 100
    rig.publisher.publish()
    numbers = [number for number, _ in rig.replayed(before + 1)]
    assert numbers == [before + lost + 1]  # what was lost cannot be had, and the numbers say so
    ((_, batch),) = list(rig.replayed(before + 1))
    fresh = KVIndex()
    fresh.apply(batch.events)  # begins with AllBlocksCleared
    assert fresh.prefixes() == prefixes_in_tree(rig.cache)
    router.close()


def test_replay_is_bounded_and_tells_what_it_no_longer_has(make: Callable[..., Rig]) -> None:
    rig = make(buffer_steps=5)
    rig.work(100)
    rig.until_sent()
    last = rig.last()
    assert [number for number, _ in rig.replayed(0)] == list(range(last - 4, last + 1))
    assert [number for number, _ in rig.replayed(last)] == [last]
    assert list(rig.replayed(last + 1)) == []
    number = rig.publisher.resync()
    ((got, batch),) = list(rig.replayed(number))
    fresh = KVIndex()
    fresh.apply(batch.events)
    assert (got, fresh.prefixes()) == (number, prefixes_in_tree(rig.cache))


def test_a_request_socket_gets_its_envelope_back(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.work(5)
    rig.until_sent()
    first, batch = next(iter(rig.replayed(0, zmq.REQ)))
    assert first == 0
    assert [type(event).__name__ for event in batch.events] == ["AllBlocksCleared"]


def test_nonsense_on_the_replay_socket_hurts_nobody(make: Callable[..., Rig]) -> None:
    rig = make()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(rig.replay)
        socket.send(b"give me all")
        socket.send((0).to_bytes(8, "big"))
        assert socket.poll(SECONDS)
        assert socket.recv_multipart()[0] == (0).to_bytes(8, "big")


def test_a_flush_that_empties_the_tree_is_one_event(make: Callable[..., Rig]) -> None:
    rig = make()
    compute(rig.cache, list(range(30)))
    assert len(rig.log.take(rig.hashes)) == 1  # one run of pages
    rig.cache.flush()
    (change,) = rig.log.take(rig.hashes)
    assert isinstance(change, Cleared)
    assert rig.log.take(rig.hashes) == []


def test_close_sends_what_was_put(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    router = Subscriber(rig)
    rig.work(1)
    router.follow(0)
    rig.work(50)
    last = rig.last()
    rig.publisher.close()
    rig.publisher.close()
    numbers = []
    while router.socket.poll(200):
        numbers.append(int.from_bytes(router.socket.recv_multipart()[1], "big"))
    assert numbers[-1] == last
    router.close()
