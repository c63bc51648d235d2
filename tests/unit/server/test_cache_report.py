"""Reports in answers and streams, /debug/cache and /debug/match."""

from __future__ import annotations

from typing import Any

import pytest

from pinnate.core.errors import UnsupportedError
from pinnate.core.messages import CacheReport, MatchEnd
from pinnate.core.sampling import SamplingParams
from pinnate.engine.output_processor import OutputDelta
from pinnate.server.cache_report import show_report
from tests.unit.server.conftest import ByteTokenizer, Client, spell

PROMPT = "abcdefghijklmnopqrstuvwxyz"


def reported(_number: int, _params: SamplingParams) -> list[Any]:
    first, *rest = spell("ok", cached=20)
    return [OutputDelta(0, first.text, first.token_ids, cache_report=CacheReport(26, 20, MatchEnd.NEW_TEXT)), *rest]


@pytest.fixture(autouse=True)
def engine_with_reports(client: Client) -> None:
    client.engine.info |= {"cache_report": "own"}
    client.engine.script = reported


def test_the_text_around_the_place_is_shown() -> None:
    shown = show_report(CacheReport(26, 20, MatchEnd.NEW_TEXT), PROMPT.encode(), ByteTokenizer())
    assert (shown.before, shown.after) == ("mnopqrst", "uvwxyz")
    assert shown.explanation.startswith("20 of 26 prompt tokens were cached; token 20 is new text")
    at_start = show_report(CacheReport(26, 0, MatchEnd.EVICTED, 16), PROMPT.encode(), ByteTokenizer())
    assert (at_start.before, at_start.after) == ("", "abcdefgh")
    assert "at least 16 more tokens" in at_start.explanation


@pytest.mark.parametrize("reason", list(MatchEnd))
def test_every_reason_has_a_sentence_without_holes(reason: MatchEnd) -> None:
    shown = show_report(CacheReport(26, 3, reason, 5), PROMPT.encode(), ByteTokenizer())
    assert shown.reason == reason
    assert "{" not in shown.explanation


async def test_plain_answers_carry_it_on_demand_alone(client: Client) -> None:
    answer = await client.complete(prompt=[PROMPT, PROMPT], cache_report=True)
    assert [r["num_cached_tokens"] for r in answer.json["cache_report"]] == [20, 20]
    assert answer.json["cache_report"][0]["after"] == "uvwxyz"
    assert all(sent.cache_report for sent in client.engine.submitted)
    assert (await client.chat(cache_report=True)).json["cache_report"][0]["reason"] == "new_text"
    for body in ({}, {"cache_report": False}):
        assert "cache_report" not in (await client.complete(**body)).json
    assert not client.engine.submitted[-1].cache_report


@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_streams_carry_it_in_a_chunk_of_its_own(client: Client, path: str) -> None:
    events = (await getattr(client, path)(stream=True, cache_report=True)).events()
    with_report = [event for event in events if event != "[DONE]" and "cache_report" in event]
    assert with_report == events[:1]
    assert events[0]["choices"] == []
    assert events[0]["cache_report"][0]["num_cached_tokens"] == 20
    plain = (await getattr(client, path)(stream=True)).events()
    assert len(plain) == len(events)  # the script reports whether asked or not
    assert not any("cache_report" in event for event in plain[1:])


async def test_where_the_operator_has_not_allowed_it_the_field_is_refused_by_name(client: Client) -> None:
    client.engine.info.pop("cache_report")
    for info in ({}, {"cache_report": "off"}):
        client.engine.info |= info
        answer = await client.complete(cache_report=True)
        assert (answer.status, answer.error["param"], answer.error["code"]) == (400, "cache_report", "unsupported")
        assert "--cache-report" in answer.error["message"]


async def test_debug_match(client: Client) -> None:
    client.engine.replies = [{"report": [26, 20, "evicted", 4]}]
    answer = await client.post("/debug/match", {"prompt": PROMPT, "cache_salt": "s"})
    assert answer.json["reason"] == "evicted"
    assert answer.json["before"] == "mnopqrst"
    assert client.engine.arguments == [{"token_ids": list(PROMPT.encode()), "cache_salt": "s"}]
    assert client.engine.submitted == []
    assert (await client.post("/debug/match", {"prompt": []})).error["param"] == "prompt"


async def test_debug_cache_shows_text_beside_ids(client: Client) -> None:
    nodes = [{"tokens": [104, 105]}]
    client.engine.replies = [
        {"tree": {"nodes": nodes}, "top_prefixes": [{"tokens": [111, 195]}]},
        UnsupportedError("the server was started without --cache-report all"),
    ]
    shown = (await client.call("GET", "/debug/cache")).json
    assert (shown["tree"]["nodes"][0]["text"], shown["top_prefixes"][0]["text"]) == ("hi", "o�")
    refused = await client.call("GET", "/debug/cache")
    assert (refused.status, refused.error["code"]) == (400, "unsupported")
