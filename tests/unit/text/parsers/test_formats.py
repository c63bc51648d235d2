"""Recorded outputs of each format, well and badly formed."""

from __future__ import annotations

import json

import pytest

from pinnate.text.parsers.registry import TOOL_FORMATS
from tests.unit.text.parsers.helpers import TOOLS, joined, parse

PARIS = '{"city": "Paris", "days": 3}'
WEATHER = ["call", "get_weather", PARIS]
ADD = ["call", "add", '{"a": 1, "b": [2, {"c": null}]}']


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>', [WEATHER]),
        ("hermes", f'<tool_call>{{"arguments": {PARIS}, "name": "get_weather"}}</tool_call>', [WEATHER]),
        (
            "hermes",
            f'Let me look.\n\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n'
            f'<tool_call>\n{{"name": "add", "arguments": {ADD[2]}}}\n</tool_call>\n',
            [["content", "Let me look."], WEATHER, ADD],
        ),
        ("hermes", f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}\n', [WEATHER]),
        (
            "hermes",
            '<tool_call>{"name": "new", "arguments": {}}</tool_call> done',
            [["call", "new", "{}"], ["content", "done"]],
        ),
        ("hermes", '<tool_call>{"name": "ping"}</tool_call>', [["call", "ping", "{}"]]),
        ("hermes", '<tool_call>{"name": "ping", "arguments": null}</tool_call>', [["call", "ping", "{}"]]),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
            [["call", "add", '{"a": 1}']],
        ),
        (
            "hermes",
            '<tool_call>{"id": 7, "name": "add", "arguments": {"s": "</tool_call>"}, "x": [1]}</tool_call>',
            [["call", "add", '{"s": "</tool_call>"}']],
        ),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": {"s": "a\nb\t\\"}"}}</tool_call>',
            [["call", "add", '{"s": "a\\nb\\t\\"}"}']],
        ),
        ("llama3_json", f'{{"name": "get_weather", "parameters": {PARIS}}}', [WEATHER]),
        ("llama3_json", f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}', [WEATHER]),
        (
            "llama3_json",
            f'{{"type": "function", "name": "get_weather", "parameters": {PARIS}}}; '
            f'{{"name": "add", "parameters": {ADD[2]}}}',
            [WEATHER, ADD],
        ),
        ("llama3_json", f' {{"name": "get_weather", "parameters": {PARIS}}}\nThere.', [WEATHER, ["content", "There."]]),
        (
            "json",
            f'[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "add", "arguments": {ADD[2]}}}]',
            [WEATHER, ADD],
        ),
        ("json", f'```json\n{{"name": "get_weather", "arguments": {PARIS}}}\n```', [WEATHER]),
        ("json", f'```\n[\n{{"name": "get_weather", "arguments": {PARIS}}}\n]\n``` ok', [WEATHER, ["content", "ok"]]),
        (
            "mistral",
            f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}, '
            f'{{"name": "add", "arguments": {ADD[2]}, "id": "x"}}]',
            [WEATHER, ADD],
        ),
        ("mistral", f"[TOOL_CALLS]get_weather{PARIS}[TOOL_CALLS]add{ADD[2]}", [WEATHER, ADD]),
        ("mistral", f"I see. [TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{PARIS}", [["content", "I see."], WEATHER]),
        ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{PARIS}", [WEATHER]),
        ("mistral", f'[TOOL_CALLS]{{"name": "get_weather", "arguments": {PARIS}}}', [WEATHER]),
        ("pythonic", "[get_weather(city='Paris', days=3)]", [WEATHER]),
        (
            "pythonic",
            '<|python_start|>[get_weather(city="Paris", days=3), add(a=1, b=[2, {"c": None}],)]<|python_end|>',
            [WEATHER, ADD],
        ),
        ("pythonic", "[ping()]", [["call", "ping", "{}"]]),
        (
            "pythonic",
            r"""[add(a=(1, -2.5), b={'k': "it's, \"so\""}, c=true, d='x\'y)', e=null)]""",
            [["call", "add", r"""{"a": [1, -2.5], "b": {"k": "it's, \"so\""}, "c": true, "d": "x'y)", "e": null}"""]],
        ),
        ("pythonic", r'[add(s="\ud83d\ude00\/")]', [["call", "add", '{"s": "😀/"}']]),
    ],
)
def test_calls(name: str, text: str, expected: list[list[str]]) -> None:
    found = parse(name, text)
    assert found == expected
    for call in found:
        if call[0] == "call":
            json.loads(call[2])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(
            (name, text)
            for name in TOOL_FORMATS
            for text in ("", " ", "Hello.\n", "1 < 2 [x] {y} `z`", '{"a": 1}', "[1, 2]")
        ),
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call> get_weather </tool_call>"),
        ("hermes", '  <tool_call>\n{"name": "", "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "\\"\\\\ud800\\""}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add" "arguments"'),
        ("hermes", '<tool_call>{"arguments": {"a": [1}, "name": "add"}'),
        ("hermes", "<tool_<tool_call"),
        ("llama3_json", '{"name": "Alice", "parameters": {"age": 5}}'),
        ("llama3_json", '{"name": "add"}'),
        ("llama3_json", 'Sure: {"name": "add", "parameters": {}}'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("json", "```python\nprint(1)\n```"),
        ("json", "```json\n[]\n```"),
        ("json", '[{"name": "Alice", "arguments": {}}]'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS] []"),
        ("mistral", "[TOOL_CALLS]add[CALL_ID]x{}"),
        ("mistral", "[TOOL_CALLS]add[ARGS] and more"),
        ("pythonic", "[unknown(a=1)]"),
        ("pythonic", "[add(1, 2)]"),
        ("pythonic", "[add(a=f())]"),
        ("pythonic", "[add(a=1e999)]"),
        ("pythonic", "[add(a=b'x')]"),
        ("pythonic", "[add(a={1: 2})]"),
        ("pythonic", "[add(a=[1)]"),
        ("pythonic", "[add(a='x"),
        ("pythonic", "<|python_start|>print(1)<|python_end|>"),
    ],
)
def test_what_is_no_call_is_content_unchanged(name: str, text: str) -> None:
    assert parse(name, text) == ([["content", text]] if text else [])


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        # The call had begun: what was sent stays, the rest is content.
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": {"a": [1}}</tool_call>',
            [["call", "add", '{"a": [1'], ["content", "}}</tool_call>"]],
        ),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": {"a": 1}, oops}',
            [["call", "add", '{"a": 1}'], ["content", ", oops}"]],
        ),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "1', [["call", "add", '{"a": "1']]),
        (
            "hermes",
            '<tool_call>{oops <tool_call>{"name": "ping", "arguments": {}}</tool_call>',
            [["content", "<tool_call>{oops"], ["call", "ping", "{}"]],
        ),
        ("mistral", '[TOOL_CALLS]add{"a": 1', [["call", "add", '{"a": 1']]),
        ("pythonic", "[add(a=1, 2)]", [["call", "add", '{"a": 1'], ["content", ", 2)]"]]),
        (
            "llama3_json",
            '{"name": "add", "parameters": {}}; {"name": "Bob"}',
            [["call", "add", "{}"], ["content", '; {"name": "Bob"}']],
        ),
    ],
)
def test_a_fault_after_a_call_has_begun(name: str, text: str, expected: list[list[str]]) -> None:
    assert parse(name, text) == expected


def test_arguments_come_as_they_are_read() -> None:
    parser = TOOL_FORMATS["hermes"].new_parser(TOOLS)
    assert parser.push('<tool_call>\n{"name": "add", "arguments": ') == []
    (start, first) = parser.push('{"a')
    assert (start.name, first.arguments) == ("add", '{"a')  # type: ignore[union-attr]
    (more,) = parser.push('": 1}')
    assert more.arguments == '": 1}'  # type: ignore[union-attr]
    assert parser.push("}\n</tool_call>") == parser.finish() == []


def test_ids() -> None:
    text = '[TOOL_CALLS][{"name": "ping", "arguments": {}}]'
    (start, _) = TOOL_FORMATS["mistral"].new_parser(TOOLS).push(text)
    assert len(start.id) == 9  # type: ignore[union-attr]
    assert start.id.isalnum()  # type: ignore[union-attr]
    (start, _) = TOOL_FORMATS["json"].new_parser(TOOLS).push(text.removeprefix("[TOOL_CALLS]"))
    assert start.id.startswith("call_")  # type: ignore[union-attr]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_hostile_text_costs_no_more_than_a_plain_one(name: str) -> None:
    """Deep and endless markup, none of it a call: one pass, no recursion."""
    texts = [
        '<tool_call>{"a": "' * 3000,
        "[TOOL_CALLS][" * 4000,
        '{"a":[' * 9000,
        "[add(a=" + "[" * 20000,
        "[add(a=" + "(" * 300 + ")",
    ]
    for text in texts:
        assert "".join(part[1] for part in joined(TOOL_FORMATS[name].new_parser(TOOLS), [text])) == text
