"""Hermes, Qwen and their kin: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, anywhere in the text."""

from __future__ import annotations

from pinnate.text.parsers.call_object import CallRules, call_object
from pinnate.text.parsers.cursor import Cursor, Sink, Steps, blanks, content_around, literal

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def hermes(cursor: Cursor, sink: Sink, rules: CallRules) -> Steps:
    yield from content_around(cursor, sink, OPEN[0], lambda: _block(cursor, sink, rules))


def _block(cursor: Cursor, sink: Sink, rules: CallRules) -> Steps:
    """Several objects in one block are several calls; the end mark may be missing."""
    if not (yield from literal(cursor, OPEN)):
        return
    yield from blanks(cursor)
    if cursor.char != "{":
        return
    while cursor.char == "{":
        if not (yield from call_object(cursor, sink, rules)):
            return
        yield from blanks(cursor)
    if (yield from literal(cursor, CLOSE)):
        cursor.held.clear()
