"""A choice's text as the runs that an API shows one after the other: reasoning, text, tool calls.

Knows: the order of parser events. Must not know: any API's names or shapes. The Responses API makes an item of each
segment, Anthropic's a content block. At most one segment is open. White space between two segments makes none of its
own: it is held until more text follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pinnate.text.parsers.events import ChatEvent, ChatParser, ContentDelta, ReasoningDelta, ToolCallStart

Kind = Literal["text", "reasoning", "call"]


@dataclass(frozen=True, slots=True)
class Begin:
    """`id` and `name` are those of a call."""

    kind: Kind
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class More:
    """More text of the open segment; of a call, of its arguments. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The open segment is complete."""


Step = Begin | More | End


class Segments:
    """One choice. The steps' joined texts depend on the choice's text alone, never on how it was cut.

    `reasoning_tokens` counts the tokens whose text showed up as reasoning: a token whose text is held back counts for
    what shows up next.
    """

    def __init__(self, parser: ChatParser) -> None:
        self._parser = parser
        self._open: Kind | None = None
        self._has_begun = False
        self._held = ""
        self._unclaimed = 0
        self.reasoning_tokens = 0

    def push(self, text: str, num_tokens: int = 0) -> list[Step]:
        self._unclaimed += num_tokens
        return self._take(self._parser.push(text) if text else [])

    def finish(self) -> list[Step]:
        """The rest. White space is a segment only if it is all there was."""
        steps = self._take(self._parser.finish())
        if not self._has_begun and self._held:
            held = self._held
            steps += [*self._begin(Begin("text")), More(held)]
        if self._open is not None:
            steps.append(End())
        return steps

    def _take(self, events: list[ChatEvent]) -> list[Step]:
        steps: list[Step] = []
        for event in events:
            steps += self._one(event)
        if steps:
            if self._open == "reasoning":
                self.reasoning_tokens += self._unclaimed
            self._unclaimed = 0
        return steps

    def _one(self, event: ChatEvent) -> list[Step]:
        if isinstance(event, ContentDelta):
            return self._text(event.text)
        if isinstance(event, ReasoningDelta):
            begin = [] if self._open == "reasoning" else self._begin(Begin("reasoning"))
            return [*begin, More(event.text)]
        if isinstance(event, ToolCallStart):
            return self._begin(Begin("call", event.id, event.name))
        assert self._open == "call", "the arguments of a call follow its start"
        return [More(event.arguments)]

    def _text(self, text: str) -> list[Step]:
        if self._open == "text":
            return [More(text)]
        self._held += text
        if not self._held.strip():
            return []
        held = self._held
        return [*self._begin(Begin("text")), More(held)]

    def _begin(self, begin: Begin) -> list[Step]:
        ended: list[Step] = [] if self._open is None else [End()]
        self._open, self._has_begun, self._held = begin.kind, True, ""
        return [*ended, begin]
