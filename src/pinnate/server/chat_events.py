"""From the outputs of a chat's choices to parser events, and to the parts of a whole message.

Knows: events, how a choice's end is named once tools were called. Must not know: any API's chunks, how a parser works.
Every API that shows chats (chat completions, responses, messages) builds on these two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pinnate.text.parsers.events import (
    ChatEvent,
    ChatParser,
    ContentDelta,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallStart,
)

TOOL_CALLS = "tool_calls"


class ChoiceEvents:
    """One choice of a stream. `has_calls`: whether a tool call has begun."""

    def __init__(self, parser: ChatParser) -> None:
        self._parser = parser
        self.has_calls = False

    def push(self, text: str, *, is_last: bool) -> list[ChatEvent]:
        """What is certain after `text`; everything once the choice has ended."""
        events = self._parser.push(text) if text else []
        if is_last:
            events = events + self._parser.finish()
        if not self.has_calls:
            self.has_calls = any(isinstance(event, ToolCallStart) for event in events)
        return events

    def finish_reason(self, reason: str) -> str:
        """`reason` as chat completions names it: a turn that ends with calls ends for them; one cut short does not."""
        return TOOL_CALLS if self.has_calls and reason == "stop" else reason


@dataclass(slots=True)
class ToolCallParts:
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class MessageParts:
    """A whole choice. `reasoning` is None where there was none; the calls are in their order."""

    content: str = ""
    reasoning: str | None = None
    calls: list[ToolCallParts] = field(default_factory=list)


def read_message(new_parser: Callable[[], ChatParser], text: str) -> MessageParts:
    """The parts of a finished choice's text: exactly what the events of its stream join to."""
    parser = new_parser()
    message = MessageParts()
    contents, reasoning = [], []
    for event in parser.push(text) + parser.finish():
        match event:
            case ContentDelta():
                contents.append(event.text)
            case ReasoningDelta():
                reasoning.append(event.text)
            case ToolCallStart():
                message.calls.append(ToolCallParts(event.id, event.name))
            case ToolCallDelta():
                message.calls[event.index].arguments += event.arguments
    message.content = "".join(contents)
    message.reasoning = "".join(reasoning) if reasoning else None
    return message
