"""Messages as templates take them."""

from __future__ import annotations

from typing import Any

import pytest

from pinnate.core.errors import RequestError
from pinnate.server.body import FieldNotes
from pinnate.server.messages import MAX_CALLS, check_messages

USER = {"role": "user", "content": "hi"}


def call(arguments: Any, name: str = "add", identity: str = "call_1") -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def asked(*calls: dict[str, Any], **members: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **members}


def check(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return check_messages(list(messages), FieldNotes(strict=True))


def test_a_round_of_calls_and_results() -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "3"}]}
    asking = asked(call('{"a": 1}'), refusal=None, audio=None, function_call=None, annotations=[])
    assert check(USER, asking, result) == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call({"a": 1})]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3", "name": "add"},
    ]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (" ", {}),
        ('{"a": ', '{"a": '),
        ("[1]", "[1]"),
        ("[" * 5000, "[" * 5000),
    ],
    ids=lambda value: str(value)[:20],
)
def test_arguments_are_an_object_where_they_can_be(given: Any, meant: Any) -> None:
    (message,) = check(asked(call(given)))
    assert message["tool_calls"][0]["function"]["arguments"] == meant


def test_a_result_without_its_call_and_a_name_of_its_own() -> None:
    lone = {"role": "tool", "tool_call_id": "x", "content": "5"}
    assert check(lone) == [lone]
    named = {**lone, "tool_call_id": "call_1", "name": "mine"}
    assert check(asked(call({})), named)[1]["name"] == "mine"


@pytest.mark.parametrize("member", ["reasoning", "reasoning_content"])
def test_reasoning_by_either_name(member: str) -> None:
    assert check({"role": "assistant", "content": "Yes", member: "Hm"}) == [
        {"role": "assistant", "content": "Yes", "reasoning_content": "Hm"}
    ]
    assert check({**USER, member: ""}) == [USER]


@pytest.mark.parametrize(
    ("param", "message"),
    [
        ("messages[0].content", {"role": "assistant", "content": None, "tool_calls": []}),
        ("messages[0].content", {"role": "tool", "tool_call_id": "x"}),
        ("messages[0].tool_call_id", {"role": "tool", "content": "5"}),
        ("messages[0].tool_call_id", {**USER, "tool_call_id": "x"}),
        ("messages[0].tool_calls", {**USER, "tool_calls": [call({})]}),
        ("messages[0].tool_calls", asked(*[call({})] * (MAX_CALLS + 1))),
        ("messages[0].tool_calls[0].type", asked({**call({}), "type": "custom"})),
        ("messages[0].tool_calls[1].function", asked(call({}), {"id": "x"})),
        ("messages[0].tool_calls[0].function.name", asked(call({}, name=""))),
        ("messages[0].tool_calls[0].function.arguments", asked(call(5))),
        ("messages[0].tool_calls[0].x", asked({**call({}), "x": 1})),
        ("messages[0].reasoning", {"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "b"}),
        ("messages[0].reasoning", {**USER, "reasoning": "a"}),
        ("messages[0].role", {"role": "robot", "content": "x"}),
    ],
    ids=str,
)
def test_faults_are_named(param: str, message: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        check(message)
    assert caught.value.param == param
