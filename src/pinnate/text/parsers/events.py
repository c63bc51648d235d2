"""The events that a chat's output is made of, and the contract of what finds them in its text.

Knows: nothing of any model or API. The path of a text is: delta -> parser -> these events -> an API's chunk -> its SSE
line. Each API shows the same events in its own shape.

A parser is an incremental state machine of one choice. Its events depend on the text alone, never on how the text was
cut: for every split, the joined deltas of `push` and `finish` are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer's text. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. `index` counts the calls of this choice from 0; its arguments follow as ToolCallDeltas."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of the JSON text of the arguments of call `index`. Never empty."""

    index: int
    arguments: str


ChatEvent = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallDelta


class ChatParser(Protocol):
    def push(self, text: str) -> list[ChatEvent]:
        """Events that are certain after `text`; what may still become something else is held back."""
        ...

    def finish(self) -> list[ChatEvent]:
        """The rest, when no more text will come. Called once."""
        ...


class PlainParser:
    """All text is content."""

    def push(self, text: str) -> list[ChatEvent]:
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[ChatEvent]:
        return []
