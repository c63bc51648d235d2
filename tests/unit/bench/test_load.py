"""Order, concurrency and history of a load, with a server that only remembers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pinnate.bench.client import Outcome, Target
from pinnate.bench.connection import Origin
from pinnate.bench.datasets import Conversation, Turn
from pinnate.bench.load import Pace, run_load

CHAT = Target(Origin("h", 1, None, ""), "m", chat=True)
COMPLETIONS = Target(Origin("h", 1, None, ""), "m", chat=False)


class Memory:
    """Answers "a1", "a2", ... of two tokens each; the prompts in `failing` fail."""

    def __init__(self, failing: tuple[str, ...] = ()) -> None:
        self.asked: list[tuple[Any, int, int]] = []
        self.running = self.most = 0
        self._failing = failing

    async def send(self, _: Target, prompt: Any, prompt_len: int, output_len: int) -> Outcome:
        self.asked.append((prompt, prompt_len, output_len))
        number = len(self.asked)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.001)
        self.running -= 1
        last = prompt[-1]["content"] if isinstance(prompt, list) else prompt
        error = "refused" if last in self._failing else None
        return Outcome(prompt_len, output_len=2, text=f"a{number}", error=error)


def singles(count: int) -> list[Conversation]:
    return [(Turn(f"p{i}", 5, i),) for i in range(count)]


@pytest.mark.parametrize(("limit", "most"), [(None, 9), (1, 1), (4, 4)])
async def test_concurrency_is_reached_and_never_exceeded(limit: int | None, most: int) -> None:
    memory = Memory()
    result = await run_load(COMPLETIONS, singles(9), Pace(max_concurrency=limit), send=memory.send)
    assert memory.most == most
    assert len(result.outcomes) == 9
    assert result.duration > 0


async def test_outcomes_are_in_the_order_of_the_dataset() -> None:
    memory, seen = Memory(failing=("p1",)), list[Outcome]()
    result = await run_load(COMPLETIONS, singles(4), Pace(request_rate=1000.0), on_done=seen.append, send=memory.send)
    assert [o.error for o in result.outcomes] == [None, "refused", None, None]
    assert sorted(map(id, seen)) == sorted(map(id, result.outcomes))
    assert {(p, length, wanted) for p, length, wanted in memory.asked} == {(f"p{i}", 5, i) for i in range(4)}


async def test_a_chat_is_sent_as_messages() -> None:
    memory = Memory()
    await run_load(CHAT, singles(1), Pace(), send=memory.send)
    assert memory.asked == [([{"role": "user", "content": "p0"}], 5, 0)]


async def test_the_history_is_sent_again_with_each_turn() -> None:
    memory = Memory()
    turns = (Turn("q1", 5, 3), Turn("q2", 6, 3), Turn("q3", 7, 3))
    await run_load(CHAT, [turns], Pace(), send=memory.send)
    assert [[m["content"] for m in messages] for messages, _, _ in memory.asked] == [
        ["q1"], ["q1", "a1", "q2"], ["q1", "a1", "q2", "a2", "q3"],
    ]  # fmt: skip
    assert [m["role"] for m in memory.asked[2][0]] == ["user", "assistant", "user", "assistant", "user"]
    assert [known for _, known, _ in memory.asked] == [5, 5 + 2 + 6, 13 + 2 + 7]


async def test_after_a_failed_turn_the_rest_counts_as_failed() -> None:
    memory, seen = Memory(failing=("q2",)), list[Outcome]()
    turns = tuple(Turn(f"q{n}", 5, 3) for n in (1, 2, 3, 4))
    result = await run_load(CHAT, [turns], Pace(), on_done=seen.append, send=memory.send)
    lost = "not sent: turn 2 of its conversation failed"
    assert [o.error for o in result.outcomes] == [None, "refused", lost, lost]
    assert len(seen) == 4
    assert len(memory.asked) == 2
