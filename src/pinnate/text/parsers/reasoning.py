"""What a model thinks before it answers: <think>...</think>, then the answer.

Knows: the two marks. Must not know: what the answer holds; a parser of its own reads it. Thinking begins with the
output or not at all. A template may have opened it at the end of the prompt: then the output begins inside it. Blanks
beside the marks belong to neither side.
"""

from __future__ import annotations

import enum

from pinnate.text.parsers.events import ChatEvent, ChatParser, ReasoningDelta


class _State(enum.Enum):
    BEFORE = enum.auto()
    INSIDE = enum.auto()
    AFTER = enum.auto()  # in the blanks before the answer
    ANSWER = enum.auto()


class ReasoningParser:
    """`answer` gets what comes after the thinking. `is_open`: the prompt has opened it. Without `shown` the thinking is
    read and dropped."""

    def __init__(
        self, answer: ChatParser, marks: tuple[str, str] = ("<think>", "</think>"), *, is_open: bool, shown: bool = True
    ) -> None:
        self._answer = answer
        self._open, self._close = marks
        self._is_open = is_open
        self._shown = shown
        self._state = _State.BEFORE
        self._held = ""
        self._has_text = False  # of thinking

    def push(self, text: str) -> list[ChatEvent]:
        if self._state is _State.ANSWER:
            return self._answer.push(text)
        self._held += text
        events: list[ChatEvent] = []
        if self._state is _State.BEFORE:
            self._read_open()
        if self._state is _State.INSIDE:
            self._read_thinking(events)
        if self._state is _State.AFTER:
            self._held = self._held.lstrip()
            if self._held:
                self._state = _State.ANSWER
        if self._state is _State.ANSWER:
            held, self._held = self._held, ""
            events += self._answer.push(held) if held else []
        return events

    def finish(self) -> list[ChatEvent]:
        events: list[ChatEvent] = []
        if self._state is _State.BEFORE and not self._is_open:
            events += self._answer.push(self._held) if self._held else []
        elif self._state in (_State.BEFORE, _State.INSIDE):
            self._think(self._held.rstrip(), events)
        self._held = ""
        return events + self._answer.finish()

    def _read_open(self) -> None:
        start = self._held.lstrip()
        if start.startswith(self._open):
            self._state, self._held = _State.INSIDE, start[len(self._open) :]
        elif not self._open.startswith(start):
            self._state = _State.INSIDE if self._is_open else _State.ANSWER

    def _read_thinking(self, events: list[ChatEvent]) -> None:
        end = self._held.find(self._close)
        if end >= 0:
            self._think(self._held[:end].rstrip(), events)
            self._state, self._held = _State.AFTER, self._held[end + len(self._close) :]
            return
        sure = self._held[: len(self._held) - _overlap(self._held, self._close)].rstrip()
        self._held = self._held[len(sure) :]
        self._think(sure, events)

    def _think(self, text: str, events: list[ChatEvent]) -> None:
        if not self._has_text:
            text = text.lstrip()
        if text:
            self._has_text = True
            if self._shown:
                events.append(ReasoningDelta(text))


def _overlap(text: str, mark: str) -> int:
    """The length of the longest end of `text` that `mark` begins with."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0
