"""Responses in the data directory: whatever happens in whatever order, what a restart finds is what was committed."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pinnate.core.errors import InvalidRequestError, NotFoundError
from pinnate.server.errors import StorageError
from pinnate.server.protocol.responses import Response
from pinnate.server.responses.disk_store import FILE, DiskStore
from pinnate.server.responses.store import Record, Turn, previous_turn
from pinnate.server.responses.tables import Bounds, ResponseTables
from tests.unit.server.responses.test_store import ending, make

T = TypeVar("T")
AMPLE = Bounds(100, 10**7, 1000.0)


def tables_of(store: DiskStore) -> ResponseTables:
    tables = store._database._tables
    assert tables is not None
    return tables


async def put(store: DiskStore, record: Record, events: list[bytes] | None = None) -> Record:
    if events is not None:
        record.events = []
    await store.add(record)
    await store.settle(record, ending(record), events or ())
    return record


async def crash(store: DiskStore) -> None:
    """As kill -9: nothing is written, stored or closed but what the operating system closes."""
    await store._database.close()


def ids(turn: Turn) -> list[str]:
    return [item["id"] for item in (*turn.items(), *turn.output)]


async def test_a_restart_finds_everything(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    first = await put(store, make(0), [b"a", b"b"])
    second = await put(store, make(1, before=(await store.get("", first.id)).turn))
    running = make(2, before=await previous_turn(store, "", second.id))
    await store.add(running)
    await crash(store)
    store = DiskStore(tmp_path)
    found = await store.get("", first.id)
    assert (found.response, found.events, found.ended) == (first.response, [b"a", b"b"], True)
    assert ids((await store.get("", second.id)).turn) == ["in_0", "out_0", "in_1", "out_1"]
    cut = await store.get("", running.id)
    assert cut.response.error is not None
    assert (cut.response.status, cut.response.error.code) == ("failed", "server_error")
    assert ids(cut.turn) == ["in_0", "out_0", "in_1", "out_1", "in_2"]
    assert (await store.find_items("", {"out_0", "in_2", "nowhere"})).keys() == {"out_0", "in_2"}
    assert await store.find_items("other", {"out_0"}) == {}
    with pytest.raises(NotFoundError):
        await store.get("other", first.id)
    await store.delete("", first.id)
    with pytest.raises(NotFoundError):
        await store.delete("", first.id)
    assert ids(await previous_turn(store, "", second.id))[0] == "in_0"
    await store.close()


async def test_bounds_and_ages(tmp_path: Path) -> None:
    now = 0.0
    store = DiskStore(tmp_path, Bounds(3, 50_000, 10.0), clock=lambda: now)
    for number in range(5):
        await put(store, make(number))
    with pytest.raises(NotFoundError):
        await store.get("", "resp_1")
    assert tables_of(store).totals()[0] == 3
    await put(store, make(5, size=60_000))  # alone above the bound: the newest stays
    assert tables_of(store).totals()[0] == 1
    now = 11.0
    with pytest.raises(NotFoundError):
        await store.get("", "resp_5")
    await put(store, make(6))
    assert tables_of(store).totals()[0] == 1
    await store.delete("", "resp_6")
    assert tables_of(store).totals() == (0, 0)
    await store.close()


async def test_what_it_goes_on_from_is_deleted_meanwhile(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    first = await put(store, make(0))
    follower = make(1, before=await previous_turn(store, "", first.id))
    await store.delete("", first.id)
    with pytest.raises(InvalidRequestError) as caught:
        await store.add(follower)
    assert caught.value.param == "previous_response_id"
    await store.close()


async def test_deleted_while_it_is_made(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    record, cancelled = make(0), []
    await store.add(record)
    record.cancel = lambda: cancelled.append(1)
    await store.delete("", record.id)
    await store.settle(record, ending(record))
    assert (cancelled, record.ended, tables_of(store).totals()) == ([1], True, (0, 0))
    await store.close()


async def test_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was made is answered and waits for room; new ones are refused; nothing is lost."""
    store = DiskStore(tmp_path)
    await put(store, make(0))
    under_way = make(1, size=10)
    await store.add(under_way)
    database = tables_of(store)._db
    full = database.execute("PRAGMA page_count").fetchone()[0]
    database.execute(f"PRAGMA max_page_count = {full}")
    big = ending(under_way)
    big.output[0].content[0].text = "y" * 200_000  # type: ignore[union-attr]
    await store.settle(under_way, big)
    assert "no room in the data directory" in caplog.text
    assert (await store.get("", under_way.id)).response is big
    assert (await store.find_items("", {"out_1"})).keys() == {"out_1"}
    for _ in range(2):
        with pytest.raises(StorageError) as caught:
            await store.add(make(2))
        assert caught.value.code == "storage_full"
    assert ids((await store.get("", "resp_0")).turn) == ["in_0", "out_0"]
    database.execute("PRAGMA max_page_count = 1000000")
    await put(store, make(3, before=under_way.turn))
    await crash(store)
    store = DiskStore(tmp_path)
    assert (await store.get("", under_way.id)).response == big
    assert ids((await store.get("", "resp_3")).turn) == ["in_1", "out_1", "in_3", "out_3"]
    await store.close()


async def test_what_waits_is_written_at_the_end(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    record = make(0)
    await store.add(record)
    settling = asyncio.ensure_future(store.settle(record, ending(record)))
    await asyncio.sleep(0)
    settling.cancel()  # a client that leaves at this moment
    await asyncio.wait((settling,))
    assert record.ended
    await store.close()
    store = DiskStore(tmp_path)
    assert (await store.get("", record.id)).response == record.response
    await store.close()


async def test_a_damaged_database_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"not a database " * 1000)
    store = DiskStore(tmp_path)
    await store.open()
    for work in (store.add(make(0)), store.get("", "resp_0"), store.delete("", "resp_0"), store.find_items("", {"x"})):
        with pytest.raises(StorageError) as caught:
            await work
        assert caught.value.code == "storage_damaged"
    assert await store.find_items("", set()) == {}
    await store.close()
    assert (tmp_path / FILE).read_bytes() == b"not a database " * 1000


class DiskMachine(RuleBasedStateMachine):
    """Answers, follow-ups, deletions and crashes in any order against a model: what is stored has its conversation and
    its state, the bounds hold, and every byte is accounted for."""

    @initialize(count=st.integers(1, 6), size=st.integers(2000, 20_000))
    def start(self, count: int, size: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp())
        self.bounds = Bounds(count, size, 1000.0)
        self.store = DiskStore(self.folder, self.bounds)
        self.made = 0
        self.conversations: dict[str, list[str]] = {}  # of all that were ever made
        self.running: dict[str, Record] = {}
        self.last: dict[str, Response] = {}  # of all that ended
        self.deleted: set[str] = set()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    @rule(size=st.integers(0, 3000), follow=st.booleans(), pick=st.randoms())
    def begin(self, size: int, follow: bool, pick: random.Random) -> None:
        stored = sorted(self.stored() & self.last.keys())
        before = self.do(self.store.get("", pick.choice(stored))).turn if follow and stored else None
        record = make(self.made, before=before, size=size)
        self.made += 1
        self.do(self.store.add(record))
        self.running[record.id] = record
        self.conversations[record.id] = [item["id"] for item in record.turn.items()]

    @precondition(lambda self: self.running)
    @rule(pick=st.randoms())
    def finish(self, pick: random.Random) -> None:
        record = self.running.pop(pick.choice(sorted(self.running)))
        self.do(self.store.settle(record, ending(record)))
        self.last[record.id] = record.response
        self.conversations[record.id].append(f"out_{record.id.removeprefix('resp_')}")

    @precondition(lambda self: self.made)
    @rule(pick=st.randoms())
    def delete(self, pick: random.Random) -> None:
        response_id = pick.choice(sorted(self.conversations))
        if response_id in self.stored():
            self.do(self.store.delete("", response_id))
        else:
            with pytest.raises(NotFoundError):
                self.do(self.store.delete("", response_id))
        self.deleted.add(response_id)

    @rule()
    def crash(self) -> None:
        self.do(crash(self.store))
        self.store = DiskStore(self.folder, self.bounds)
        self.do(self.store.open())
        for response_id in [*self.running]:
            del self.running[response_id]
            if response_id not in self.deleted:
                self.last[response_id] = self.do(self.store.get("", response_id)).response
                assert self.last[response_id].status == "failed"

    def stored(self) -> set[str]:
        self.do(self.store.open())
        return {row[0] for row in tables_of(self.store)._db.execute("SELECT id FROM responses")}

    @invariant()
    def holds(self) -> None:
        stored = self.stored()
        assert not stored & self.deleted
        assert self.running.keys() - self.deleted <= stored  # what is being made is never dropped
        for response_id in stored:
            record = self.do(self.store.get("", response_id))
            assert ids(record.turn) == self.conversations[response_id]
            if response_id in self.last:
                assert record.response == self.last[response_id]
        tables = tables_of(self.store)
        count, size = tables.totals()
        items = "SELECT sum(length(object)) FROM items"
        responses = "SELECT sum(length(object) + ifnull(length(events), 0)) FROM responses"
        assert size == sum(tables._db.execute(query).fetchone()[0] or 0 for query in (items, responses))
        assert count == len(stored)
        if len(stored & self.last.keys()) > 1:
            assert count <= self.bounds.max_responses or count - len(self.running) >= self.bounds.max_responses - 1
        needed = "SELECT number FROM turns WHERE number NOT IN (SELECT turn FROM responses)"
        for (number,) in tables._db.execute(needed).fetchall():  # a turn without a response has one that follows
            assert tables._has("SELECT 1 FROM turns WHERE before = ?", number)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.do(self.store.close())
            self.loop.close()
            shutil.rmtree(self.folder)


TestDiskStore = DiskMachine.TestCase
TestDiskStore.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
