"""Faults, caused: clients that leave or do not read, an engine that is killed or stops, a queue that is full.

The engine is real but for its executor, which makes up its tokens: steps are quick and their length is known.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import leaks
import openai
import pytest

from tests.e2e.conftest import MODEL, open_session
from tests.e2e.harness import Api, Server, Streamed, alive

FLAGS = ("--executor", "simulated", "--max-num-seqs", "8", "--max-model-len", "2048", "--num-pages", "1200")
LONG = {"max_tokens": 1900, "ignore_eos": True}

Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Server] = []

    def make(*flags: str, step_ms: float = 2) -> Server:
        server = Server(tmp_path, *FLAGS, "--simulated-step-ms", str(step_ms), *flags)
        started.append(server)
        return server.wait_until(200)

    yield make
    for server in started:
        server.stop()


@asynccontextmanager
async def connect(server: Server) -> AsyncIterator[Api]:
    async with open_session() as session:
        yield Api(server, session, MODEL)


async def until(api: Api, name: str, value: float) -> None:
    async with asyncio.timeout(20):
        while (await api.metrics())[name] != value:
            await asyncio.sleep(0.02)


def test_requests_aborted_at_random_leave_nothing() -> None:
    server = leaks.Server("simulated", [])
    try:
        result = asyncio.run(leaks.measure(server, requests=300, seed=2, points=3))
    finally:
        code = server.stop()
    assert code == 0
    assert result["aborted_choices"] > 300
    stayed = result["seen"]["stay"]
    assert result["seen"]["200"] + result["seen"].get("429", 0) == stayed > 10  # 429: too many schemas at once
    _, early, late = result["rounds"]
    for name in ("server", "engine"):
        assert late[name]["rss_mb"] < early[name]["rss_mb"] + 30
        assert late[name]["files"] <= early[name]["files"] + 2
        assert late[name]["threads"] <= early[name]["threads"] + 2


SCHEMA = {"type": "object", "properties": {f"f{i}": {"type": "string"} for i in range(200)}}


async def test_a_killed_engine_ends_every_kind_of_request(start: Start) -> None:
    server = start("--max-num-queued-reqs", "50")
    (engine,) = server.children()
    async with connect(server) as api:
        asked: list[dict[str, Any]] = [
            {"n": 3}, {"prompt": ["a", "b"]}, {"n": 2, "use_beam_search": True}, {"n": 4}, {"prompt": "queued"},
        ]  # fmt: skip
        tasks = [asyncio.create_task(api.stream(fields.pop("prompt", "x"), **LONG, **fields)) for fields in asked]
        plain = asyncio.create_task(api.complete("x", **LONG, n=2))
        await until(api, "num_requests_running", 7)  # 3 and 2 and 2; there is no room for 4 at once
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        compiling = asyncio.create_task(api.chat("hi", response_format=form))
        await asyncio.sleep(0.01)
        os.kill(engine, signal.SIGKILL)
        began = time.monotonic()
        ended = await asyncio.gather(*tasks)
        for answer in (await plain, await compiling):
            assert (answer.status, answer.error["code"]) == (503, "engine_dead")
            assert int(answer.headers["Retry-After"]) >= 1
        assert time.monotonic() - began < 5
        started = [streamed for streamed in ended if streamed.status == 200]
        assert len(started) >= 2
        for streamed in started:
            assert streamed.error is not None
            assert (streamed.error["code"], streamed.done, streamed.complete) == ("engine_dead", 0, True)
        assert {streamed.status for streamed in ended} == {200, 503}
        await asyncio.to_thread(server.wait_until, 200)
        assert (await api.complete("x", n=3)).status == 200
        values = await api.until_idle()
        assert values["engine_restarts_total"] == 1
        assert (await api.post("/debug/check_integrity", b"")).json == {"ok": True}


async def test_a_stopped_engine_goes_on_or_is_left_behind(start: Start) -> None:
    server = start()
    (engine,) = server.children()
    async with connect(server) as api:
        streaming = asyncio.create_task(api.stream("x", max_tokens=300, ignore_eos=True))
        await until(api, "num_requests_running", 1)
        os.kill(engine, signal.SIGSTOP)
        await api.drop(api.completion_body("y", **LONG), 0.05)  # nobody to tell, for now
        assert (await api.get("/v1/models")).status == 200
        os.kill(engine, signal.SIGCONT)
        streamed = await streaming
        assert (streamed.done, streamed.finish()) == (1, ["length"])
        await api.until_idle()
        os.kill(engine, signal.SIGSTOP)
        hanging = asyncio.create_task(api.complete("x"))
        await asyncio.sleep(0.1)
        server.signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        server.signal(signal.SIGTERM)
        answer = await hanging
        assert (answer.status, answer.error["code"]) == (503, "shutting_down")
    assert await asyncio.to_thread(server.exit_code, 15) == 0
    assert not alive(engine)


def rss_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def stalled(server: Server, body: dict[str, Any]) -> socket.socket:
    """A client that asks for a chat and never reads."""
    data = json.dumps(body).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


async def test_clients_that_do_not_read_cost_little_and_are_cut_off(start: Start) -> None:
    server = start("--limit", "write_timeout=0.3", step_ms=2)
    async with connect(server) as api:
        await api.stream("x", max_tokens=200, ignore_eos=True)
        before = rss_mb(server.process.pid)
        body = api.chat_body("y", stream=True, logprobs=True, top_logprobs=20, n=2, **LONG)  # 8 MB; the system holds 3
        clients = [stalled(server, body) for _ in range(3)]
        await until(api, "num_requests_running", 6)
        streamed = await api.stream("x", max_tokens=300, ignore_eos=True)
        assert streamed.done == 1
        assert len(streamed.times) > 200  # parts of characters wait for the rest of them
        gaps = [b - a for a, b in zip(streamed.times, streamed.times[1:], strict=False)]
        assert sorted(gaps)[len(gaps) // 2] < 0.05
        await api.until_idle(10)  # cut off, so nothing is computed for them any more
        assert rss_mb(server.process.pid) < before + 60
        values = await api.metrics()
        assert values["generation_tokens_total"] < 200 + 300 + 6 * 1900
        for client in clients:
            client.close()
    assert server.text().count("it is cut off") == 3


async def test_the_queue_has_limits_of_tokens_and_time(start: Start) -> None:
    flags = ("--max-num-seqs", "1", "--max-num-queued-tokens", "100", "--queue-timeout", "1")
    server = start(*flags, "--limit", "keep_alive_interval=0.3", step_ms=5)
    async with connect(server) as api:
        running = asyncio.create_task(api.stream("x", max_tokens=600, ignore_eos=True))
        await until(api, "num_requests_running", 1)
        waiting = [asyncio.create_task(api.complete([5] * 60)), asyncio.create_task(api.complete([5] * 40))]
        await until(api, "num_requests_waiting", 2)
        for refused in (await api.complete([5]), await api.complete("x", stream=True)):
            assert (refused.status, refused.error["code"]) == (429, "queue_full")
            assert 1 <= int(refused.headers["Retry-After"]) <= 120
        for timed_out in await asyncio.gather(*waiting):
            assert (timed_out.status, timed_out.error["code"]) == (503, "queue_timeout")
            assert int(timed_out.headers["Retry-After"]) >= 1
        late = await raw_stream(server, api.completion_body("z", stream=True))  # told that it lives, then of its end
        assert late.count(b": keep-alive\n\n") >= 2
        assert late.count(b'"code":"queue_timeout"') == 1
        assert b"[DONE]" not in late
        assert ((await running).done, (await running).finish()) == (1, ["length"])
        values = await api.until_idle()
        assert values["requests_rejected_total"] == 4


async def raw_stream(server: Server, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    async with asyncio.timeout(20):
        answer = await reader.read(-1)
    writer.close()
    return answer


async def test_a_long_request_ends_in_time_and_others_do_not_notice(start: Start) -> None:
    server = start("--request-timeout", "0.5")
    async with connect(server) as api:
        streams: list[Streamed] = await asyncio.gather(*(api.stream("x", n=2, **LONG) for _ in range(2)))
        for streamed in streams:
            assert streamed.error is not None
            assert (streamed.error["code"], streamed.done) == ("request_timeout", 0)
        plain = await api.complete("x", **LONG)
        assert (plain.status, plain.error["code"]) == (504, "request_timeout")
        assert (await api.complete("x", max_tokens=20)).status == 200
        await api.until_idle()


async def test_real_clients_skip_comments_and_come_back_when_told(start: Start) -> None:
    flags = ("--max-num-seqs", "1", "--max-num-queued-reqs", "1", "--limit", "keep_alive_interval=0.1")
    server = start(*flags, step_ms=250)
    clients = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=9)
    claude = anthropic.AsyncAnthropic(base_url=server.url, api_key="x", max_retries=9)
    hello: Any = [{"role": "user", "content": "hi"}]

    async def chunks() -> int:
        stream = await clients.chat.completions.create(model=MODEL, messages=hello, max_tokens=4, stream=True)
        return len([chunk async for chunk in stream])

    async def message() -> str | None:
        async with claude.messages.stream(model=MODEL, messages=hello, max_tokens=4) as stream:
            return (await stream.get_final_message()).stop_reason

    async with clients, claude, connect(server) as api:
        counts = await asyncio.gather(*(chunks() for _ in range(3)), message())
        assert all(counts)
        assert (await api.metrics())["requests_rejected_total"] >= 1
