"""Calls as plain JSON, the whole answer: Llama 3.1's and 3.2's objects, or a list of them.

Knows: {"name": ..., "parameters": {...}}; {...}; ... and [{"name": ..., "arguments": {...}}, ...], after
<|python_tag|> or in a Markdown fence if the model likes. An answer that begins otherwise, or with an object that names
no tool of the request, is content from its first character on.
"""

from __future__ import annotations

from pinnate.text.parsers.call_object import CallRules, call_object
from pinnate.text.parsers.cursor import Cursor, Sink, Steps, blanks, literal, one_of

PYTHON_TAG = "<|python_tag|>"
_FENCE = "```"


def json_calls(cursor: Cursor, sink: Sink, rules: CallRules) -> Steps:
    yield from blanks(cursor)
    if cursor.char == "<":
        if not (yield from literal(cursor, PYTHON_TAG)):
            return
        yield from blanks(cursor)
    fenced = cursor.char == "`"
    if fenced:
        if not (yield from literal(cursor, _FENCE)):
            return
        if cursor.char == "j" and not (yield from literal(cursor, "json")):
            return
        yield from blanks(cursor)
    listed = yield from literal(cursor, "[")
    yield from blanks(cursor)
    while cursor.char == "{":
        if not (yield from call_object(cursor, sink, rules)):
            return
        yield from blanks(cursor)
        if (yield from one_of(cursor, ",;")):
            yield from blanks(cursor)
    if listed and not (yield from literal(cursor, "]")):
        return
    if fenced:
        yield from blanks(cursor)
        if not (yield from literal(cursor, _FENCE)):
            return
    if sink.num_calls:
        cursor.held.clear()
