"""Unknown fields: a warning in the answer and the log, or a refusal where the server is strict; never silence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pinnate.core.errors import InvalidRequestError
from pinnate.server.body import MAX_WARNINGS, FieldNotes
from tests.unit.server.conftest import Client, FakeEngine, make_client

MESSAGES = [{"role": "user", "content": "hi"}]
# route, body, the paths that are not known
UNKNOWN: list[tuple[str, dict[str, Any], list[str]]] = [
    ("/v1/completions", {"prompt": "hi", "frobnicate": 1}, ["frobnicate"]),
    ("/v1/completions", {"prompt": "hi", "a": 1, "b": []}, ["a", "b"]),
    ("/v1/chat/completions", {"messages": MESSAGES, "top_n_sigma": 1.0}, ["top_n_sigma"]),
    ("/v1/chat/completions", {"messages": [{**MESSAGES[0], "weight": 0}]}, ["messages[0].weight"]),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}]},
        ["messages[0].content[0].cache_control"],
    ),
    ("/tokenize", {"prompt": "hi", "x": 1}, ["x"]),
    ("/detokenize", {"tokens": [65], "x": 1}, ["x"]),
    ("/unpin_prefix", {"pin_id": "1", "x": 1}, ["x"]),
]


@pytest.mark.parametrize(("path", "body", "names"), UNKNOWN, ids=lambda value: str(value)[:50])
async def test_answer_names_each(client: Client, path: str, body: dict[str, Any], names: list[str]) -> None:
    answer = await client.post(path, body)
    assert answer.status == 200
    assert [warning["param"] for warning in answer.json["warnings"]] == names
    assert all(name in warning["message"] for name, warning in zip(names, answer.json["warnings"], strict=True))


@pytest.mark.parametrize(("path", "body", "names"), UNKNOWN, ids=lambda value: str(value)[:50])
async def test_strict_server_refuses(path: str, body: dict[str, Any], names: list[str]) -> None:
    answer = await make_client(FakeEngine(), strict=True).post(path, body)
    assert (answer.status, answer.error["param"]) == (400, names[0])
    assert names[0] in answer.error["message"]


@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_first_chunk_of_a_stream_has_them(client: Client, route: str) -> None:
    fields = {"stream": True, "frobnicate": 1, "stream_options": {"include_usage": True, "x": 1}}
    events = (await getattr(client, route)(**fields)).events()
    assert [warning["param"] for warning in events[0]["warnings"]] == ["frobnicate", "stream_options.x"]
    assert len(events[0]["choices"]) == 1
    assert not any("warnings" in event for event in events[1:-1])


async def test_token_ids_and_warnings_share_a_chunk(client: Client) -> None:
    first = (await client.chat(stream=True, frobnicate=1, return_token_ids=True)).events()[0]
    assert first["prompt_token_ids"] == client.engine.submitted[0].prompt
    assert first["warnings"][0]["param"] == "frobnicate"


async def test_known_answers_have_no_warnings(client: Client) -> None:
    assert "warnings" not in (await client.chat(user="me", suffix=None)).json
    assert "warnings" not in (await client.complete(suffix="")).json


async def test_log_has_one_line_without_raw_names(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    await client.complete(**{"evil\nINFO forged": 1, "other": 2})
    (record,) = [record for record in caplog.records if record.name == "pinnate.server"]
    assert "\n" not in record.getMessage()
    assert "other" in record.getMessage()


async def test_what_is_known_and_not_offered_is_always_refused(client: Client) -> None:
    answer = await client.complete(suffix="x")
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, "suffix", "unsupported")


async def test_number_of_warnings_is_bounded(client: Client) -> None:
    many = {f"field_{number}": 1 for number in range(MAX_WARNINGS + 1)}
    answer = await client.complete(**many)
    assert (answer.status, answer.error["param"]) == (400, f"field_{MAX_WARNINGS}")
    del many[f"field_{MAX_WARNINGS}"]
    assert len((await client.complete(**many)).json["warnings"]) == MAX_WARNINGS


async def test_long_names_are_cut(client: Client) -> None:
    answer = await client.complete(**{"x" * 10_000: 1})
    assert len(json.dumps(answer.json["warnings"])) < 400


def test_notes_of_a_strict_server_keep_nothing() -> None:
    notes = FieldNotes()
    with pytest.raises(InvalidRequestError, match="unknown field: a"):
        notes.unknown("a")
    assert notes.members() == {}
