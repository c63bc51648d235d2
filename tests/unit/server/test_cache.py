"""/pin_prefix and /unpin_prefix over a fake engine: what is sent down, what is computed, what is refused."""

from __future__ import annotations

import pytest

from pinnate.core.errors import InvalidRequestError, NotFoundError, UnsupportedError
from tests.unit.server.conftest import Client

PINNED = {"pinned": True, "pin_id": "pin-1", "num_tokens": 4, "num_pages": 1, "pinned_pages": 1, "quota_pages": 9}
MISSING = {"pinned": False}


async def test_what_is_cached_is_pinned_at_once(client: Client) -> None:
    client.engine.replies = [PINNED]
    answer = await client.post("/pin_prefix", {"prompt": "hi ho", "cache_salt": "s"})
    assert (answer.status, answer.json) == (200, PINNED)
    assert client.engine.arguments == [{"token_ids": list(b"hi ho"), "cache_salt": "s"}]
    assert client.engine.submitted == []


async def test_what_is_not_cached_is_computed_first_under_its_salt(client: Client) -> None:
    client.engine.replies = [MISSING, PINNED]
    assert (await client.post("/pin_prefix", {"prompt": [104, 105], "cache_salt": "s"})).json == PINNED
    (sent,) = client.engine.submitted
    assert (sent.prompt, sent.salt, sent.params.max_tokens) == ([104, 105], "s", 1)
    assert all(stream.ended for stream in client.engine.streams)


async def test_a_prefix_that_does_not_stay_is_a_429(client: Client) -> None:
    client.engine.replies = [MISSING] * 3
    answer = await client.post("/pin_prefix", {"prompt": "hi"})
    assert (answer.status, answer.error["code"]) == (429, "queue_full")


async def test_messages_are_rendered_as_the_beginning_of_a_chat(client: Client) -> None:
    client.engine.replies = [PINNED] * 2
    messages = [{"role": "user", "content": "hi"}]
    await client.post("/pin_prefix", {"messages": messages})
    await client.post("/pin_prefix", {"messages": messages, "add_generation_prompt": True})
    assert [bytes(a["token_ids"]) for a in client.engine.arguments] == [b"[user]hi", b"[user]hi[assistant]"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ({"prompt": [1, 999]}, "prompt"),
        ({"prompt": ["x"]}, "prompt"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "x", "model": "other"}, "model"),
    ],
)
async def test_bad_bodies(client: Client, body: dict[str, object], param: str) -> None:
    answer = await client.post("/pin_prefix", body)
    assert answer.status in (400, 404)
    assert answer.error["param"] == param
    assert client.engine.commands == []


async def test_refusals_of_the_engine(client: Client) -> None:
    client.engine.replies = [
        InvalidRequestError("the prefix needs 9 more pages", param="prompt", code="pin_quota_exceeded"),
        UnsupportedError("pinning is off: the server was started without --pin-quota"),
        NotFoundError("there is no pin 'x'", param="pin_id"),
    ]
    over = await client.post("/pin_prefix", {"prompt": "hi"})
    assert (over.status, over.error["code"], over.error["param"]) == (400, "pin_quota_exceeded", "prompt")
    off = await client.post("/pin_prefix", {"prompt": "hi"})
    assert (off.status, off.error["code"]) == (400, "unsupported")
    unknown = await client.post("/unpin_prefix", {"pin_id": "x"})
    assert (unknown.status, unknown.error["param"]) == (404, "pin_id")


async def test_unpin(client: Client) -> None:
    client.engine.replies = [{"unpinned_pages": 1, "pinned_pages": 0, "quota_pages": 9}]
    assert (await client.post("/unpin_prefix", {"pin_id": "pin-1"})).json["unpinned_pages"] == 1
    assert client.engine.arguments == [{"pin_id": "pin-1"}]
    assert (await client.post("/unpin_prefix", {})).error["param"] == "pin_id"
