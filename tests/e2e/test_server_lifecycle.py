"""Start, signals, death of the engine: each test has a server of its own. Case numbers are those of
test_cases_api.py."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.conftest import MODEL, open_session
from tests.e2e.harness import Api, Server, alive, counting

P1, P1_NEXT = "1, 2, 3, 4, 5, 6, 7,", " " + counting(60, 8)
KEY = "k-3f9a-secret"

Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Server] = []

    def make(*flags: str, model: str | None = None) -> Server:
        started.append(Server(tmp_path, "--max-model-len", "2048", *flags, model=model))
        return started[-1]

    yield make
    for server in started:
        server.stop()


@asynccontextmanager
async def connect(server: Server) -> AsyncIterator[Api]:
    async with open_session() as session:
        yield Api(server, session, MODEL)


async def until_running(api: Api, count: int) -> None:
    async with asyncio.timeout(20):
        while (await api.metrics())["num_requests_running"] < count:
            await asyncio.sleep(0.02)


async def test_case_66_sigterm_lets_streams_finish_and_refuses_new_requests(start: Start) -> None:
    server = start().wait_until(200)
    children = server.children()
    assert children
    async with connect(server) as api:
        streams = [asyncio.create_task(api.stream(P1, max_tokens=180, ignore_eos=True)) for _ in range(2)]
        await until_running(api, 2)
        server.signal(signal.SIGTERM)
        server.wait_until(503, 0, seconds=5)
        try:
            refused = await api.complete(P1)
            assert (refused.status, refused.error["code"]) == (503, "shutting_down")
        except aiohttp.ClientConnectionError:  # both streams have ended already
            assert all(stream.done() for stream in streams)
        for streamed in await asyncio.gather(*streams):
            assert streamed.text() == P1_NEXT[:180]
            assert (streamed.done, streamed.finish(), streamed.error) == (1, ["length"], None)
    assert server.exit_code() == 0
    assert not any(alive(pid) for pid in children)


async def test_case_66_a_second_signal_ends_streams_with_an_error(start: Start) -> None:
    server = start().wait_until(200)
    children = server.children()
    async with connect(server) as api:
        streaming = asyncio.create_task(api.stream(P1, max_tokens=2000, ignore_eos=True))
        plain = asyncio.create_task(api.complete(P1, max_tokens=2000, ignore_eos=True))
        await until_running(api, 2)
        while not (await api.metrics())["time_to_first_token_seconds_count"]:
            await asyncio.sleep(0.02)
        server.signal(signal.SIGINT)
        server.wait_until(503, seconds=5)
        server.signal(signal.SIGINT)
        streamed = await streaming
        assert streamed.error is not None
        assert streamed.error["code"] == "shutting_down"
        assert streamed.done == 0
        assert streamed.complete
        assert ((await plain).status, (await plain).error["code"]) == (503, "shutting_down")
    assert server.exit_code() == 0
    assert not any(alive(pid) for pid in children)


async def test_case_66_the_grace_period_ends(start: Start) -> None:
    server = start("--shutdown-timeout", "0.3").wait_until(200)
    async with connect(server) as api:
        streaming = asyncio.create_task(api.stream(P1, max_tokens=2000, ignore_eos=True))
        await until_running(api, 1)
        server.signal()
        streamed = await streaming
        assert streamed.status in (200, 503)
        assert streamed.done == 0
    assert server.exit_code() == 0


async def test_case_7_a_killed_engine_is_told_noticed_and_replaced(start: Start) -> None:
    server = start().wait_until(200)
    (engine,) = server.children()
    async with connect(server) as api:
        before = (await api.complete(P1, max_tokens=20)).text
        streaming = asyncio.create_task(api.stream(P1, max_tokens=2000, ignore_eos=True))
        plain = asyncio.create_task(api.complete(P1, max_tokens=2000, ignore_eos=True))
        await until_running(api, 2)
        await asyncio.sleep(0.2)
        generated = (await api.metrics())["generation_tokens_total"]
        os.kill(engine, signal.SIGKILL)
        streamed = await streaming
        assert streamed.error is not None
        assert streamed.error["code"] == "engine_dead"
        assert streamed.done == 0
        assert ((await plain).status, (await plain).error["code"]) == (503, "engine_dead")
        assert server.health() == 503
        refused = await api.complete(P1)
        assert (refused.status, refused.error["code"]) == (503, "engine_dead")
        server.wait_until(200)
        assert server.children() != [engine]
        assert (await api.complete(P1, max_tokens=20)).text == before == P1_NEXT[:20]
        values = await api.metrics()
        assert values["engine_restarts_total"] == 1
        assert values["generation_tokens_total"] >= generated
        assert values["num_requests_running"] == values["num_requests_waiting"] == 0


def test_a_stopped_engine_is_unhealthy_until_it_goes_on(start: Start) -> None:
    server = start().wait_until(200)
    (engine,) = server.children()
    os.kill(engine, signal.SIGSTOP)
    try:
        server.wait_until(503, seconds=20)
    finally:
        os.kill(engine, signal.SIGCONT)
    server.wait_until(200, seconds=20)


def test_case_66_a_killed_server_takes_its_engine_with_it(start: Start) -> None:
    server = start().wait_until(503, 200)
    children = server.wait_until(200).children()
    server.signal(signal.SIGKILL)
    server.exit_code()
    for _ in range(100):
        if not any(alive(pid) for pid in children):
            return
        time.sleep(0.05)
    raise AssertionError(f"{children} live on")


async def test_case_75_the_key_guards_everything_but_health(start: Start) -> None:
    server = start("--api-key", KEY, "--access-log").wait_until(200)
    async with connect(server) as api:
        body = b'{"prompt": "x", "max_tokens": 1}'
        for method, path in (
            ("POST", "/v1/completions"), ("POST", "//v1/completions"), ("POST", "/v1/../v1/completions"),
            ("GET", "/v1/models"), ("HEAD", "/v1/models"), ("GET", "/metrics"), ("GET", "/none"),
            ("POST", "/flush_cache"),
        ):  # fmt: skip
            for header in ({}, {"Authorization": "Bearer nope"}, {"Authorization": "Bearer "}):
                assert (await api.request(method, path, body, **header)).status == 401
        assert (await api.request("POST", f"/v1/completions?api_key={KEY[:3]}", body)).status == 401
        assert (await api.request("POST", "/v1/completions", body, Authorization=f"Bearer {KEY}")).status == 200
    assert "/v1/completions" in server.text()
    assert KEY not in server.text()


def test_what_cannot_start_says_so_in_one_line(start: Start, tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + b"\xff" * 64)
    for server in (start(model=str(bad)), start(model=str(tmp_path / "absent.gguf"))):
        assert server.exit_code() == 2
        assert "Traceback" not in server.text()
        assert len([line for line in server.text().splitlines() if "error" in line]) == 1


def test_a_taken_port_is_an_error_of_settings(start: Start) -> None:
    first = start()
    second = start("--port", str(first.port)) if first.wait_until(503, 200) else first
    assert second.exit_code() == 2
    assert "--port" in second.text()


def test_case_66_sigterm_when_idle_or_starting(start: Start) -> None:
    for statuses in ((200,), (503, 200)):
        server = start().wait_until(*statuses)
        children = server.children()
        server.signal()
        assert server.exit_code(5) == 0
        assert not any(alive(pid) for pid in children)
        assert "Traceback" not in server.text()


def test_connections_without_a_request_do_not_hold_up_the_end(start: Start) -> None:
    """Idle ones, one between two requests, half a head, half a body."""
    server = start("--executor", "simulated").wait_until(200)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    sent = [b"", b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n", head, head + b'Content-Length: 100\r\n\r\n{"prompt": ']
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in sent]
        for client, data in zip(clients, sent, strict=True):
            client.sendall(data)
        assert clients[1].recv(4096).startswith(b"HTTP/1.1 200")
        server.signal()
        assert server.exit_code(8) == 0
        assert b"shutting_down" in clients[3].recv(4096)
        assert clients[2].recv(4096) == b""
    assert "Traceback" not in server.text()
