"""The store: bounds, ages, namespaces, and conversations that outlive their parts."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pinnate.core.errors import InvalidRequestError, NotFoundError
from pinnate.server.protocol.responses import Message, OutputText, Reasoning, Response
from pinnate.server.responses.store import MemoryStore, Record, Turn, previous_turn

T = TypeVar("T")


def make(number: int, *, before: Turn | None = None, size: int = 1, namespace: str = "") -> Record:
    response = Response(
        id=f"resp_{number}", created_at=1, status="in_progress", background=False, instructions=None,
        max_output_tokens=None, max_tool_calls=None, model="m", parallel_tool_calls=True, previous_response_id=None,
        prompt_cache_key=None, reasoning=Reasoning(None, None), safety_identifier=None, store=True, temperature=1.0,
        text={}, tool_choice="auto", tools=[], top_logprobs=0, top_p=1.0, truncation="disabled", user=None, metadata={},
    )  # fmt: skip
    item = {"type": "message", "id": f"in_{number}", "content": "x" * size}
    return Record(response=response, turn=Turn(before, [item]), namespace=namespace)


def ending(record: Record) -> Response:
    number = record.id.removeprefix("resp_")
    output: list[Any] = [Message(id=f"out_{number}", status="completed", content=[OutputText(text="y")])]
    return msgspec.structs.replace(record.response, status="completed", output=output)


async def put(store: MemoryStore, record: Record) -> Record:
    await store.add(record)
    await store.settle(record, ending(record))
    return record


def now(work: Coroutine[Any, Any, T]) -> T:
    """What never waits is done at once."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    raise AssertionError("it waits")


async def test_the_least_recently_used_goes_first() -> None:
    store = MemoryStore(max_responses=3)
    records = [await put(store, make(number)) for number in range(3)]
    await store.get("", records[0].id)
    await put(store, make(3))
    assert len(store) == 3
    with pytest.raises(NotFoundError):
        await store.get("", "resp_1")
    assert await store.get("", "resp_0") is records[0]
    assert await store.find_items("", ["in_1"]) == {}
    assert await store.find_items("", ["out_0"])


async def test_what_is_under_way_stays() -> None:
    store = MemoryStore(max_responses=1)
    running = make(0)
    await store.add(running)
    await put(store, make(1))
    await put(store, make(2))
    assert await store.get("", "resp_0") is running
    assert len(store) == 2
    await store.delete("", "resp_0")
    await store.settle(running, ending(running))
    with pytest.raises(NotFoundError):
        await store.get("", "resp_0")


async def test_bytes_and_ages() -> None:
    now = 0.0
    store = MemoryStore(max_bytes=50_000, lifetime=10, clock=lambda: now)
    await put(store, make(0, size=30_000))
    await put(store, make(1, size=30_000))
    assert len(store) == 1
    now = 10.0
    assert await store.get("", "resp_1")
    now = 10.5
    with pytest.raises(NotFoundError):
        await store.get("", "resp_1")
    assert (len(store), store.num_bytes) == (0, 0)


async def test_a_conversation_outlives_its_first_response() -> None:
    store = MemoryStore(max_responses=2)
    first = await put(store, make(0))
    second = await put(store, make(1, before=await previous_turn(store, "", "resp_0")))
    third = await put(store, make(2, before=second.turn))
    assert [item["id"] for item in third.turn.items()] == ["in_0", "out_0", "in_1", "out_1", "in_2"]
    with pytest.raises(NotFoundError):
        await store.get("", first.id)
    assert await store.find_items("", ["out_0"])  # a part of what can still be seen


async def test_previous_turn_says_what_is_wrong() -> None:
    store = MemoryStore()
    await store.add(make(0))
    for response_id, code in (("resp_0", "invalid_request"), ("resp_9", "previous_response_not_found")):
        with pytest.raises(InvalidRequestError) as caught:
            await previous_turn(store, "", response_id)
        assert (caught.value.param, caught.value.code) == ("previous_response_id", code)
    with pytest.raises(InvalidRequestError):
        await previous_turn(store, "other", "resp_0")


class StoreMachine(RuleBasedStateMachine):
    """Any order of answers, follow-ups and deletions: the bounds hold, and every byte is accounted for."""

    @initialize(count=st.integers(1, 6), size=st.integers(2000, 20_000))
    def start(self, count: int, size: int) -> None:
        self.store = MemoryStore(max_responses=count, max_bytes=size)
        self.max_responses, self.max_bytes = count, size
        self.made = 0
        self.running: list[Record] = []
        self.ended: list[Record] = []

    @rule(size=st.integers(0, 3000), follow=st.booleans(), namespace=st.sampled_from(["", "a"]), pick=st.randoms())
    def begin(self, size: int, follow: bool, namespace: str, pick: Any) -> None:
        stored = [record for record in self.ended if self._is_stored(record) and record.namespace == namespace]
        before = pick.choice(stored).turn if follow and stored else None
        record = make(self.made, before=before, size=size, namespace=namespace)
        self.made += 1
        now(self.store.add(record))
        self.running.append(record)

    @precondition(lambda self: self.running)
    @rule(pick=st.randoms())
    def finish(self, pick: Any) -> None:
        record = self.running.pop(pick.randrange(len(self.running)))
        now(self.store.settle(record, ending(record)))
        self.ended.append(record)

    @precondition(lambda self: self.made)
    @rule(pick=st.randoms())
    def delete(self, pick: Any) -> None:
        record = pick.choice([*self.running, *self.ended])
        if self._is_stored(record):
            now(self.store.delete(record.namespace, record.id))

    @invariant()
    def holds(self) -> None:
        stored = [record for record in [*self.running, *self.ended] if self._is_stored(record)]
        assert len(self.store) == len(stored)
        turns = {}
        for record in stored:
            turn: Turn | None = record.turn
            while turn is not None:
                turns[id(turn)] = turn
                turn = turn.before
        assert self.store.num_bytes == sum(turn.size for turn in turns.values())
        held = {item["id"] for turn in turns.values() for item in (*turn.input, *turn.output)}
        assert {key[1] for key in self.store._items} == held
        ended = [record for record in stored if record.ended]
        if len(ended) > 1:
            assert len(stored) <= self.max_responses or len(stored) - len(ended) >= self.max_responses - 1

    def _is_stored(self, record: Record) -> bool:
        return (record.namespace, record.id) in self.store._records


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
