"""The prefix cache as operators and clients see it, over real HTTP: pins, salts, reports, the view."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from pinnate.cli.main import main
from pinnate.core.kv_events import EventBatch
from tests.e2e.conftest import MODEL, open_session
from tests.e2e.harness import Api, Server, fresh_ids
from tests.property.kv_index import KVIndex

FLAGS = ("--num-pages", "200", "--max-model-len", "1024", "--pin-quota", "0.1", "--cache-report", "all")


@pytest.fixture(scope="module")
def controlled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"), *FLAGS, "--eviction-policy", "slru")
    try:
        server.wait_until(200)
        yield server
    finally:
        server.stop()


@pytest.fixture
async def control(controlled: Server) -> AsyncIterator[Api]:
    async with open_session() as session:
        yield Api(controlled, session, MODEL)


async def test_a_pinned_prefix_stays_whatever_comes(control: Api) -> None:
    prefix = fresh_ids(100)
    pinned = (await control.post("/pin_prefix", {"prompt": prefix})).json
    assert (pinned["num_tokens"], pinned["num_pages"], pinned["quota_pages"]) == (96, 6, 20)
    assert (await control.post("/pin_prefix", {"prompt": prefix})).json == pinned
    assert (await control.post("/flush_cache", b"")).status == 200
    for _ in range(2):
        await asyncio.gather(*(control.complete(fresh_ids(600), max_tokens=2) for _ in range(5)))
    assert (await control.complete([*prefix, 5, 6])).cached >= 96
    refused = await control.post("/pin_prefix", {"prompt": fresh_ids(400)})
    assert (refused.status, refused.error["code"]) == (400, "pin_quota_exceeded")
    assert "25 more pages; 6 of the 20" in refused.error["message"]
    assert (await control.post("/unpin_prefix", {"pin_id": pinned["pin_id"]})).json["unpinned_pages"] == 6
    await control.until_idle()
    await control.post("/flush_cache", b"")
    assert (await control.complete([*prefix, 5, 6])).cached == 0


async def test_a_chat_prefix_is_pinned_as_later_requests_begin(control: Api) -> None:
    system = {"role": "system", "content": "You answer in one word. " * 12}
    pinned = (await control.post("/pin_prefix", {"messages": [system]})).json
    await control.post("/flush_cache", b"")
    answer = await control.chat([system, {"role": "user", "content": "hi"}])
    assert answer.cached >= pinned["num_tokens"] >= 32
    assert (await control.post("/unpin_prefix", {"pin_id": pinned["pin_id"]})).status == 200


async def test_reports_tell_why(control: Api) -> None:
    prompt = fresh_ids(70)

    async def reason(ids: list[int], **fields: object) -> tuple[str, int]:
        answer = await control.complete(ids, cache_report=True, max_tokens=2, **fields)
        (report,) = answer.json["cache_report"]
        assert report["num_cached_tokens"] == answer.cached
        return report["reason"], report["num_cached_tokens"]

    assert await reason(prompt) == ("new_text", 0)
    assert await reason(prompt) == ("last_token", 69)
    assert await reason([*prompt[:40], 9, 9, 9]) == ("new_text", 40)
    assert await reason(prompt, cache_salt="tenant") == ("other_salt", 0)
    await control.until_idle()
    await control.post("/flush_cache", b"")
    debug = (await control.post("/debug/match", {"prompt": prompt})).json
    assert (debug["reason"], debug["num_lost_tokens"]) == ("evicted", 64)
    assert await reason(prompt) == ("evicted", 0)
    assert "cache_report" not in (await control.complete(prompt)).json


async def test_the_view_shows_what_saves_most(control: Api) -> None:
    await control.until_idle()
    await control.post("/flush_cache", b"")
    prefix = fresh_ids(64)
    for last in range(4):
        await control.complete([*prefix, last], cache_salt="secret-salt", max_tokens=1)
    await control.until_idle()
    answer = await control.get("/debug/cache")
    view = answer.json
    best = view["top_prefixes"][0]
    assert (best["start"], best["end"], best["hits"], best["tokens_saved"]) == (0, 64, 3, 192)
    assert best["tokens"] == prefix[:16]
    pages = view["pages"]
    assert pages["free"] + pages["cached"] + pages["in_use"] == pages["total"] == 200
    assert view["tree"]["nodes"][0]["end"] == 64
    assert b"secret-salt" not in answer.body


async def test_all_of_it_is_off_by_default(api: Api) -> None:
    ids = fresh_ids(40)
    assert (await api.post("/pin_prefix", {"prompt": ids})).error["code"] == "unsupported"
    assert (await api.get("/debug/cache")).error["code"] == "unsupported"
    assert (await api.post("/debug/match", {"prompt": ids})).error["code"] == "unsupported"
    assert (await api.complete(ids, cache_report=True)).error["param"] == "cache_report"


def test_start_prints_the_memory_plan(controlled: Server) -> None:
    text = controlled.text()
    assert "available: " in text
    assert "3200 tokens fit, 320 of them may be pinned" in text
    assert "why: 200 pages (3200 tokens, " in text


def test_flags_that_contradict_are_refused(tmp_path: Path) -> None:
    server = Server(tmp_path, "--no-prefix-caching", "--pin-quota", "0.1")
    try:
        assert server.exit_code() != 0
        assert "need prefix caching" in server.text()
    finally:
        server.stop()


async def test_a_router_follows_the_engine_through_a_restart(tmp_path: Path) -> None:
    """Events of a real server: what a router believes is what a prompt finds; a new engine process begins anew."""
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = json.dumps({"publisher": "zmq", "endpoint": endpoint, "replay_endpoint": replay, "topic": "kv"})
    server = Server(tmp_path, "--max-model-len", "512", "--num-pages", "40", "--kv-events-config", config)
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"kv")
    socket.connect(endpoint)
    sent = context.socket(zmq.DEALER)
    sent.connect(replay)
    index, numbers = KVIndex(), []

    async def take() -> None:
        _, number, payload = await socket.recv_multipart()
        numbers.append(int.from_bytes(number, "big"))
        index.apply(msgspec.msgpack.decode(payload, type=EventBatch).events)

    async def follow() -> None:
        while await socket.poll(500):
            await take()

    async def catch_up() -> None:
        """Takes all that the requests so far have caused: published by the step after theirs, and sent once the replay
        socket has it."""
        for _ in range(2):
            assert (await api.post("/debug/check_integrity", b"")).status == 200
        await sent.send(numbers[-1].to_bytes(8, "big"))
        last = numbers[-1]
        while (frames := await sent.recv_multipart())[1]:
            last = int.from_bytes(frames[0], "big")
        while numbers[-1] < last:
            assert await socket.poll(20_000)
            await take()

    try:
        await asyncio.to_thread(server.wait_until, 200)
        async with open_session() as session:
            api = Api(server, session, MODEL)
            while not numbers:  # until the subscription has arrived
                number = (await api.post("/resync_kv_events", b"")).json["sequence_number"]
                await follow()
            assert numbers[-1] == number
            prompts = [fresh_ids(100) for _ in range(9)]  # more than the pool holds
            for prompt in prompts:
                await api.complete(prompt, max_tokens=4)
            await catch_up()
            assert numbers == list(range(numbers[0], numbers[-1] + 1))
            known = {tokens for _, tokens in index.prefixes()}
            for prompt in prompts[::-1]:
                pages = max((n for n in range(0, 100, 16) if tuple(prompt[:n]) in known or n == 0), default=0)
                found = await api.complete(prompt, max_tokens=1)
                assert found.cached // 16 * 16 == pages
                await catch_up()
                known = {tokens for _, tokens in index.prefixes()}
            (engine,) = server.children()
            os.kill(engine, signal.SIGKILL)
            await asyncio.to_thread(server.wait_until, 503, 0)
            await asyncio.to_thread(server.wait_until, 200)
            before = len(numbers)
            while len(numbers) == before:
                await api.post("/resync_kv_events", b"")
                await follow()
            assert numbers[-1] < numbers[before - 1]  # numbers begin anew
            assert index.prefixes() == set()
            assert (await api.complete(prompts[0], max_tokens=1)).cached == 0
    finally:
        context.destroy(linger=0)
        server.stop()
    assert b"Traceback" not in server.log.read_bytes()


def test_an_address_that_is_taken_is_named(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        server = Server(tmp_path, "--kv-events-config", json.dumps({"endpoint": f"tcp://127.0.0.1:{port}"}))
        try:
            assert server.exit_code() != 0
            assert f"--kv-events-config: 'tcp://127.0.0.1:{port}' cannot be bound" in server.text()
        finally:
            server.stop()


@pytest.mark.parametrize("text", ["{", '{"port": 1}', '{"hwm": 0}', "[]"])
def test_bad_settings_of_events_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--kv-events-config", text]) == 2
    assert "--kv-events-config" in capsys.readouterr().err
