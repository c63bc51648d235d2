"""The segments of a text to the content blocks and the events of a message: one state machine for plain and streamed
answers.

Knows: the order of this API's events. Must not know: SSE, HTTP, the engine, how text becomes segments. The blocks
depend on the segments' joined texts alone, so a stream and a plain answer have the same ones.
"""

from __future__ import annotations

from msgspec import UNSET
from msgspec.structs import replace

from pinnate.server.anthropic.partial_json import parse_object
from pinnate.server.generation import Job
from pinnate.server.protocol.anthropic import (
    BlockDelta,
    BlockStart,
    BlockStop,
    ContentBlock,
    DeltaUsage,
    Ending,
    Event,
    InputJSONDelta,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputTokensDetails,
    Ping,
    SignatureDelta,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from pinnate.server.protocol.common import Usage
from pinnate.server.segments import Begin, More, Segments, Step


class Assembler:
    """One message: `start`, then `push` for each delta, then `finish`; each returns its events."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._segments = Segments(job.new_parser())
        self._blocks: list[ContentBlock] = []
        self._open: ContentBlock | None = None
        self._pieces: list[str] = []
        self._called = False
        self.message = Message(
            id=job.id,
            model=job.model,
            usage=self._usage(len(job.prompts[0].token_ids), 0, 0),
            warnings=list(job.warnings) or UNSET,
        )

    def start(self, num_cached_tokens: int) -> list[Event]:
        """What is known at the first output: how much of the prompt was cached."""
        num_prompt_tokens = len(self._job.prompts[0].token_ids)
        usage = self._usage(num_prompt_tokens, num_cached_tokens, 0)
        return [MessageStart(replace(self.message, usage=usage)), Ping()]

    def push(self, text: str, num_tokens: int) -> list[Event]:
        return self._take(self._segments.push(text, num_tokens))

    def finish(self, reason: str, matched: str | int | None, usage: Usage) -> list[Event]:
        """`reason` and `matched` (the stop string) as the engine gives them."""
        events = self._take(self._segments.finish())
        ending = self._ending(reason, matched, usage.completion_tokens)
        cached = usage.prompt_tokens_details.cached_tokens
        whole = self._usage(usage.prompt_tokens, cached, usage.completion_tokens)
        self.message = replace(
            self.message,
            content=list(self._blocks),
            stop_reason=ending.stop_reason,
            stop_sequence=ending.stop_sequence,
            usage=whole,
        )
        delta_usage = DeltaUsage(
            input_tokens=whole.input_tokens,
            cache_read_input_tokens=cached,
            output_tokens=whole.output_tokens,
            output_tokens_details=whole.output_tokens_details,
        )
        return [*events, MessageDelta(ending, delta_usage), MessageStop()]

    def _ending(self, reason: str, matched: str | int | None, num_tokens: int) -> Ending:
        stop_reason: StopReason = "end_turn"
        if reason == "length":
            asked = self._job.params.max_tokens  # None where it was more than the context had room for
            stop_reason = "model_context_window_exceeded" if asked is None or num_tokens < asked else "max_tokens"
        elif isinstance(matched, str):
            return Ending("stop_sequence", matched)
        elif self._called:
            stop_reason = "tool_use"
        return Ending(stop_reason, None)

    def _take(self, steps: list[Step]) -> list[Event]:
        events: list[Event] = []
        for step in steps:
            if isinstance(step, Begin):
                events.append(self._begin(step))
            elif isinstance(step, More):
                self._pieces.append(step.text)
                events.append(BlockDelta(len(self._blocks), self._delta(step.text)))
            else:
                events += self._end()
        return events

    def _begin(self, begin: Begin) -> Event:
        if begin.kind == "text":
            self._open = TextBlock(text="")
        elif begin.kind == "reasoning":
            self._open = ThinkingBlock(thinking="")
        else:
            self._open = ToolUseBlock(id=begin.id, name=begin.name)
            self._called = True
        self._pieces = []
        return BlockStart(len(self._blocks), self._open)

    def _delta(self, text: str) -> TextDelta | ThinkingDelta | InputJSONDelta:
        if isinstance(self._open, TextBlock):
            return TextDelta(text)
        return ThinkingDelta(text) if isinstance(self._open, ThinkingBlock) else InputJSONDelta(text)

    def _end(self) -> list[Event]:
        index, text = len(self._blocks), "".join(self._pieces)
        block, events = self._open, list[Event]()
        if isinstance(block, TextBlock):
            self._blocks.append(replace(block, text=text))
        elif isinstance(block, ThinkingBlock):
            # What proves the block's origin elsewhere; here nothing is signed.
            events.append(BlockDelta(index, SignatureDelta("")))
            self._blocks.append(replace(block, thinking=text))
        else:
            assert block is not None
            self._blocks.append(replace(block, input=parse_object(text)))
        self._open = None
        return [*events, BlockStop(index)]

    def _usage(self, num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> MessageUsage:
        return MessageUsage(
            input_tokens=num_prompt_tokens - num_cached_tokens,
            cache_read_input_tokens=num_cached_tokens,
            output_tokens=num_output_tokens,
            output_tokens_details=OutputTokensDetails(thinking_tokens=self._segments.reasoning_tokens),
        )
