"""AsyncEngine over a core in a thread: streams, refusals, stop strings, death and restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest
from tests.fakes import EOS, VOCAB_SIZE, ByteTokenizer, FakeExecutor, ThreadClient, expected_tokens, spell

from pinnate.core.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    NotFoundError,
    QueueFullError,
)
from pinnate.core.messages import Abort
from pinnate.core.request import BACKGROUND_PRIORITY, FinishReason, Request
from pinnate.core.sampling import SamplingParams
from pinnate.core.structured import StructuredOutput
from pinnate.engine import async_engine
from pinnate.engine.async_engine import AsyncEngine
from pinnate.engine.cache_commands import CacheCommands
from pinnate.engine.engine_core import EngineCore
from pinnate.engine.model_text import ModelText
from pinnate.engine.output_processor import OutputDelta
from pinnate.engine.stream import RequestStream
from pinnate.kvcache.manager import KVCacheManager
from pinnate.scheduler.scheduler import Scheduler

INFO = {
    "max_model_len": 128,
    "vocab_size": VOCAB_SIZE,
    "eos_token_ids": [EOS],
    "num_pages": 64,
    "page_size": 4,
    "max_num_seqs": 4,
    "max_num_queued_reqs": 2,
}


class World:
    """An AsyncEngine, and every fake engine it has started."""

    def __init__(self) -> None:
        self.clients: list[ThreadClient] = []
        self.executor_options: dict[str, object] = {}
        self.refuse_start: list[Exception] = []
        self.info: dict[str, object] = INFO

    def connect(self) -> ThreadClient:
        if self.refuse_start:
            raise self.refuse_start.pop(0)
        client = ThreadClient(self.make_core, self.info)
        self.clients.append(client)
        return client

    def make_core(self, port: ThreadClient) -> EngineCore:
        cache = KVCacheManager(num_pages=64, page_size=4, pinnable_pages=8)
        scheduler = Scheduler(cache, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=128)
        commands = CacheCommands(cache).handlers()
        return EngineCore(scheduler, FakeExecutor(4, **self.executor_options), port, commands=commands)

    def start(self, *, seed: int | None = None, **executor_options: object) -> AsyncEngine:
        self.executor_options = executor_options
        self.engine = AsyncEngine(ModelText(ByteTokenizer(), None), self.connect(), self.info, self.connect, seed)
        return self.engine

    def sent(self, kind: type) -> list[object]:
        return [message for client in self.clients for message in client.sent if isinstance(message, kind)]


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(async_engine, "FIRST_RESTART_SECONDS", 0.01)
    world = World()
    yield world
    await world.engine.close()
    assert world.engine.state == "closed"


def endless(prefix: list[int]) -> int:
    """Slow enough that a stream is left, or a queue filled, long before its requests end by themselves."""
    time.sleep(0.002)
    return 97 + len(prefix) % 26


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 8} | fields))


async def gather(stream: RequestStream) -> dict[int, OutputDelta]:
    """The whole of each choice."""
    merged: dict[int, OutputDelta] = {}
    async for delta in stream:
        merged[delta.index] = merged[delta.index].merged_with(delta) if delta.index in merged else delta
    return merged


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


async def test_many_streams_at_once(world: World) -> None:
    engine = world.start()
    prompts = [[i, i + 1, i + 2] for i in range(5)]
    streams = [await engine.submit(p, greedy(ignore_eos=True, n=1 + (p[0] == 0)), request_id="x") for p in prompts]
    results = await asyncio.gather(*(gather(stream) for stream in streams))
    for request, result in zip(world.sent(Request), results, strict=True):
        for index, choice in result.items():
            assert choice.token_ids == expected_tokens(request, index)
            assert choice.finish_reason is FinishReason.LENGTH
    assert len(results[0]) == 2
    await until(lambda: engine.stats.num_running == 0)
    assert engine.stats.generation_tokens == 6 * 8
    assert world.sent(Abort) == []


async def test_what_is_filled_in(world: World) -> None:
    engine = world.start()
    for _ in range(2):
        stream = await engine.submit([1, 2], SamplingParams(), request_id="x", cache_salt="s", priority=3)
        await gather(stream)
    first, second = world.sent(Request)
    assert (first.max_tokens, first.cache_salt, first.priority, first.eos_token_ids) == (126, "s", 3, (EOS,))
    assert first.seed != second.seed
    assert first.request_id != second.request_id
    assert first.request_id.startswith("x")


async def test_a_servers_seed_draws_the_seeds_of_requests(world: World) -> None:
    engines = [world.start(seed=5)]
    await gather(await engines[0].submit([1, 2], greedy(), request_id="x"))
    await engines[0].close()
    await gather(await world.start(seed=5).submit([1, 2], greedy(), request_id="x"))
    first, second = world.sent(Request)
    assert first.seed == second.seed


@pytest.mark.parametrize(
    ("prompt", "fields", "error"),
    [
        ([], {}, InvalidRequestError),
        ([VOCAB_SIZE], {}, InvalidRequestError),
        ([1] * 200, {}, ContextLengthError),
        ([1], {"max_tokens": 128}, ContextLengthError),
        ([1], {"logit_bias": {VOCAB_SIZE: 1.0}}, InvalidRequestError),
        ([1], {"n": 5}, InvalidRequestError),
    ],
)
async def test_refusals_reach_no_engine(
    world: World, prompt: list[int], fields: dict[str, object], error: type[Exception]
) -> None:
    engine = world.start()
    with pytest.raises(error):
        await engine.submit(prompt, greedy(**fields), request_id="x")
    assert world.clients[0].sent == []


async def test_full_queue(world: World) -> None:
    engine = world.start(script=endless)
    streams = [await engine.submit([1], greedy(max_tokens=70, n=3), request_id="x") for _ in range(2)]
    with pytest.raises(QueueFullError, match="6 sequences are in flight, the limit is 6"):
        await engine.submit([1], greedy(), request_id="x")
    with pytest.raises(QueueFullError):
        engine.check_queue()
    await until(lambda: not streams[0].is_waiting)
    streams[0].abort()
    await gather(await engine.submit([1], greedy(), request_id="x"))


@pytest.mark.parametrize("structured", [None, StructuredOutput(kind="regex", text="[a-c]{3}")])
async def test_background_requests_are_not_refused_for_live_ones_and_take_none_of_their_places(
    world: World, structured: StructuredOutput | None
) -> None:
    engine = world.start(script=endless)
    live = [await engine.submit([1], greedy(max_tokens=70), request_id="x") for _ in range(6)]
    params = greedy(structured_output=structured, max_tokens=3)
    behind = [await engine.submit([2], params, request_id="b", priority=BACKGROUND_PRIORITY) for _ in range(9)]
    for _ in range(2):
        with pytest.raises(QueueFullError, match="6 sequences are in flight, the limit is 6"):
            await engine.submit([1], params, request_id="x")
        with pytest.raises(QueueFullError, match="6 sequences are in flight, the limit is 6"):
            await engine.submit([1], greedy(), request_id="x")
    live[0].abort()
    await gather(await engine.submit([1], greedy(), request_id="x"))
    for stream in (*live, *behind):
        stream.abort()
    await until(lambda: engine.stats.num_running == engine.stats.num_waiting == 0)


async def test_waiting_prompts_are_limited_by_their_tokens(world: World) -> None:
    world.info = INFO | {"max_num_queued_tokens": 20}
    engine = world.start(script=endless)
    streams = [await engine.submit([1] * 30, greedy(), request_id="x")]  # alone: however long
    with pytest.raises(QueueFullError, match="30 prompt tokens wait and this prompt has 1, the limit is 20"):
        await engine.submit([1], greedy(), request_id="x")
    await until(lambda: not streams[0].is_waiting)
    streams.append(await engine.submit([1] * 12, greedy(), request_id="x"))
    await asyncio.gather(*map(gather, streams))


async def test_stop_string_ends_the_choice_and_tells_the_engine_once(world: World) -> None:
    engine = world.start(script=spell("hello, world and more", 2))
    stream = await engine.submit([1, 2], greedy(max_tokens=100, stop=("rld",)), request_id="x")
    result = (await gather(stream))[0]
    assert (result.text, result.stop_reason) == ("hello, wo", "rld")
    assert result.token_ids == list(b"hello, world")
    await until(lambda: engine.stats.num_running == 0)
    (request,) = world.sent(Request)
    assert world.sent(Abort) == [Abort([request.request_id], 0)]


async def test_leaving_a_stream_aborts_once(world: World) -> None:
    engine = world.start(script=endless)
    stream = await engine.submit([1], greedy(max_tokens=120), request_id="x")
    async for _ in stream:
        break
    stream.abort()
    await stream.aclose()
    (request,) = world.sent(Request)
    await until(lambda: bool(world.sent(Abort)) and engine.stats.num_running == 0)
    assert world.sent(Abort) == [Abort([request.request_id])]


async def test_failed_step_raises_in_its_streams(world: World) -> None:
    engine = world.start(fail_when=lambda batch: any(99 in s.token_ids for s in batch.sequences))
    with pytest.raises(EngineError, match="told to fail"):
        await gather(await engine.submit([99], greedy(), request_id="x"))
    assert engine.state == "ready"
    await gather(await engine.submit([1], greedy(), request_id="x"))


async def test_commands(world: World) -> None:
    engine = world.start()
    await gather(await engine.submit(list(range(12)), greedy(ignore_eos=True), request_id="x"))
    assert (await engine.command("flush_cache"))["freed_pages"] == 5
    with pytest.raises(EngineError, match="unknown command"):
        await engine.command("dance")


async def test_a_refused_command_says_what_to_mend(world: World) -> None:
    engine = world.start()
    for arguments, kind, param, code in (
        ({"token_ids": [1]}, InvalidRequestError, "prompt", "invalid_request"),
        ({"token_ids": list(range(40))}, InvalidRequestError, "prompt", "pin_quota_exceeded"),
    ):
        with pytest.raises(kind) as refusal:
            await engine.command("pin", **arguments)
        assert (refusal.value.param, refusal.value.code) == (param, code)
    with pytest.raises(NotFoundError, match="no pin 'x'"):
        await engine.command("unpin", pin_id="x")
    with pytest.raises(EngineError, match="ValidationError"):  # a fault of ours, not of a caller
        await engine.command("pin", token_ids="text")


async def test_a_prefix_is_computed_and_pinned(world: World) -> None:
    engine = world.start()
    prompt = list(range(12))
    assert await engine.command("pin", token_ids=prompt) == {"pinned": False}
    await gather(await engine.submit(prompt, greedy(max_tokens=1), request_id="x"))
    pinned = await engine.command("pin", token_ids=prompt)
    assert pinned == {
        "pinned": True, "pin_id": "pin-1", "num_tokens": 12, "num_pages": 3, "pinned_pages": 3, "quota_pages": 8,
    }  # fmt: skip
    assert (await engine.command("flush_cache"))["freed_pages"] == 0
    deltas = await gather(await engine.submit([*prompt, 1], greedy(max_tokens=1), request_id="x"))
    assert deltas[0].num_cached_tokens == 12
    assert await engine.command("unpin", pin_id="pin-1") == {"unpinned_pages": 3, "pinned_pages": 0, "quota_pages": 8}


async def test_death_ends_streams_and_the_engine_comes_back(world: World) -> None:
    engine = world.start(script=endless)
    world.refuse_start.append(EngineDeadError("the first try fails"))
    stream = await engine.submit([1], greedy(max_tokens=120), request_id="x")
    call = asyncio.create_task(engine.command("stats"))
    await asyncio.sleep(0)
    world.clients[0].kill()
    with pytest.raises(EngineDeadError, match="died while it worked on this request"):
        await gather(stream)
    with pytest.raises(EngineDeadError, match="not ready"):
        await engine.submit([1], greedy(), request_id="x")
    await asyncio.gather(call, return_exceptions=True)
    await until(lambda: engine.state == "ready")
    assert len(world.clients) == 2
    assert world.refuse_start == []
    assert len((await gather(await engine.submit([1], greedy(), request_id="x")))[0].token_ids) == 8


async def test_drain_waits_for_the_running_and_refuses_the_new(world: World) -> None:
    engine = world.start(script=endless)
    stream = await engine.submit([1], greedy(max_tokens=60), request_id="x")
    drained = asyncio.create_task(engine.drain())
    await asyncio.sleep(0)
    with pytest.raises(EngineDeadError, match="takes no new requests"):
        await engine.submit([1], greedy(), request_id="x")
    assert len((await gather(stream))[0].token_ids) == 60
    await drained


async def test_close_ends_streams(world: World) -> None:
    engine = world.start(script=endless)
    stream = await engine.submit([1], greedy(max_tokens=120), request_id="x")
    await engine.close()
    with pytest.raises(EngineDeadError, match="shut down"):
        await gather(stream)
    with pytest.raises(EngineDeadError, match="closed"):
        await engine.submit([1], greedy(), request_id="x")


async def test_tokenize_long_texts_in_a_thread(world: World) -> None:
    engine = world.start()
    assert await engine.tokenize("abc") == [97, 98, 99]
    assert await engine.tokenize("é" * 3000, add_special_tokens=False) == list("é".encode()) * 3000
    assert (engine.max_model_len, engine.vocab_size) == (128, VOCAB_SIZE)


async def test_listeners_hear_every_step_and_of_a_new_engine(world: World) -> None:
    engine, heard = world.start(), []
    engine.listen(heard.append)
    await gather(await engine.submit([1, 2, 3], greedy(max_tokens=5), request_id="r"))
    await until(lambda: heard[-1].steps == 5)
    assert [stats.steps for stats in heard if stats.num_running] == [1, 2, 3, 4]
    assert [stats.step_tokens for stats in heard][:5] == [3, 1, 1, 1, 1]
    world.clients[-1].kill()
    await until(lambda: heard[-1].steps == 0)
    assert heard[-1].num_free_pages == 64
