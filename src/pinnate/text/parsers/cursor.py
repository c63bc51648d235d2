"""Scripts that read a text one character at a time, and the parser that runs one.

Knows: characters, JSON's outer shape, events. Must not know: any tool format.

A script is a generator: each `yield` waits for the next character, which is then `cursor.char` (END after the last).
What a script decides depends on the characters alone, so the cut of the text into deltas cannot matter. Text that may
turn out to be markup is held by the cursor: a script either drops it as markup or gives it back as content, whole. No
character is read twice, so a hostile text costs no more than a plain one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator

from pinnate.text.parsers.events import ChatEvent, ContentDelta, ToolCallDelta, ToolCallStart

END = ""
BLANKS = frozenset(" \t\n\r")
_CLOSING = {"{": "}", "[": "]"}
_CONTENT = -1

Steps = Generator[None, None, None]
Found = Generator[None, None, bool]
Put = Callable[[str], None]


class Cursor:
    """`char` is the next character, not yet read. `held`: what was read and may still be content."""

    def __init__(self) -> None:
        self.char = END
        self.held: list[str] = []

    def hold(self) -> None:
        self.held.append(self.char)


class Sink:
    """Collects events. Blanks beside a call are not content; all other text is, unchanged.

    `new_id` makes the id of a call.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._events: list[ChatEvent] = []
        self._parts: list[str] = []  # text of the event that is being made
        self._kind = _CONTENT  # of that event: content, or the index of a call
        self._blanks: list[str] = []  # content so far, if more text comes before a call does
        self._after_call = False
        self._in_string = self._in_escape = False  # in the arguments of the current call
        self.num_calls = 0

    def content(self, text: str) -> None:
        body = text.rstrip()
        if not body:
            self._blanks.append(text)
            return
        tail = text[len(body) :]
        if self._after_call:
            body = body.lstrip()
        else:
            body = "".join(self._blanks) + body
        self._add(_CONTENT, body)
        self._blanks = [tail] if tail else []
        self._after_call = False

    def start(self, name: str) -> None:
        self._flush()
        self._blanks.clear()
        self._after_call = True
        self._in_string = self._in_escape = False
        self._events.append(ToolCallStart(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        for char in text:
            self.argument(char)

    def argument(self, char: str) -> None:
        """One more character of the current call's JSON. A control character inside a string, which models write and
        JSON forbids, becomes its escape."""
        if not self._in_string:
            self._in_string = char == '"'
        elif char < " ":
            char = json.dumps(char)[1:-1]
            if self._in_escape:  # a backslash before the end of a line: the line's end is meant
                char, self._in_escape = char[1:], False
        elif self._in_escape:
            self._in_escape = False
        elif char == "\\":
            self._in_escape = True
        elif char == '"':
            self._in_string = False
        self._add(self.num_calls - 1, char)

    def take(self) -> list[ChatEvent]:
        """The events since the last time; adjacent ones of a kind are one."""
        self._flush()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """No more text comes."""
        if self._blanks and not self._after_call:
            self._add(_CONTENT, "".join(self._blanks))
        self._blanks.clear()

    def _add(self, kind: int, text: str) -> None:
        if kind != self._kind:
            self._flush()
            self._kind = kind
        self._parts.append(text)

    def _flush(self) -> None:
        text = "".join(self._parts)
        self._parts.clear()
        if text:
            self._events.append(ContentDelta(text) if self._kind == _CONTENT else ToolCallDelta(self._kind, text))


class ScriptParser:
    """A ChatParser that runs a script."""

    def __init__(self, script: Callable[[Cursor, Sink], Steps], new_id: Callable[[], str]) -> None:
        self._cursor = Cursor()
        self._sink = Sink(new_id)
        self._steps = self._run(script)
        next(self._steps)

    def push(self, text: str) -> list[ChatEvent]:
        cursor, steps = self._cursor, self._steps
        for char in text:
            cursor.char = char
            next(steps)
        return self._sink.take()

    def finish(self) -> list[ChatEvent]:
        self._cursor.char = END
        next(self._steps, None)
        self._sink.close()
        return self._sink.take()

    def _run(self, script: Callable[[Cursor, Sink], Steps]) -> Steps:
        cursor, sink = self._cursor, self._sink
        yield
        yield from script(cursor, sink)
        give_back(cursor, sink)
        while cursor.char != END:
            sink.content(cursor.char)
            yield


def give_back(cursor: Cursor, sink: Sink) -> None:
    """What is held was no markup."""
    if cursor.held:
        sink.content("".join(cursor.held))
        cursor.held.clear()


def content_around(cursor: Cursor, sink: Sink, first: str, block: Callable[[], Steps]) -> Steps:
    """All text is content but what `block` reads, which is tried at each `first` (its own first character) and clears
    what it holds where that was markup."""
    while cursor.char != END:
        if cursor.char == first:
            yield from block()
            give_back(cursor, sink)
        else:
            sink.content(cursor.char)
            yield


def literal(cursor: Cursor, text: str) -> Found:
    """Reads `text`; False at the first character that differs."""
    for expected in text:
        if cursor.char != expected:
            return False
        cursor.hold()
        yield
    return True


def one_of(cursor: Cursor, chars: str | frozenset[str]) -> Found:
    """Reads one of `chars`."""
    if cursor.char == END or cursor.char not in chars:
        return False
    cursor.hold()
    yield
    return True


def run_of(cursor: Cursor, chars: frozenset[str]) -> Generator[None, None, str]:
    """Reads and returns all that comes of `chars`."""
    begin = len(cursor.held)
    while cursor.char in chars:
        cursor.hold()
        yield
    return "".join(cursor.held[begin:])


def blanks(cursor: Cursor) -> Steps:
    while cursor.char in BLANKS:
        cursor.hold()
        yield


def string(cursor: Cursor) -> Generator[None, None, str | None]:
    """Reads a JSON string and returns what it means; None where there is none, or a broken one."""
    if cursor.char != '"':
        return None
    begin = len(cursor.held)
    cursor.hold()
    yield
    if not (yield from _rest_of_string(cursor, cursor.held.append)):
        return None
    return decode_string("".join(cursor.held[begin:]))


def decode_string(raw: str) -> str | None:
    """None for what is no JSON string or no Unicode (half a surrogate pair)."""
    try:
        text = json.loads(raw, strict=False)
        text.encode()
    except ValueError:
        return None
    return text if isinstance(text, str) else None


def _rest_of_string(cursor: Cursor, put: Put) -> Found:
    while cursor.char not in ('"', END):
        if cursor.char == "\\":
            put("\\")
            yield
            if cursor.char == END:
                return False
        put(cursor.char)
        yield
    if cursor.char == END:
        return False
    put('"')
    yield
    return True


def brackets(cursor: Cursor, put: Put) -> Found:
    """Reads a JSON object or list to its closing bracket. What lies between brackets and strings is not looked at: a
    model's slip there is for the reader of the arguments to see. False at a wrong bracket and at the end."""
    open_ones: list[str] = []
    while cursor.char != END:
        char = cursor.char
        if char in _CLOSING:
            open_ones.append(_CLOSING[char])
        elif char in ("}", "]"):
            if char != open_ones[-1]:
                return False
            open_ones.pop()
        put(char)
        yield
        if char == '"' and not (yield from _rest_of_string(cursor, put)):
            return False
        if not open_ones:
            return True
    return False


_WORD = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


def value(cursor: Cursor) -> Generator[None, None, str | None]:
    """Reads any JSON value and returns its text; None where there is none."""
    begin = len(cursor.held)
    if cursor.char in _CLOSING:
        if not (yield from brackets(cursor, cursor.held.append)):
            return None
    elif cursor.char == '"':
        if (yield from string(cursor)) is None:
            return None
    elif not (yield from run_of(cursor, _WORD)):
        return None
    return "".join(cursor.held[begin:])
