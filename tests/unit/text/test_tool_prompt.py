"""Tools and calls in messages for templates that do not know of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pinnate.text.parsers.registry import TOOL_FORMATS
from pinnate.text.tool_prompt import messages_for, write_calls
from tests.unit.text.parsers.helpers import parse

PLAIN, KNOWING = "{{ messages }}", "{{ tools }}{{ message.tool_calls }}"
TOOLS = [{"type": "function", "function": {"name": "add", "description": "é"}}]
USER: dict[str, Any] = {"role": "user", "content": "hi"}
CALLS = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": ["x", None]}}}]
HERMES = TOOL_FORMATS["hermes"]


def test_a_template_that_knows_gets_everything_as_it_is() -> None:
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": CALLS}]
    assert messages_for(KNOWING, messages, TOOLS, HERMES) == messages


def test_the_tools_are_described_in_the_system_message() -> None:
    (system, user) = messages_for(PLAIN, [USER], TOOLS, HERMES)
    assert user == USER
    assert json.dumps(TOOLS[0], ensure_ascii=False) in system["content"]
    assert system["content"].endswith(
        '<tool_call>\n{"name": "function_name", "arguments": {"argument": value}}\n</tool_call>'
    )
    given = {"role": "system", "content": "Be brief."}
    (both, _) = messages_for(PLAIN, [given, USER], TOOLS, HERMES)
    assert both["content"] == f"Be brief.\n\n{system['content']}"
    assert given["content"] == "Be brief."
    assert messages_for(PLAIN, [USER], [], HERMES) == [USER]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_example_shows_the_format(name: str) -> None:
    (system, _) = messages_for(PLAIN, [USER], TOOLS, TOOL_FORMATS[name])
    form = TOOL_FORMATS[name]
    assert form.begin + form.call[0] + "function_name" + form.call[1] in system["content"]


def test_calls_and_results_become_text() -> None:
    messages = [
        {"role": "assistant", "content": "Let me see.", "tool_calls": CALLS},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "tool", "content": "4", "tool_call_id": "2"},
        {"role": "assistant", "content": "", "tool_calls": CALLS},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
    ]
    written = write_calls(CALLS, HERMES)
    assert messages_for(PLAIN, messages, [], HERMES) == [
        {"role": "assistant", "content": f"Let me see.\n{written}"},
        {"role": "user", "content": "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"},
        {"role": "assistant", "content": written},
        {"role": "user", "content": "<tool_response>\n5\n</tool_response>"},
    ]
    assert messages[0]["tool_calls"] is CALLS


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_written_calls_are_read_back(name: str) -> None:
    found = parse(name, write_calls(CALLS * 2, TOOL_FORMATS[name]))
    assert [(kind, tool, json.loads(text)) for kind, tool, text in found] == [
        ("call", "add", {"a": 1, "b": ["x", None]})
    ] * 2


def test_arguments_that_are_no_object_stay_as_they_were() -> None:
    broken = [{"function": {"name": "add", "arguments": '{"a": '}}]
    assert write_calls(broken, HERMES) == '<tool_call>\n{"name": "add", "arguments": {"a": }\n</tool_call>'
