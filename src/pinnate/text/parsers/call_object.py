"""One call written as a JSON object: {"name": ..., "arguments": {...}}, in any order of its members.

Knows: the object. Must not know: what stands around it in a format. `parameters` is another name of `arguments`; other
members (an id, a type) are read and dropped. Arguments written as a JSON string that holds an object are that object.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass

from pinnate.text.parsers.cursor import Cursor, Found, Sink, blanks, brackets, literal, one_of, string, value

ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class CallRules:
    """`names`: what may be called; None where a format's marks leave no doubt that a call is meant. Without marks an
    object is a call only if it names a known tool and has arguments."""

    names: Collection[str] | None = None

    def is_name(self, name: str) -> bool:
        return bool(name) and (self.names is None or name in self.names)

    @property
    def needs_arguments(self) -> bool:
        return self.names is not None


@dataclass(slots=True)
class _Call:
    """What is known so far. `arguments`: whole, because the name came after them or they were a string."""

    name: str | None = None
    arguments: str | None = None
    is_started: bool = False


def call_object(cursor: Cursor, sink: Sink, rules: CallRules) -> Found:
    """At `{`. True: the call is in the sink and its text is dropped. False: what is held is content.

    The arguments go to the sink as they are read once the name is known; a fault that comes later ends the call there.
    """
    call = _Call()
    yield from literal(cursor, "{")
    while True:
        yield from blanks(cursor)
        key = yield from string(cursor)
        if key is None:
            return False
        yield from blanks(cursor)
        if not (yield from literal(cursor, ":")):
            return False
        yield from blanks(cursor)
        if not (yield from _member(key, call, cursor, sink, rules)):
            return False
        yield from blanks(cursor)
        if not (yield from one_of(cursor, ",")):
            break
    if not (yield from literal(cursor, "}")):
        return False
    if not call.is_started:
        if call.name is None or (call.arguments is None and rules.needs_arguments):
            return False
        sink.start(call.name)
        sink.arguments(call.arguments or "{}")
    cursor.held.clear()
    return True


def _member(key: str, call: _Call, cursor: Cursor, sink: Sink, rules: CallRules) -> Found:
    if key == "name" and call.name is None:
        call.name = yield from string(cursor)
        return call.name is not None and rules.is_name(call.name)
    if key not in ARGUMENTS or call.is_started or call.arguments is not None:
        return (yield from value(cursor)) is not None
    if cursor.char == "{" and call.name is not None:
        sink.start(call.name)
        call.is_started = True
        cursor.held.clear()
        return (yield from brackets(cursor, sink.argument))
    raw = yield from value(cursor)
    call.arguments = None if raw is None else _object_text(raw)
    return call.arguments is not None


def _object_text(raw: str) -> str | None:
    """The JSON text of an object that `raw` is, or holds as a string."""
    if raw == "null":
        return "{}"
    try:
        if raw.startswith('"'):
            raw = json.loads(raw, strict=False)
            raw.encode()
            return raw if isinstance(json.loads(raw), dict) else None
    except (ValueError, RecursionError):
        return None
    return raw if raw.startswith("{") else None
