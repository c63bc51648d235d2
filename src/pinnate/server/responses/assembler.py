"""The segments of a text to the items and the events of a response: one state machine for plain and streamed answers.

Knows: the order of this API's events. Must not know: SSE, HTTP, the engine, how text becomes segments. The items depend
on the segments' joined texts alone, so a stream and a plain answer have the same ones.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

from msgspec import UNSET
from msgspec.structs import replace

from pinnate.core.batch import TokenLogprobs
from pinnate.server.cache_report import Vocabulary
from pinnate.server.errors import ErrorObject
from pinnate.server.logprobs import chat_logprobs
from pinnate.server.protocol.chat import ChatTokenLogprob
from pinnate.server.protocol.common import Usage
from pinnate.server.protocol.responses import (
    DeltaEvent,
    DoneEvent,
    ErrorEvent,
    Event,
    EventLogprob,
    EventTopLogprob,
    FunctionCall,
    IncompleteDetails,
    InputTokensDetails,
    ItemEvent,
    ItemStatus,
    Message,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    PartEvent,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseError,
    ResponseEvent,
    ResponseUsage,
)
from pinnate.server.responses.items import new_id
from pinnate.server.segments import Begin, More, Segments, Step
from pinnate.text.parsers.events import ChatParser

TextKind = Literal["output_text", "reasoning_text", "function_call_arguments"]


class _Open:
    """The item that grows: its first state, the kind of its text, and the text."""

    def __init__(self, item: OutputItem, kind: TextKind) -> None:
        self.item = item
        self.kind = kind
        self.pieces: list[str] = []
        self.logprobs: list[ChatTokenLogprob] = []

    @property
    def part(self) -> OutputText | ReasoningText | None:
        text = "".join(self.pieces)
        if self.kind == "output_text":
            return OutputText(text=text, logprobs=list(self.logprobs))
        return ReasoningText(text=text) if self.kind == "reasoning_text" else None

    def as_item(self, status: ItemStatus) -> OutputItem:
        if isinstance(self.item, FunctionCall):
            return replace(self.item, status=status, arguments="".join(self.pieces))
        return replace(self.item, status=status, content=[self.part])


class Assembler:
    """One response. `start`, then `push` for each delta, then one of `finish`, `fail`; each returns its events."""

    def __init__(self, base: Response, parser: ChatParser, vocabulary: Vocabulary, *, logprobs: bool) -> None:
        """`base` is the response as it is queued."""
        self.response = base
        self._segments = Segments(parser)
        self._vocabulary = vocabulary
        self._logprobs = logprobs
        self._sequence = 0
        self._items: list[OutputItem] = []
        self._open: _Open | None = None
        self._unclaimed: list[TokenLogprobs] = []  # of tokens whose text has not shown up in an event

    def queue(self) -> list[Event]:
        """For a background response, which may wait."""
        return [self._state("response.created", "queued"), self._state("response.queued", "queued")]

    def start(self) -> list[Event]:
        created = [] if self._sequence else [self._state("response.created", "in_progress")]
        return [*created, self._state("response.in_progress", "in_progress")]

    def push(self, text: str, num_tokens: int = 0, logprobs: Sequence[TokenLogprobs] = ()) -> list[Event]:
        """`logprobs`: of the tokens but one that ends the turn, which belongs to no text."""
        self._unclaimed += logprobs
        return self._take(self._segments.push(text, num_tokens))

    def finish(self, reason: str, usage: Usage) -> list[Event]:
        """`reason` as the engine gives it: stop, length; anything else is no end of an answer."""
        if reason not in ("stop", "length"):
            return self.fail(ErrorObject(f"the request ended early: {reason}", "server_error", None, reason))
        status: Literal["completed", "incomplete"] = "incomplete" if reason == "length" else "completed"
        events = self._take(self._segments.finish(), status, at_end=True)
        if not self._items:
            events += [*self._begin(Begin("text")), *self._end(status)]  # an answer without any text
        if status == "incomplete":
            self._update(status, incomplete_details=IncompleteDetails("max_output_tokens"), usage=self._usage(usage))
        else:
            self._update(status, completed_at=int(time.time()), usage=self._usage(usage))
        return [*events, self._terminal()]

    def fail(self, error: ErrorObject) -> list[Event]:
        """The items so far stay as they are, the last one incomplete."""
        events = [] if self._sequence else self.start()
        self._abandon()
        self._update("failed", error=ResponseError("server_error", error.message))
        return [*events, self._terminal()]

    def cancel(self) -> list[Event]:
        """There is no terminal event for this in the API, so an `error` event says why nothing follows."""
        self._abandon()
        self._update("cancelled")
        self._sequence += 1
        return [
            ErrorEvent(
                sequence_number=self._sequence - 1, code="response_cancelled", message="the response was cancelled"
            )
        ]

    def snapshot(self) -> Response:
        """The response as it is now."""
        growing = [] if self._open is None else [self._open.as_item("in_progress")]
        return replace(self.response, output=[*self._items, *growing])

    # --- items ---

    def _take(self, steps: list[Step], last_status: ItemStatus = "completed", *, at_end: bool = False) -> list[Event]:
        """`last_status` is that of the item which is open after all others, if `steps` end it. `at_end`: no tokens
        follow, so that those without text of their own (a stop string that is not shown) come in an empty delta."""
        events: list[Event] = []
        for number, step in enumerate(steps, start=1):
            if isinstance(step, Begin):
                events += self._begin(step)
            elif isinstance(step, More):
                events.append(self._delta(step.text))
            elif number < len(steps):
                events += self._end("completed")
            else:  # nothing follows this item
                if at_end and self._logprobs and self._unclaimed and self._is_text():
                    events.append(self._delta(""))
                self._claim(events)
                events += self._end(last_status)
        self._claim(events)
        return events

    def _is_text(self) -> bool:
        return self._open is not None and self._open.kind == "output_text"

    def _begin(self, begin: Begin) -> list[Event]:
        self._open = _opened(begin)
        added = ItemEvent(
            type="response.output_item.added",
            sequence_number=self._next(),
            output_index=len(self._items),
            item=self._open.item,
        )
        part = self._open.part
        return [added] if part is None else [added, self._part_event("added", part)]

    def _end(self, status: ItemStatus) -> list[Event]:
        grown = self._open
        assert grown is not None
        part, text = grown.part, "".join(grown.pieces)
        is_call = grown.kind == "function_call_arguments"
        events: list[Event] = [
            DoneEvent(
                type=f"response.{grown.kind}.done",
                sequence_number=self._next(),
                item_id=grown.item.id,
                output_index=len(self._items),
                content_index=UNSET if is_call else 0,
                text=UNSET if is_call else text,
                arguments=text if is_call else UNSET,
                name=grown.item.name if isinstance(grown.item, FunctionCall) else UNSET,
                logprobs=_in_events(grown.logprobs) if grown.kind == "output_text" else UNSET,
            )
        ]
        if part is not None:
            events.append(self._part_event("done", part))
        item = grown.as_item(status)
        done = ItemEvent(
            type="response.output_item.done", sequence_number=self._next(), output_index=len(self._items), item=item
        )
        self._items.append(item)
        self._open = None
        return [*events, done]

    def _abandon(self) -> None:
        if self._open is not None:
            self._items.append(self._open.as_item("incomplete"))
            self._open = None

    # --- events ---

    def _delta(self, text: str) -> DeltaEvent:
        grown = self._open
        assert grown is not None
        grown.pieces.append(text)
        return DeltaEvent(
            type=f"response.{grown.kind}.delta",
            sequence_number=self._next(),
            item_id=grown.item.id,
            output_index=len(self._items),
            content_index=UNSET if grown.kind == "function_call_arguments" else 0,
            delta=text,
            logprobs=[] if grown.kind == "output_text" else UNSET,
        )

    def _part_event(self, what: str, part: OutputText | ReasoningText) -> PartEvent:
        assert self._open is not None
        return PartEvent(
            type=f"response.content_part.{what}",
            sequence_number=self._next(),
            item_id=self._open.item.id,
            output_index=len(self._items),
            part=part,
        )

    def _claim(self, events: list[Event]) -> None:
        """The tokens that came so far belong to the latest text that showed up; tokens of markup belong to nothing."""
        if not events:
            return
        last = next((event for event in reversed(events) if isinstance(event, DeltaEvent)), None)
        grown = self._open
        if self._logprobs and last is not None and grown is not None and grown.kind == "output_text":
            scored = chat_logprobs(self._unclaimed, self._vocabulary.token_bytes).content
            last.logprobs = _in_events(scored)
            grown.logprobs += scored
        self._unclaimed = []

    def _state(self, kind: str, status: Any) -> ResponseEvent:
        self.response = replace(self.response, status=status)
        return ResponseEvent(type=kind, sequence_number=self._next(), response=self.response)

    def _terminal(self) -> ResponseEvent:
        kind = f"response.{self.response.status}"
        return ResponseEvent(type=kind, sequence_number=self._next(), response=self.response)

    def _update(self, status: Any, **changes: Any) -> None:
        self.response = replace(self.response, status=status, output=list(self._items), **changes)

    def _usage(self, usage: Usage) -> ResponseUsage:
        return ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputTokensDetails(self._segments.reasoning_tokens),
            usage.total_tokens,
        )

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence - 1


def _opened(begin: Begin) -> _Open:
    if begin.kind == "text":
        return _Open(Message(id=new_id("msg"), status="in_progress"), "output_text")
    if begin.kind == "reasoning":
        return _Open(ReasoningItem(id=new_id("rs"), status="in_progress"), "reasoning_text")
    call = FunctionCall(id=new_id("fc"), call_id=begin.id, name=begin.name, arguments="", status="in_progress")
    return _Open(call, "function_call_arguments")


def _in_events(scored: list[ChatTokenLogprob]) -> list[EventLogprob]:
    return [
        EventLogprob(
            entry.token, entry.logprob, [EventTopLogprob(top.token, top.logprob) for top in entry.top_logprobs]
        )
        for entry in scored
    ]
