"""The JSON object in a text that may have been cut short.

Knows: JSON. Must not know: whose arguments these are. A tool's input is an object in this API even where max_tokens
ended the call: then it has what is certain, as Anthropic's own clients read it while it streams.
"""

from __future__ import annotations

from typing import Any

import msgspec

_CLOSERS = {"{": "}", "[": "]"}


def parse_object(text: str) -> dict[str, Any]:
    """The object; of a cut one all members that are whole, where a cut string ends at the cut. {} for what is no
    object."""
    whole = _decode(text)
    if whole is None:
        whole = _decode(complete(text))
    return whole if isinstance(whole, dict) else {}


def complete(text: str) -> str:
    """`text` with its open strings and brackets closed, after its last whole value. For prefixes of valid JSON."""
    scan = _Scan()
    for place, char in enumerate(text):
        scan.step(place, char)
    if scan.in_string and not scan.is_key:
        end = scan.escape_start if scan.escape_start is not None else len(text)
        return text[:end] + '"' + scan.closers()
    if scan.is_value_end(text):
        return text + scan.closers()
    return text[: scan.safe_end] + scan.closers()


def _decode(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return None


class _Scan:
    """Where the scanner is. `safe_end` is the end of a prefix that `closers` completes: each bracket moves it."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.in_string = False
        self.is_key = False
        self.escape_start: int | None = None  # of an escape that is not whole yet
        self.safe_end = 0
        self._expects_key = False

    def step(self, place: int, char: str) -> None:
        if self.in_string:
            self._in_string(place, char)
        elif char == '"':
            self.in_string, self.is_key = True, self._expects_key
        elif char in "{[":
            self.stack.append(char)
            self._expects_key = char == "{"
            self.safe_end = place + 1
        elif char in "}]":
            del self.stack[-1:]
            self._expects_key = False
            self.safe_end = place + 1
        elif char == ",":
            self._expects_key = bool(self.stack) and self.stack[-1] == "{"
            self.safe_end = place
        elif char == ":":
            self._expects_key = False

    def closers(self) -> str:
        return "".join(_CLOSERS[opener] for opener in reversed(self.stack))

    def is_value_end(self, text: str) -> bool:
        """Whether the text so far, closed, is JSON: it ended after a value."""
        return _decode(text + self.closers()) is not None

    def _in_string(self, place: int, char: str) -> None:
        if self.escape_start is not None:
            length = place - self.escape_start
            if (length == 1 and char != "u") or length == 5:
                self.escape_start = None
        elif char == "\\":
            self.escape_start = place
        elif char == '"':
            self.in_string = False
            if not self.is_key:
                self.safe_end = place + 1
