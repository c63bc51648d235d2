"""Thinking is split from the answer, whoever opened it."""

from __future__ import annotations

import pytest

from pinnate.text.parsers.events import PlainParser
from pinnate.text.parsers.reasoning import ReasoningParser
from pinnate.text.parsers.registry import TOOL_FORMATS
from tests.unit.text.parsers.helpers import TOOLS, joined


@pytest.mark.parametrize(
    ("is_open", "text", "expected"),
    [
        (
            False,
            "<think>\nHm. 1 < 2\n\nSo\n</think>\n\nYes.\n",
            [["reasoning", "Hm. 1 < 2\n\nSo"], ["content", "Yes.\n"]],
        ),
        (False, "\n<think></think>Yes", [["content", "Yes"]]),
        (False, "Yes <think>no</think>", [["content", "Yes <think>no</think>"]]),
        (False, "  <thin", [["content", "  <thin"]]),
        (False, "<think>Hm </thin", [["reasoning", "Hm </thin"]]),
        (False, "<think>Hm\n\n", [["reasoning", "Hm"]]),
        (False, "", []),
        (True, "Hm\n</think>\n\nYes", [["reasoning", "Hm"], ["content", "Yes"]]),
        (True, "\n<think>\nHm</think>Yes</think>", [["reasoning", "Hm"], ["content", "Yes</think>"]]),
        (True, "Hm < x", [["reasoning", "Hm < x"]]),
        (True, "<thin", [["reasoning", "<thin"]]),
        (True, "</think>\n", []),
    ],
)
def test_split(is_open: bool, text: str, expected: list[list[str]]) -> None:
    assert joined(ReasoningParser(PlainParser(), is_open=is_open), [text]) == expected
    assert joined(ReasoningParser(PlainParser(), is_open=is_open), list(text)) == expected


def test_calls_follow_thinking_and_thinking_makes_no_calls() -> None:
    call = '<tool_call>{"name": "ping", "arguments": {}}</tool_call>'
    parser = ReasoningParser(TOOL_FORMATS["hermes"].new_parser(TOOLS), is_open=True)
    assert joined(parser, list(f"I could {call}</think>\n{call}")) == [
        ["reasoning", f"I could {call}"],
        ["call", "ping", "{}"],
    ]


def test_hidden_thinking_and_other_marks() -> None:
    parser = ReasoningParser(PlainParser(), ("[THINK]", "[/THINK]"), is_open=False, shown=False)
    assert joined(parser, ["[THIN", "K]Hm[/TH", "INK] Yes"]) == [["content", "Yes"]]
