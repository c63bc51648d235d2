"""One request against a server of raw bytes: framing, what counts as a token, every way to fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from pinnate.bench.client import Outcome, Target, first_model, send
from pinnate.bench.connection import Origin, parse_base_url
from pinnate.core.errors import ConfigError, EngineError

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
DONE = b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(piece: str, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": piece, "finish_reason": finish}])


def delta(finish: str | None = None, **fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": finish}])


def usage(prompt: int, completion: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion})


class Raw:
    """Answers every request with the same parts, a moment apart, and closes the connection. Keeps what it was sent."""

    def __init__(self, *parts: bytes, hold: float = 0.0) -> None:
        self.parts, self.hold, self.requests = parts, hold, list[bytes]()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        self.requests.append(head + await reader.readexactly(length))
        for part in self.parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.002)
        await asyncio.sleep(self.hold)
        writer.close()


@asynccontextmanager
async def serving(raw: Raw) -> AsyncIterator[Origin]:
    server = await asyncio.start_server(raw, "127.0.0.1", 0)
    async with server:
        yield Origin("127.0.0.1", server.sockets[0].getsockname()[1], None, "/base")


async def ask(raw: Raw, *, chat: bool = False, **fields: Any) -> Outcome:
    async with serving(raw) as origin:
        prompt = [{"role": "user", "content": "hi"}] if chat else "hi"
        return await send(replace(Target(origin, "m", chat), **fields), prompt, 5, 7)


def chunked(*parts: bytes) -> list[bytes]:
    framed = [f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts]
    return [OK + b"Transfer-Encoding: chunked\r\n\r\n", *framed, b"0\r\n\r\n"]


def sized(*parts: bytes) -> list[bytes]:
    return [OK + f"Content-Length: {sum(map(len, parts))}\r\n\r\n".encode(), *parts]


def until_close(*parts: bytes) -> list[bytes]:
    return [OK + b"\r\n", *parts]


@pytest.mark.parametrize("framing", [chunked, sized, until_close])
async def test_a_completion_under_every_framing(framing: Callable[..., list[bytes]]) -> None:
    raw = Raw(*framing(text("one"), text(" two"), text(" three", "length"), usage(11, 3), DONE))
    outcome = await ask(raw)
    assert outcome.error is None
    assert (outcome.text, outcome.prompt_len, outcome.output_len) == ("one two three", 11, 3)
    assert len(outcome.itl) == 2
    assert 0 < outcome.ttft < outcome.latency
    assert sum(outcome.itl) + outcome.ttft == pytest.approx(outcome.latency)
    assert outcome.tpot == pytest.approx((outcome.latency - outcome.ttft) / 2)


async def test_events_cut_anywhere_are_put_together() -> None:
    whole = b"".join(chunked(text("é"), text("ü", "stop"), DONE))
    raw = Raw(*(whole[i : i + 7] for i in range(0, len(whole), 7)))
    outcome = await ask(raw)
    assert (outcome.error, outcome.text) == (None, "éü")


async def test_lines_of_other_kinds_are_passed_over() -> None:
    noise = b": ping\n\nevent: x\r\nid: 4\r\n"
    outcome = await ask(
        Raw(*sized(noise, b'data:{"choices":[{"text":"a","finish_reason":"stop"}]}\r\n\r\n', noise, DONE))
    )
    assert (outcome.error, outcome.text) == (None, "a")


async def test_what_is_sent() -> None:
    raw = Raw(*sized(text("a", "stop"), DONE))
    await ask(raw, api_key="secret", ignore_eos=True, temperature=0.5)
    head, body = raw.requests[0].split(b"\r\n\r\n")
    assert head.startswith(b"POST /base/v1/completions HTTP/1.1\r\n")
    assert head.endswith(b"\r\nAuthorization: Bearer secret")
    assert json.loads(body) == {
        "model": "m", "prompt": "hi", "max_tokens": 7, "temperature": 0.5, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    raw = Raw(*sized(delta(content="a"), delta("stop"), DONE))
    await ask(raw, chat=True)
    head, body = raw.requests[0].split(b"\r\n\r\n")
    assert head.startswith(b"POST /base/v1/chat/completions ")
    assert b"Authorization" not in head
    assert json.loads(body)["messages"] == [{"role": "user", "content": "hi"}]
    assert "ignore_eos" not in json.loads(body)


async def test_the_role_of_a_chat_is_not_its_first_token() -> None:
    parts = sized(delta(role="assistant", content=""), delta(content="a"), delta(content="b"), delta("stop"), DONE)
    outcome = await ask(Raw(*parts), chat=True)
    assert (outcome.error, outcome.text, outcome.output_len) == (None, "ab", 2)
    assert len(outcome.itl) == 1


async def test_reasoning_is_output() -> None:
    parts = sized(delta(reasoning_content="hm"), delta(reasoning="hm"), delta(content="a"), delta("stop"), DONE)
    outcome = await ask(Raw(*parts), chat=True)
    assert (outcome.text, outcome.output_len) == ("hmhma", 3)


async def test_a_token_without_text() -> None:
    # The first bytes of a character: a completion's first chunk holds a token all the same.
    outcome = await ask(Raw(*sized(text(""), text("é", "length"), usage(5, 2), DONE)))
    assert (outcome.error, outcome.output_len, len(outcome.itl)) == (None, 2, 1)
    # A chat that ends at once: its end is its first token.
    outcome = await ask(Raw(*sized(delta(role="assistant"), delta("stop"), usage(5, 1), DONE)), chat=True)
    assert (outcome.error, outcome.output_len, outcome.tpot) == (None, 1, None)
    assert outcome.ttft == outcome.latency > 0


async def test_without_usage_chunks_are_counted_and_the_prompt_is_as_given() -> None:
    outcome = await ask(Raw(*sized(text("a"), text("b", "stop"), DONE)))
    assert (outcome.prompt_len, outcome.output_len) == (5, 2)


def refusal(status: str, body: bytes) -> Raw:
    return Raw(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (refusal("503 Busy", b'{"error": {"message": "queue is full", "code": "x"}}'), "HTTP 503: queue is full"),
        (refusal("422 No", b'{"detail": "bad\\n field"}'), "HTTP 422: bad field"),
        (refusal("404 No", b'{"object": "error", "message": "no model"}'), "HTTP 404: no model"),
        (refusal("500 Oh", b"<h1>oh</h1>"), "HTTP 500: <h1>oh</h1>"),
        (Raw(*sized(text("a"), event(error={"message": "engine died"}))), "engine died"),
        (Raw(*sized(text("a"))), "without [DONE]"),
        (Raw(*sized(DONE)), "held no output"),
        (Raw(*chunked(text("a"))[:-1]), "before the answer was complete"),
        (Raw(*sized(text("a"), DONE)[:-1]), "before the answer was complete"),
        (Raw(b"HTTP/1.1 200 OK\r\nContent-"), "before the answer was complete"),
        (Raw(), "before the answer was complete"),
        (Raw(b"SSH-2.0-x\r\n\r\n"), "not HTTP/1.1"),
        (Raw(*sized(b"data: {nonsense\n\n")), "malformed"),
        (Raw(*sized(b'data: {"choices": 5}\n\n')), "Expected `array`"),
        (Raw(*sized(b'data: {"choices": [{"text": "\xff"}]}\n\n')), "UTF-8"),
    ],
)
async def test_every_failure_is_an_outcome_that_says_why(raw: Raw, error: str) -> None:
    outcome = await ask(raw)
    assert outcome.error is not None
    assert error in outcome.error
    assert "\n" not in outcome.error


async def test_a_server_that_is_not_there() -> None:
    async with serving(Raw()) as origin:
        pass
    outcome = await send(Target(origin, "m", False), "hi", 5, 7)
    assert outcome.error is not None
    assert "Connect call failed" in outcome.error


async def test_a_server_that_never_ends() -> None:
    outcome = await ask(Raw(*sized(text("a"), DONE)[:2], hold=0.5), timeout=0.05)
    assert outcome.error == "no complete answer in 0.05 s"


async def test_first_model() -> None:
    async with serving(refusal("200 OK", b'{"data": [{"id": "one"}, {"id": "two"}]}')) as origin:
        assert await first_model(origin, "k") == "one"
    for raw, message in (
        (refusal("200 OK", b'{"data": []}'), "name one with --model"),
        (refusal("401 No", b'{"error": {"message": "wrong key"}}'), "HTTP 401: wrong key"),
        (Raw(), "before the answer was complete"),
    ):
        async with serving(raw) as origin:
            with pytest.raises(EngineError, match=message):
                await first_model(origin, None)


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://127.0.0.1:8000", Origin("127.0.0.1", 8000, None, "")),
        ("http://localhost:8000/v1/", Origin("localhost", 8000, None, "")),
        ("http://x.org/a/v1", Origin("x.org", 80, None, "/a")),
        ("http://[::1]:9", Origin("::1", 9, None, "")),
    ],
)
def test_base_urls(url: str, origin: Origin) -> None:
    assert parse_base_url(url) == origin


async def test_https_is_spoken_and_checked() -> None:
    origin = parse_base_url("https://x.org")
    assert (origin.host, origin.port, origin.prefix) == ("x.org", 443, "")
    assert origin.tls is not None
    assert origin.tls.check_hostname

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 this is no TLS\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        plain = origin._replace(host="127.0.0.1", port=server.sockets[0].getsockname()[1])
        outcome = await send(Target(plain, "m", False), "hi", 5, 7)
    assert outcome.error is not None
    assert "WRONG_VERSION_NUMBER" in outcome.error


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://x", "http://", "http://x:port", "http://x:99999"])
def test_what_is_no_base_url(url: str) -> None:
    with pytest.raises(ConfigError, match="--base-url"):
        parse_base_url(url)
