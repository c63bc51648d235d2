"""Streams: merging, order, ends, errors, and leaving early."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from tests.fakes import ByteTokenizer, make_request

from pinnate.core.errors import EngineDeadError, EngineError, PinnateError
from pinnate.core.messages import Abort, TokenOutput
from pinnate.core.request import BACKGROUND_PRIORITY, FinishReason
from pinnate.engine.open_requests import OpenRequests
from pinnate.engine.output_processor import OutputDelta, OutputProcessor
from pinnate.engine.queue_gate import Place
from pinnate.engine.stream import Channel, RequestStream


class Aborts:
    def __init__(self) -> None:
        self.errors: list[PinnateError | None] = []

    def __call__(self, error: PinnateError | None) -> None:
        self.errors.append(error)

    @property
    def count(self) -> int:
        return len(self.errors)


async def test_slow_consumer_gets_one_merged_delta_per_choice() -> None:
    channel = Channel()
    for step in range(100):
        channel.put(OutputDelta(step % 2, "ab"[step % 2], [step]))
    channel.end()
    deltas = [delta async for delta in RequestStream("r", channel, Place(1, 1), Aborts())]
    assert [(delta.index, delta.text) for delta in deltas] == [(0, "a" * 50), (1, "b" * 50)]
    assert deltas[1].token_ids == list(range(1, 100, 2))


async def test_waiting_consumer_gets_each_delta() -> None:
    channel = Channel()
    stream = RequestStream("r", channel, Place(1, 1), Aborts())
    for text in "xyz":
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        channel.put(OutputDelta(0, text, []))
        assert (await waiting).text == text
    channel.end()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_take_all_gives_what_there_is_and_comes_back_after_a_nudge() -> None:
    channel = Channel()
    stream = RequestStream("r", channel, Place(1, 1), Aborts())
    for index in (1, 0, 1):
        channel.put(OutputDelta(index, str(index), []))
    assert [(delta.index, delta.text) for delta in await stream.take_all() or ()] == [(1, "11"), (0, "0")]
    stream.nudge()  # nobody waits: it is forgotten
    waiting = asyncio.create_task(stream.take_all())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    stream.nudge()
    assert await waiting == []
    waiting = asyncio.create_task(stream.take_all())
    await asyncio.sleep(0)
    stream.nudge()
    channel.put(OutputDelta(0, "x", []))
    assert [delta.text for delta in await waiting or ()] == ["x"]
    channel.end()
    assert await stream.take_all() is None


def test_fail_passes_the_error_on() -> None:
    aborts = Aborts()
    stream, error = RequestStream("r", Channel(), Place(1, 1), aborts), EngineError("late")
    stream.fail(error)
    assert aborts.errors == [error]


async def test_error_comes_after_what_had_arrived() -> None:
    channel = Channel()
    channel.put(OutputDelta(0, "x", []))
    channel.end(EngineDeadError("gone"))
    stream = RequestStream("r", channel, Place(1, 1), Aborts())
    assert (await anext(stream)).text == "x"
    with pytest.raises(EngineDeadError, match="gone"):
        await anext(stream)


async def test_break_aborts() -> None:
    channel, aborts = Channel(), Aborts()
    channel.put(OutputDelta(0, "x", []))
    stream = RequestStream("r", channel, Place(1, 1), aborts)
    async for _ in stream:
        break
    await asyncio.sleep(0.01)
    assert aborts.count == 1


async def test_cancelled_task_aborts() -> None:
    aborts = Aborts()
    stream = RequestStream("r", Channel(), Place(1, 1), aborts)

    async def consume() -> None:
        async for _ in stream:
            pass

    task = asyncio.create_task(consume())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert aborts.count == 1


async def test_dropped_stream_aborts() -> None:
    aborts = Aborts()
    RequestStream("r", Channel(), Place(1, 1), aborts)
    assert aborts.count == 1


async def test_cancelled_wait_loses_nothing() -> None:
    channel = Channel()
    stream = RequestStream("r", channel, Place(1, 1), Aborts())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.01)
    channel.put(OutputDelta(0, "x", []))
    assert (await anext(stream)).text == "x"


def opened(requests: OpenRequests, wire_id: str, **sampling: object) -> Channel:
    request = make_request(wire_id, [1], **sampling)
    return requests.add(OutputProcessor(request, ByteTokenizer()), request)[0]


async def test_outputs_find_their_stream_and_strangers_are_ignored() -> None:
    requests = OpenRequests()
    a, b = opened(requests, "a"), opened(requests, "b", n=2)
    assert requests.gate.num_sequences == 3
    aborts = requests.deliver(
        [TokenOutput("a", 0, [97]), TokenOutput("b", 1, [98]), TokenOutput("gone", 0, [99], FinishReason.ABORT)]
    )
    assert aborts == []
    assert (await a.take()).text == "a"
    assert ((await b.take()).index, requests.gate.num_sequences) == (1, 3)


async def test_stop_string_is_told_for_that_choice_only() -> None:
    requests = OpenRequests()
    opened(requests, "a", n=2, stop=("#",))
    assert requests.deliver([TokenOutput("a", 1, [35])]) == [Abort(["a"], 1)]
    assert requests.gate.num_sequences == 2
    assert requests.deliver([TokenOutput("a", 0, [35])]) == [Abort(["a"], 0)]
    assert requests.gate.num_sequences == 0


async def test_failed_choice_ends_its_request_alone() -> None:
    requests = OpenRequests()
    a, b = opened(requests, "a", n=2), opened(requests, "b")
    failed = TokenOutput("a", 0, [], finish_reason=FinishReason.ERROR, error="boom")
    assert requests.deliver([failed, TokenOutput("b", 0, [98])]) == [Abort(["a"])]
    with pytest.raises(EngineError, match="boom"):
        await a.take()
    assert (await b.take()).text == "b"


async def test_unreadable_output_ends_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    requests = OpenRequests()
    a, b = opened(requests, "a"), opened(requests, "b")
    requests.deliver([TokenOutput("a", 5, [97]), TokenOutput("b", 0, [98])])  # there is no choice 5
    with pytest.raises(EngineError, match="IndexError"):
        await a.take()
    assert (await b.take()).text == "b"
    assert "output of request a" in caplog.text


def test_a_request_waits_until_it_is_started_or_gone() -> None:
    requests = OpenRequests()
    asked = {name: make_request(name, [1] * 5) for name in "ab"}
    places = {name: requests.add(OutputProcessor(each, ByteTokenizer()), each)[1] for name, each in asked.items()}
    assert (requests.gate.num_waiting_tokens, places["a"].is_waiting) == (10, True)
    requests.start(["a", "stranger"])
    assert (requests.gate.num_waiting_tokens, places["a"].is_waiting, places["b"].is_waiting) == (5, False, True)
    requests.start(["a"])
    requests.end_all(EngineDeadError("gone"))
    assert (requests.gate.num_waiting_tokens, requests.gate.num_sequences) == (0, 0)


def test_background_work_takes_no_place_in_the_queue() -> None:
    requests = OpenRequests()
    request = msgspec.structs.replace(make_request("a", [1] * 5), priority=BACKGROUND_PRIORITY)
    requests.add(OutputProcessor(request, ByteTokenizer()), request)
    assert (requests.gate.num_waiting_tokens, requests.gate.num_sequences) == (0, 0)
    requests.start(["a"])
    assert requests.end("a")
    assert (requests.gate.num_waiting_tokens, requests.gate.num_sequences) == (0, 0)


async def test_end_all_and_empty() -> None:
    requests = OpenRequests()
    await requests.wait_until_empty()
    a = opened(requests, "a")
    waiting = asyncio.create_task(requests.wait_until_empty())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert requests.end_all(EngineDeadError("gone")) == 1
    await waiting
    with pytest.raises(EngineDeadError):
        await a.take()
    assert requests.end("a") is False
