"""stream_options: which chunks carry the usage."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.server.conftest import Client, FakeEngine, make_client, spell

ROUTES = pytest.mark.parametrize("route", ["chat", "complete"])
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}


def two_choices(*_: Any) -> list[Any]:
    """Of a prompt; the steps of both come together."""
    return [list(step) for step in zip(spell("ab", 0, cached=1), spell("cd", 1, cached=1), strict=True)]


async def usages(client: Client, route: str, options: dict[str, Any], **fields: Any) -> list[Any]:
    """Of each chunk: None where it is null, "absent" where there is none."""
    events = (await getattr(client, route)(stream=True, stream_options=options, **fields)).events()
    assert events[-1] == "[DONE]"
    return [event.get("usage", "absent") for event in events[:-1]]


@ROUTES
async def test_the_last_chunk_alone(client: Client, route: str) -> None:
    *chunks, last = await usages(client, route, {"include_usage": True})
    assert set(chunks) == {None}
    assert last["completion_tokens"] == 3
    for options in ({}, {"include_usage": False}, {"include_usage": None}):
        assert set(await usages(client, route, options)) == {"absent"}


@ROUTES
async def test_every_chunk(client: Client, route: str) -> None:
    client.engine.script = two_choices
    *chunks, last = await usages(client, route, CONTINUOUS, n=2)
    (prompt,) = {usage["prompt_tokens"] for usage in [*chunks, last]}
    assert prompt == len(client.engine.submitted[0].prompt)
    counts = [usage["completion_tokens"] for usage in chunks]
    assert counts == sorted(counts)
    assert counts[0] == (0 if route == "chat" else 1)  # a chat's first chunk is the role
    assert set(range(1, 7)) <= set(counts)
    assert last == chunks[-1]
    for usage in (chunks[-1], last):
        assert (usage["completion_tokens"], usage["total_tokens"]) == (6, prompt + 6)
        assert usage["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_every_chunk_of_several_prompts(client: Client) -> None:
    *chunks, last = await usages(client, "complete", CONTINUOUS, prompt=["a", "bc"], return_timings=True)
    assert chunks[-1] == last
    assert (last["prompt_tokens"], last["completion_tokens"]) == (3, 6)


@ROUTES
@pytest.mark.parametrize("options", [{"continuous_usage_stats": True}, {**CONTINUOUS, "include_usage": False}])
async def test_without_include_usage_it_has_no_effect_and_says_so(
    client: Client, route: str, options: dict[str, Any]
) -> None:
    events = (await getattr(client, route)(stream=True, stream_options=options)).events()
    assert [warning["param"] for warning in events[0]["warnings"]] == ["stream_options.continuous_usage_stats"]
    assert not any("usage" in event for event in events[:-1])
    refused = await getattr(make_client(FakeEngine(), strict=True), route)(stream=True, stream_options=options)
    assert (refused.status, refused.error["param"]) == (400, "stream_options.continuous_usage_stats")


@ROUTES
async def test_its_type_is_checked(client: Client, route: str) -> None:
    answer = await getattr(client, route)(stream=True, stream_options={"continuous_usage_stats": "yes"})
    assert (answer.status, answer.error["param"]) == (400, "stream_options.continuous_usage_stats")
