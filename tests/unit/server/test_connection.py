"""Connections that misbehave, over real sockets, on a server whose application is a few lines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from pinnate.server.connection import connection_factory
from pinnate.server.limits import ServerLimits

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
LIMITS = ServerLimits(
    head_timeout=0.2,
    body_timeout=0.2,
    write_timeout=0.2,
    idle_timeout=0.2,
    max_head_bytes=4096,
    max_connections=4,
    max_arriving_bytes=100_000,
)


class App:
    """GET answers `ok`, /large with 8 MB, /wait when it is told to; POST answers with its body's size. `left` counts
    clients that went before they had their answer."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.left = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b"ok"
        if scope["method"] == "POST":
            size, more = 0, True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self.left += 1
                    return
                size, more = size + len(message.get("body", b"")), message.get("more_body", False)
            body = str(size).encode()
        if scope["path"] == "/wait":
            await self.go.wait()
        if scope["path"] == "/large":
            await self.stream(send, receive)
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    async def stream(self, send: Any, receive: Any) -> None:
        async def parts() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(128):
                await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
                await asyncio.sleep(0)  # a send to a client that has left returns at once
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        async def leave() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        sending, leaving = asyncio.create_task(parts()), asyncio.create_task(leave())
        await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        self.left += not sending.done()
        for task in (sending, leaving):
            task.cancel()


Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@pytest.fixture
async def app() -> App:
    return App()


@pytest.fixture
async def connect(app: App) -> AsyncIterator[Connect]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http=connection_factory(LIMITS, 4), ws="none", lifespan="off", log_config=None, access_log=False,
        timeout_keep_alive=LIMITS.idle_timeout, timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    writers = []

    async def open_one() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*listener.getsockname(), limit=1 << 24)
        writers.append(writer)
        return reader, writer

    yield open_one
    for writer in writers:
        writer.close()
    server.should_exit = True
    await serving


async def everything(reader: asyncio.StreamReader) -> bytes:
    """Until the server closes."""
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionResetError):
            return await reader.read(-1)
    return b""


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def error(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    found = json.loads(body)["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return dict(found)


async def test_a_silent_connection_is_closed_without_a_word(connect: Connect) -> None:
    reader, _ = await connect()
    assert await everything(reader) == b""


@pytest.mark.parametrize(
    ("sent", "part"),
    [
        (b"GET / HT", "headers"),
        (GET[:-2], "headers"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc", "body"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", "body"),
    ],
)
async def test_half_a_request_gets_a_408(connect: Connect, app: App, sent: bytes, part: str) -> None:
    reader, writer = await connect()
    writer.write(sent)
    answer = await everything(reader)
    assert (status(answer), error(answer)["code"]) == (408, "request_incomplete")
    assert part in error(answer)["message"]
    assert app.left == (part == "body")


async def test_trickled_headers_do_not_get_more_time(connect: Connect) -> None:
    reader, writer = await connect()
    reading = asyncio.create_task(everything(reader))
    for byte in GET[:-2] + b"X-Slow: " + b"y" * 100:
        writer.write(bytes((byte,)))
        await asyncio.wait((reading,), timeout=0.02)
        if reading.done():
            break
    assert status(await reading) == 408


async def test_a_slow_body_that_goes_on_is_read(connect: Connect) -> None:
    reader, writer = await connect()
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\n")
    for _ in range(6):
        await asyncio.sleep(0.08)
        writer.write(b"x")
    assert (await reader.readuntil(b"\r\n\r\n6")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("line", [b"X: " + b"y" * 10_000, b"X: y\r\n" * 2000])
async def test_endless_headers_get_a_431(connect: Connect, line: bytes) -> None:
    reader, writer = await connect()
    writer.write(GET[:-2] + line)
    answer = await everything(reader)
    assert (status(answer), error(answer)["code"]) == (431, "headers_too_large")


async def test_what_is_not_http_gets_the_error_object(connect: Connect) -> None:
    reader, writer = await connect()
    writer.write(b"\x16\x03\x01 hello\r\n\r\n")
    assert error(await everything(reader))["code"] == "invalid_http"


async def test_an_idle_connection_is_closed_even_after_blank_lines(connect: Connect) -> None:
    reader, writer = await connect()
    writer.write(GET)
    assert await reader.readuntil(b"ok")
    writer.write(b"\r\n\r\n")
    assert await everything(reader) == b""


async def test_requests_on_one_connection_are_each_in_time(connect: Connect) -> None:
    reader, writer = await connect()
    for _ in range(4):
        writer.write(GET[:9])
        await asyncio.sleep(0.08)
        writer.write(GET[9:])
        assert await reader.readuntil(b"ok")


async def test_a_long_answer_is_no_fault_of_the_client(connect: Connect, app: App) -> None:
    reader, writer = await connect()
    writer.write(GET.replace(b"/ ", b"/wait ") + GET[:9])  # and half of the next request
    await asyncio.sleep(0.5)
    app.go.set()
    assert await reader.readuntil(b"ok")
    assert await everything(reader) == b""  # idle for too long after that


async def test_garbage_after_a_request_does_not_get_into_its_answer(connect: Connect, app: App) -> None:
    reader, writer = await connect()
    writer.write(GET.replace(b"/ ", b"/wait "))
    await asyncio.sleep(0.05)
    writer.write(b"\x00garbage\r\n\r\n")
    assert await everything(reader) == b""
    app.go.set()


async def test_one_connection_too_many_gets_a_503(connect: Connect) -> None:
    others = [await connect() for _ in range(4)]
    for reader, writer in others:
        writer.write(GET)
        await reader.readuntil(b"ok")
    answer = await everything((await connect())[0])
    assert (status(answer), error(answer)["code"]) == (503, "too_many_connections")
    others[0][1].close()
    await asyncio.sleep(0.05)
    reader, writer = await connect()
    writer.write(GET)
    assert await reader.readuntil(b"ok")


async def test_bodies_that_arrive_at_the_same_time_have_a_limit_together(connect: Connect, app: App) -> None:
    post = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n"
    reader, writer = await connect()
    writer.write(post + bytes(59_999))
    await asyncio.sleep(0.05)
    second, other = await connect()
    other.write(post + bytes(59_999))
    answer = await everything(second)
    assert (status(answer), error(answer)["code"]) == (503, "too_many_bodies")
    writer.write(b"x")  # the first one is not the last straw
    assert await reader.readuntil(b"60000")
    for _ in range(3):  # and what is complete counts no more
        writer.write(post + bytes(60_000))
        assert await reader.readuntil(b"60000")
    assert app.left == 1
    writer.write(post.replace(b"/ ", b"/v1/files ").replace(b"60000", b"600000") + bytes(600_000))
    assert await reader.readuntil(b"600000")


def stop_reading(writer: asyncio.StreamWriter) -> None:
    transport = writer.transport
    assert isinstance(transport, asyncio.ReadTransport)
    transport.pause_reading()


async def test_a_client_that_does_not_read_is_cut_off(connect: Connect, app: App) -> None:
    _, writer = await connect()
    stop_reading(writer)
    writer.write(GET.replace(b"/ ", b"/large "))
    async with asyncio.timeout(10):
        while not app.left:
            await asyncio.sleep(0.02)


async def test_a_client_that_reads_slowly_gets_everything(connect: Connect, app: App) -> None:
    reader, writer = await connect()
    writer.write(GET.replace(b"/ ", b"/large "))
    got = 0
    while got < 8 << 20:
        got += len(await reader.read(1 << 20))
        await asyncio.sleep(0.05)
    assert app.left == 0
