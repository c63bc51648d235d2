"""Mistral's calls after [TOOL_CALLS]: a list of objects, or since 2025 a name and its arguments.

Knows: [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], [TOOL_CALLS]name{...} and
[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}, once or repeated. The ids that the model writes are dropped for ours, so that
they are unique.
"""

from __future__ import annotations

import string

from pinnate.text.parsers.call_object import CallRules, call_object
from pinnate.text.parsers.cursor import (
    Cursor,
    Found,
    Sink,
    Steps,
    blanks,
    brackets,
    content_around,
    literal,
    one_of,
    run_of,
)

OPEN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = frozenset(string.ascii_letters + string.digits + "_-.")


def mistral(cursor: Cursor, sink: Sink, rules: CallRules) -> Steps:
    yield from content_around(cursor, sink, OPEN[0], lambda: _block(cursor, sink, rules))


def _block(cursor: Cursor, sink: Sink, rules: CallRules) -> Steps:
    if not (yield from literal(cursor, OPEN)):
        return
    yield from blanks(cursor)
    if cursor.char in _NAME:
        yield from _named(cursor, sink, rules)
        return
    listed = yield from literal(cursor, "[")
    yield from blanks(cursor)
    if cursor.char != "{":
        return
    while cursor.char == "{":
        if not (yield from call_object(cursor, sink, rules)):
            return
        yield from blanks(cursor)
        if (yield from one_of(cursor, ",")):
            yield from blanks(cursor)
    if not listed or (yield from literal(cursor, "]")):
        cursor.held.clear()


def _named(cursor: Cursor, sink: Sink, rules: CallRules) -> Steps:
    name = yield from run_of(cursor, _NAME)
    if cursor.char == "[" and not (yield from _marks(cursor)):
        return
    yield from blanks(cursor)
    if cursor.char != "{" or not rules.is_name(name):
        return
    cursor.held.clear()
    sink.start(name)
    yield from brackets(cursor, sink.argument)


def _marks(cursor: Cursor) -> Found:
    """[CALL_ID]id[ARGS], or [ARGS] alone."""
    yield from literal(cursor, "[")
    if cursor.char == "C":
        if not (yield from literal(cursor, CALL_ID[1:])):
            return False
        yield from run_of(cursor, _NAME)
        if not (yield from literal(cursor, "[")):
            return False
    return (yield from literal(cursor, ARGS[1:]))
