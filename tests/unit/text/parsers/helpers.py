"""Running parsers over cut texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pinnate.text.parsers.events import ChatParser, ContentDelta, ReasoningDelta, ToolCallDelta, ToolCallStart
from pinnate.text.parsers.registry import TOOL_FORMATS

TOOLS = ("get_weather", "add", "ping")
Joined = list[list[Any]]


def joined(parser: ChatParser, pieces: Sequence[str]) -> Joined:
    """The events of `pieces`, adjacent deltas joined, ids checked and left out:
    ["content", text], ["reasoning", text], ["call", name, arguments]."""
    out: Joined = []
    calls: list[list[Any]] = []
    ids = set()
    for event in [event for piece in pieces for event in parser.push(piece)] + parser.finish():
        match event:
            case ContentDelta(text) | ReasoningDelta(text):
                kind = "content" if isinstance(event, ContentDelta) else "reasoning"
                assert text
                if out and out[-1][0] == kind:
                    out[-1][1] += text
                else:
                    out.append([kind, text])
            case ToolCallStart(index, identity, name):
                assert index == len(calls)
                assert name
                ids.add(identity)
                out.append(["call", name, ""])
                calls.append(out[-1])
            case ToolCallDelta(index, arguments):
                assert arguments
                assert index == len(calls) - 1
                calls[index][2] += arguments
    assert len(ids) == len(calls)
    return out


def parse(name: str, text: str) -> Joined:
    """With the tools above; the same whether whole or one character at a time."""
    form = TOOL_FORMATS[name]
    whole = joined(form.new_parser(TOOLS), [text])
    assert joined(form.new_parser(TOOLS), list(text)) == whole
    return whole
