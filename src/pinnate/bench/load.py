"""A load: conversations sent to a server at their times, so many at once.

Knows: arrival, concurrency, history. Must not know: HTTP, statistics.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from pinnate.bench.arrivals import arrival_times
from pinnate.bench.client import Message, Outcome, Target, send
from pinnate.bench.datasets import Conversation, Prompt, Turn

Send = Callable[[Target, Prompt | list[Message], int, int], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True)
class Pace:
    """When conversations begin (arrivals.py), and how many requests are under way at most (None: no limit)."""

    request_rate: float = float("inf")
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Every request of the load, in the order of the conversations; seconds from the first start to the last end."""

    outcomes: list[Outcome]
    duration: float


async def run_load(
    target: Target,
    conversations: Sequence[Conversation],
    pace: Pace,
    *,
    on_done: Callable[[Outcome], None] = lambda _: None,
    send: Send = send,
) -> LoadResult:
    """Sends everything and waits for all of it."""
    limit = contextlib.nullcontext() if pace.max_concurrency is None else asyncio.Semaphore(pace.max_concurrency)
    times = arrival_times(len(conversations), pace.request_rate, pace.burstiness, random.Random(pace.seed))
    begin = perf_counter()

    async def ask(prompt: Prompt | list[Message], prompt_len: int, output_len: int) -> Outcome:
        async with limit:
            outcome = await send(target, prompt, prompt_len, output_len)
        on_done(outcome)
        return outcome

    async def talk(turns: Conversation, at: float) -> list[Outcome]:
        # Against the start, not the request before: delays must not add up.
        await asyncio.sleep(max(0.0, begin + at - perf_counter()))
        if not target.chat:
            return [await ask(turn.prompt, turn.prompt_len, turn.output_len) for turn in turns]
        return await _converse(turns, ask, on_done)

    done = await asyncio.gather(*(talk(turns, at) for turns, at in zip(conversations, times, strict=True)))
    return LoadResult([outcome for talked in done for outcome in talked], perf_counter() - begin)


async def _converse(
    turns: Sequence[Turn],
    ask: Callable[[list[Message], int, int], Awaitable[Outcome]],
    on_done: Callable[[Outcome], None],
) -> list[Outcome]:
    """Each turn with the whole history. After a failed turn the rest cannot be sent, and is counted as failed."""
    history: list[Message] = []
    known = 0  # tokens of the history, as far as they are known here
    outcomes: list[Outcome] = []
    for number, turn in enumerate(turns, start=1):
        assert isinstance(turn.prompt, str), "a chat's prompt is text"
        history.append({"role": "user", "content": turn.prompt})
        outcome = await ask(list(history), known + turn.prompt_len, turn.output_len)
        outcomes.append(outcome)
        if outcome.error is not None:
            missing = [Outcome(0, error=f"not sent: turn {number} of its conversation failed") for _ in turns[number:]]
            for lost in missing:
                on_done(lost)
            return outcomes + missing
        history.append({"role": "assistant", "content": outcome.text})
        known += turn.prompt_len + outcome.output_len
    return outcomes
