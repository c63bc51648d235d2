"""What the server bears: time limits, keep-alive comments, depth of bodies, and how limits are named."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinnate.core.errors import ConfigError, InvalidRequestError
from pinnate.server.body import _STRING, EXACT_BYTES, _num_parts, decode_object
from pinnate.server.limits import MAX_JSON_DEPTH, MAX_JSON_PARTS, MAX_JSON_VALUES, ServerLimits, parse_limits
from tests.unit.server.conftest import Answer, Client, FakeEngine, make_client, spell


def limited(*steps: object, **limits: float) -> Client:
    """A client of a server whose engine goes through `steps` for every request."""
    engine = FakeEngine(script=lambda *_: list(steps))
    return make_client(engine, limits=ServerLimits(**limits))


def comments(answer: Answer) -> int:
    return answer.body.count(b": keep-alive\n\n")


def choices(answer: Answer) -> list[object]:
    events = [json.loads(line[6:]) for line in answer.body.decode().splitlines() if line.startswith("data: {")]
    return [event["choices"] for event in events]


async def test_a_stream_that_waits_gets_comments_then_its_events() -> None:
    held = asyncio.Event()
    client = limited(held, *spell("ok"), keep_alive_interval=0.05)
    asyncio.get_running_loop().call_later(0.3, held.set)
    answer = await client.complete(stream=True)
    assert answer.status == 200
    assert 2 <= comments(answer) <= 6
    assert answer.writes[0] == b": keep-alive\n\n"
    quick = await limited(*spell("ok"), keep_alive_interval=0.05).complete(stream=True)
    assert comments(quick) == 0
    assert choices(answer) == choices(quick)


async def test_a_pause_in_the_middle_gets_comments_too() -> None:
    held = asyncio.Event()
    client = limited(*spell("ab")[:2], held, *spell("c"), keep_alive_interval=0.05)
    asyncio.get_running_loop().call_later(0.2, held.set)
    answer = await client.chat(stream=True)
    assert 1 <= comments(answer) <= 4
    assert answer.body.endswith(b"data: [DONE]\n\n")


async def test_several_prompts_wait_together() -> None:
    held = asyncio.Event()
    client = limited(held, *spell("ok"), keep_alive_interval=0.05)
    asyncio.get_running_loop().call_later(0.2, held.set)
    answer = await client.complete(prompt=["a", "b"], stream=True)
    assert 1 <= comments(answer) <= 4
    assert answer.body.count(b'"finish_reason":"stop"') == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_the_queue_has_a_time_limit(stream: bool) -> None:
    client = limited(asyncio.Event(), queue_timeout=0.05)
    answer = await client.complete(stream=stream, prompt=["a", "b"])
    assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "queue_timeout", "3")
    assert "0.05 s" in answer.error["message"]
    assert all(stream.aborted for stream in client.engine.streams)
    assert client.state.metrics.rejected == {"queue_timeout": 1}


async def test_what_has_started_is_no_longer_in_the_queue() -> None:
    held = asyncio.Event()
    client = limited(*spell("ab")[:1], held, *spell("b"), queue_timeout=0.05)
    asyncio.get_running_loop().call_later(0.2, held.set)
    assert (await client.complete()).json["choices"][0]["text"] == "ab"


async def test_a_request_has_a_time_limit() -> None:
    client = limited(*spell("ab")[:1], asyncio.Event(), request_timeout=0.05)
    plain = await client.complete()
    assert (plain.status, plain.error["code"], plain.error["type"]) == (504, "request_timeout", "timeout_error")
    streamed = await client.complete(stream=True)
    *chunks, last = streamed.events()
    assert (streamed.status, last["error"]["code"]) == (200, "request_timeout")
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a"]


async def test_a_comment_sent_turns_a_late_refusal_into_an_event() -> None:
    client = limited(asyncio.Event(), queue_timeout=0.15, keep_alive_interval=0.05)
    answer = await client.complete(stream=True)
    assert answer.status == 200
    assert comments(answer)
    assert json.loads(answer.writes[-1].removeprefix(b"data: "))["error"]["code"] == "queue_timeout"


async def test_time_limits_are_off_where_none_is_set() -> None:
    held = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, held.set)
    assert (await limited(held, *spell("ok")).complete()).status == 200


def nested(depth: int, opening: str, closing: str) -> bytes:
    return ('{"a":' + opening * (depth - 1) + "1" + closing * (depth - 1) + "}").encode()


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"b":', "}"), ('[{"c":', "}]")])
def test_depth_is_bounded(opening: str, closing: str) -> None:
    each = 2 if opening.startswith("[{") else 1
    assert decode_object(nested((MAX_JSON_DEPTH - 1) // each + 1, opening, closing))
    for depth in (MAX_JSON_DEPTH // each + 2, 10_000):
        with pytest.raises(InvalidRequestError, match="nested"):
            decode_object(nested(depth, opening, closing))


@given(st.recursive(st.integers(), lambda inner: st.lists(inner, max_size=3), max_leaves=400))
def test_wide_is_not_deep(value: object) -> None:
    wide = {"a": [[[1]] for _ in range(MAX_JSON_DEPTH)], "b": value}
    assert decode_object(json.dumps(wide).encode()) == wide


@pytest.mark.parametrize(
    ("part", "limit"),
    [("[]", MAX_JSON_PARTS), ("{}", MAX_JSON_PARTS), ('"":1', MAX_JSON_PARTS), ("[{}]", MAX_JSON_PARTS // 2),
     ("1", MAX_JSON_VALUES), ('"ab"', MAX_JSON_VALUES)],
)  # fmt: skip
def test_parts_are_bounded_before_they_are_built(part: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    opening, closing = '{"a":{' if part.startswith('"":') else '{"a":[', "}}" if part.startswith('"":') else "]}"
    around = 3  # the object, its member, what is inside

    def body(count: int) -> bytes:
        return (opening + ",".join([part] * count) + closing).encode()

    assert decode_object(body(limit - around))
    monkeypatch.setattr(msgspec.json, "decode", lambda _: pytest.fail("it was built"))
    for count in (limit + 1, 2 * limit):
        with pytest.raises(InvalidRequestError, match="more than"):
            decode_object(body(count))


def test_a_text_may_have_as_many_brackets_as_it_likes_unless_it_is_huge() -> None:
    text = '{"[\\"],\\\\' * 120_000  # quotes and backslashes among them
    assert decode_object(json.dumps({"prompt": text}).encode()) == {"prompt": text}
    for inner in ("[]" * EXACT_BYTES, '\\",[' * EXACT_BYTES):
        with pytest.raises(InvalidRequestError, match="more than"):
            decode_object(json.dumps({"prompt": inner}).encode())


JSON = st.recursive(
    st.none() | st.integers() | st.text('[]{}:,"\\\\n\\u00e9', max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('[{:"', max_size=4), inner, max_size=4),
    max_leaves=60,
)


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=5), st.booleans())
def test_parts_are_counted_as_they_are(value: dict[str, object], ascii_only: bool) -> None:
    def count(part: object) -> int:
        if isinstance(part, list):
            return 1 + sum(map(count, part))
        return 1 + sum(1 + count(inner) for inner in part.values()) if isinstance(part, dict) else 0

    body = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert _num_parts(_STRING.sub(b"", body)) == count(value)


def test_limits_are_set_by_name() -> None:
    assert parse_limits([]) == ServerLimits()
    limits = parse_limits(["write_timeout=2.5", "max-body-bytes = 4096"], queue_timeout=3.0, request_timeout=None)
    assert (limits.write_timeout, limits.max_body_bytes, limits.queue_timeout) == (2.5, 4096, 3.0)
    assert limits.request_timeout is None


@pytest.mark.parametrize(
    ("assignments", "named", "message"),
    [
        (["speed=3"], {}, "there is no such limit; there are max_body_bytes"),
        (["write_timeout"], {}, "write_timeout"),
        (["write_timeout=soon"], {}, "write_timeout"),
        (["write_timeout=nan"], {}, "write_timeout must be at least 0.05, got nan"),
        (["max_body_bytes=10"], {}, "max_body_bytes must be at least 1024, got 10"),
        ([], {"queue_timeout": 0.0}, "--queue-timeout must be at least 0.001, got 0"),
        ([], {"request_timeout": float("inf")}, "--request-timeout must be at least 0.001, got inf"),
    ],
)
def test_limits_that_make_no_sense(assignments: list[str], named: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_limits(assignments, **named)
