"""Unknown fields: a warning in the answer and the log, or a refusal where the server is strict; never silence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pinnate.core.errors import InvalidRequestError
from pinnate.server.body import MAX_WARNINGS, FieldNotes
from tests.unit.server.conftest import Client, FakeEngine, make_client

MESSAGES = [{"role": "user", "content": "hi"}]
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
NAMED = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}", "y": 1}, "x": 1}
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
    *(
        ("/v1/chat/completions", {"messages": MESSAGES, **fields}, names)
        for fields, names in [
            ({"tools": [{**TOOL, "x": 1}]}, ["tools[0].x"]),
            ({"tools": [{"type": "function", "function": {**FUNCTION, "x": 1}}]}, ["tools[0].function.x"]),
            ({"tools": [TOOL], "tool_choice": {**NAMED, "x": 1}}, ["tool_choice.x"]),
            (
                {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f", "x": 1}}},
                ["tool_choice.function.x"],
            ),
            (
                {
                    "tools": [TOOL],
                    "tool_choice": {
                        "type": "allowed_tools",
                        "allowed_tools": {"mode": "auto", "tools": [{**NAMED, "x": 1}], "y": 1},
                        "z": 1,
                    },
                },
                ["tool_choice.z", "tool_choice.allowed_tools.y", "tool_choice.allowed_tools.tools[0].x"],
            ),
            (
                {
                    "messages": [
                        *MESSAGES,
                        {"role": "assistant", "tool_calls": [CALL]},
                        {"role": "tool", "tool_call_id": "1", "content": "5"},
                    ]
                },
                ["messages[1].tool_calls[0].x", "messages[1].tool_calls[0].function.y"],
            ),
            ({"response_format": {"type": "text", "x": 1}}, ["response_format.x"]),
            ({"response_format": {"type": "json_object", "x": 1}}, ["response_format.x"]),
            (
                {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "y": 1}, "x": 1}},
                ["response_format.x", "response_format.json_schema.y"],
            ),
            ({"response_format": {"type": "regex", "regex": "a", "x": 1}}, ["response_format.x"]),
            ({"structured_outputs": {"regex": "a", "x": 1}}, ["structured_outputs.x"]),
            ({"structural_tag": {"structures": [], "triggers": [], "x": 1}}, ["structural_tag.x"]),
        ]
    ),
    ("/tokenize", {"prompt": "hi", "x": 1}, ["x"]),
    ("/tokenize", {"messages": MESSAGES, "tools": [{**TOOL, "x": 1}]}, ["tools[0].x"]),
    ("/detokenize", {"tokens": [65], "x": 1}, ["x"]),
    ("/unpin_prefix", {"pin_id": "1", "x": 1}, ["x"]),
]


@pytest.fixture
async def client() -> Client:
    return make_client(FakeEngine(max_model_len=1000))


@pytest.mark.parametrize(("path", "body", "names"), UNKNOWN, ids=lambda value: str(value)[:50])
async def test_answer_names_each(client: Client, path: str, body: dict[str, Any], names: list[str]) -> None:
    answer = await client.post(path, body)
    assert answer.status == 200
    assert [warning["param"] for warning in answer.json["warnings"]] == names
    assert all(name in warning["message"] for name, warning in zip(names, answer.json["warnings"], strict=True))


@pytest.mark.parametrize(("path", "body", "names"), UNKNOWN, ids=lambda value: str(value)[:50])
async def test_strict_server_refuses(path: str, body: dict[str, Any], names: list[str]) -> None:
    answer = await make_client(FakeEngine(max_model_len=1000), strict=True).post(path, body)
    assert (answer.status, answer.error["param"]) == (400, names[0])
    assert names[0] in answer.error["message"]


@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_first_chunk_of_a_stream_has_them(client: Client, route: str) -> None:
    fields = {"stream": True, "frobnicate": 1, "stream_options": {"include_usage": True, "x": 1}}
    events = (await getattr(client, route)(**fields)).events()
    assert [warning["param"] for warning in events[0]["warnings"]] == ["frobnicate", "stream_options.x"]
    assert len(events[0]["choices"]) == 1
    assert not any("warnings" in event for event in events[1:-1])


async def test_variables_that_the_template_does_not_use(client: Client) -> None:
    given = {"extra": "!", "enable_thinking": False, "frob": None}
    answer = await client.chat(chat_template_kwargs=given)
    names = [f"chat_template_kwargs.{name}" for name in ("enable_thinking", "frob")]
    assert [warning["param"] for warning in answer.json["warnings"]] == names
    assert bytes(client.engine.submitted[0].prompt).endswith(b"!")
    assert "warnings" not in (await client.chat(chat_template_kwargs={"extra": "!"})).json
    strict = make_client(FakeEngine(), strict=True)
    refused = await strict.chat(chat_template_kwargs=given)
    assert (refused.status, refused.error["param"]) == (400, names[0])
    assert (await strict.chat(chat_template_kwargs={"extra": "!"})).status == 200
    many = {f"name_{number}": 1 for number in range(MAX_WARNINGS + 1)}
    assert (await client.chat(chat_template_kwargs=many)).status == 400


async def test_the_same_member_of_many_items_is_one_warning(client: Client) -> None:
    messages = [{"role": "user", "content": "hi", "x": number} for number in range(MAX_WARNINGS + 20)]
    (warning,) = (await client.chat(messages=messages)).json["warnings"]
    assert warning["param"] == "messages[0].x"
    assert f"messages[0].x, and {MAX_WARNINGS + 19} more like it" in warning["message"]
    strict = await make_client(FakeEngine(max_model_len=1000), strict=True).chat(messages=messages)
    assert (strict.status, strict.error["param"]) == (400, "messages[0].x")


async def test_unknown_members_that_are_null_count_as_absent() -> None:
    client = make_client(FakeEngine(max_model_len=1000), strict=True)
    part = {"type": "text", "text": "hi", "cache_control": None}
    tool = {**TOOL, "x": None, "function": {**FUNCTION, "y": None}}
    formats = {"type": "json_schema", "json_schema": {"schema": {}, "strict": None, "x": None}, "y": None}
    answer = await client.chat(messages=[{"role": "user", "content": [part], "x": None}], tools=[tool])
    assert answer.status == 200
    assert (await client.chat(response_format=formats, stream_options=None)).status == 200


async def test_a_tool_with_nulls_is_shown_to_the_model_as_one_without(client: Client) -> None:
    tool = {"type": "function", "strict": None, "function": {**FUNCTION, "description": None, "strict": None}}
    for given in (TOOL, tool):
        assert (await client.chat(tools=[given])).status == 200
    first, second = client.engine.submitted
    assert first.prompt == second.prompt


async def test_what_reaches_the_template_is_said_to(client: Client) -> None:
    answer = await client.chat(tools=[{"type": "function", "function": {**FUNCTION, "frob": "x7"}}])
    assert "reaches the chat template" in answer.json["warnings"][0]["message"]
    assert b"x7" in bytes(client.engine.submitted[0].prompt)


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
    assert notes.members("x") == {}
