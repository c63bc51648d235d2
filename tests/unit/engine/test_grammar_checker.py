"""The checking process: real, over a vocabulary of bytes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.e2e.harness import alive

from pinnate.core.errors import EngineError, InvalidRequestError, QueueFullError, UnsupportedError
from pinnate.core.structured import StructuredOutput
from pinnate.engine.grammar_checker import GrammarChecker
from pinnate.engine.grammar_worker import WorkerStart
from pinnate.text.grammars import limits

BYTES = WorkerStart([b"</s>", *(bytes([byte]) for byte in range(256))], [0], [0], limits.COMPILE_BYTES)
SCHEMA = StructuredOutput(kind="json_schema", text='{"type": "integer", "uniqueItems": false}', param="guided_json")


def regex(pattern: str) -> StructuredOutput:
    return StructuredOutput(kind="regex", text=pattern, param="regex")


@contextlib.asynccontextmanager
async def checking(seconds: float = 20.0) -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(lambda: BYTES, seconds)
    try:
        yield checker
    finally:
        await checker.close()


def children() -> list[int]:
    found = Path("/proc/self/task").glob("*/children")
    return [
        int(pid)
        for path in found
        for pid in path.read_text().split()
        if b"grammar_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


async def test_verdicts_name_the_callers_field_and_are_remembered() -> None:
    async with checking() as checker:
        checked = await checker.check(SCHEMA)
        assert (checked.text, checked.param) == ('{"type": "integer"}', "guided_json")
        for param in ("a", "b"):
            with pytest.raises(InvalidRequestError, match=rf"^{param} at #/items/type: ") as caught:
                await checker.check(StructuredOutput(kind="json_schema", text='{"items": {"type": 5}}', param=param))
            assert caught.value.param == param
        with pytest.raises(UnsupportedError, match="uniqueItems"):
            await checker.check(StructuredOutput(kind="json_schema", text='{"uniqueItems": true}'))
        with pytest.raises(InvalidRequestError, match="unclosed"):
            await checker.check(regex("("))  # by the compiler
        counts = checker.counts
        assert (counts.checks, counts.cache_hits, counts.failures) == (5, 1, 4)
        assert counts.seconds > 0
        [worker] = children()
        with pytest.raises(InvalidRequestError, match=f"{limits.MAX_BYTES}"):
            await checker.check(regex("x" * (limits.MAX_BYTES + 1)))
    assert not alive(worker)


async def test_one_that_takes_too_long_is_killed_and_the_next_one_is_answered() -> None:
    async with checking() as checker:
        await checker.check(regex("a"))
        [worker] = children()
        os.kill(worker, signal.SIGSTOP)  # a compile that never ends
        checker._seconds = 0.2
        waiting = [asyncio.create_task(checker.check(regex("b"))) for _ in range(2)]
        with pytest.raises(InvalidRequestError, match=r"longer than 0\.2 s"):
            await waiting[0]
        with pytest.raises(InvalidRequestError):
            await waiting[1]  # the same one: both waited for one check
        assert not alive(worker)
        assert (checker.counts.timeouts, checker.counts.failures) == (1, 2)
        checker._seconds = 20.0
        assert (await checker.check(regex("c"))).text == "c"
        [worker] = children()
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(InvalidRequestError, match="its compiler ended"):
            await checker.check(regex("d"))
        assert (await checker.check(regex("e"))).text == "e"


async def test_a_client_that_leaves_takes_nothing_from_another_and_the_queue_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_COMPILES_WAITING", 2)
    async with checking() as checker:
        tasks = [asyncio.create_task(checker.check(regex(pattern))) for pattern in ("a", "a", "b")]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await checker.check(regex("c"))
        tasks[0].cancel()
        assert [(await task).text for task in tasks[1:]] == ["a", "b"]
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]


async def test_background_checks_take_no_place_of_live_ones_nor_live_ones_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_COMPILES_WAITING", 2)
    async with checking() as checker:
        waiting = [
            asyncio.create_task(checker.check(regex(f"{background}{number}"), background=background))
            for background in (True, False)
            for number in range(2)
        ]
        await asyncio.sleep(0)
        for background in (True, False):
            with pytest.raises(QueueFullError, match="2 structured outputs wait"):
                await checker.check(regex("one more"), background=background)
        joined = asyncio.create_task(checker.check(regex("True0")))  # the same one: no place is needed
        assert [(await task).text for task in waiting] == ["True0", "True1", "False0", "False1"]
        assert (await joined).text == "True0"


async def test_a_process_that_does_not_start_is_the_engines_fault() -> None:
    checker = GrammarChecker(lambda: WorkerStart([], [], [], 0))  # no end of text: no vocabulary
    with pytest.raises(EngineError, match="did not start"):
        await checker.check(regex("a"))
    await checker.close()


async def test_old_verdicts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CACHED_GRAMMARS", 2)
    async with checking() as checker:
        for pattern in ("a", "b", "a", "c", "a", "b"):
            await checker.check(regex(pattern))
        assert checker.counts.cache_hits == 2
