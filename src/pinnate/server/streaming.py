"""Streamed answers: outputs to chunks to server-sent events.

Knows: the chunks' shapes, SSE framing. Must not know: sockets, the engine. What all chunks of a stream share (id,
model, ...) is encoded once; each chunk then costs the encoding of its one choice. All chunks of a step are one write.

A stream that ends well ends with one `data: [DONE]`; one that fails ends with one `data: {"error": ...}` and nothing
after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec import UNSET

from pinnate.core.batch import TokenLogprobs
from pinnate.core.messages import CacheReport
from pinnate.server.cache_report import Vocabulary, show_report
from pinnate.server.chat_events import ChoiceEvents
from pinnate.server.errors import ErrorObject, error_bytes
from pinnate.server.generation import Job, Output
from pinnate.server.logprobs import LogprobsWriter, joined
from pinnate.server.protocol.chat import ChatChunk, ChatChunkChoice, Delta, FunctionCall, ToolCallChunk
from pinnate.server.protocol.common import Usage
from pinnate.server.protocol.completions import Completion, CompletionChoice
from pinnate.server.replies import logprobs_writer, shown_logprobs, shown_prompt_logprobs
from pinnate.server.stopwatch import Stopwatch
from pinnate.server.usage import UsageCounter
from pinnate.text.parsers.events import ChatEvent, ContentDelta, ReasoningDelta, ToolCallDelta, ToolCallStart

if TYPE_CHECKING:
    from pinnate.engine.output_processor import OutputDelta

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients skip
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]

_encode = msgspec.json.encode


def event(data: bytes) -> bytes:
    """One server-sent event. JSON has no raw line ends, so one data line is enough."""
    return b"data: " + data + b"\n\n"


def named_event(name: str, data: bytes) -> bytes:
    """A server-sent event with a name, as the Responses API and Anthropic's have them."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def error_event(error: ErrorObject) -> bytes:
    return event(error_bytes(error))


def stream_headers(request_id: str) -> list[tuple[bytes, bytes]]:
    return [*_HEADERS, (b"x-request-id", request_id.encode())]


class ChunkWriter(Protocol):
    """Turns what a job's choices got into the bytes of a stream."""

    def write(self, outputs: list[Output]) -> bytes:
        """The events of one step; empty where there is nothing to show yet."""
        ...

    def end(self, usage: Usage) -> bytes:
        """The last events: usage if asked for, and [DONE]."""
        ...


def report_event(
    chunk: ChatChunk | Completion, job: Job, number: int, report: CacheReport, vocabulary: Vocabulary
) -> bytes:
    """A chunk without choices, before the first of its prompt."""
    shown = show_report(report, job.prompts[number].token_ids, vocabulary)
    return event(_encode(msgspec.structs.replace(chunk, cache_report=[shown])))


def last_events(chunk: ChatChunk | Completion, job: Job, usage: Usage, stopwatch: Stopwatch | None) -> bytes:
    """One chunk without choices for the usage and the timings, where asked for; then [DONE]."""
    members: dict[str, Any] = {}
    if job.include_usage:
        members["usage"] = usage
    if stopwatch is not None:
        members["timings"] = stopwatch.timings()
    return (event(_encode(msgspec.structs.replace(chunk, **members))) if members else b"") + DONE


class _Frame:
    """The part of each chunk around its one choice. The stream's first chunk carries the warnings too."""

    def __init__(self, job: Job, template: Any) -> None:
        self._chunk = template
        self._warnings = list(job.warnings)
        before, _, after = _encode(template).partition(b'"choices":[]')
        self._before = b"data: " + before + b'"choices":['
        self._after = b"]" + after + b"\n\n"
        self._n = job.params.n
        self._counter = UsageCounter(job) if job.continuous_usage else None

    def count(self, number: int, delta: OutputDelta) -> None:
        """What the chunks to come are the last of."""
        if self._counter is not None:
            self._counter.add(number, delta)

    def wrap(self, choice: Any, **members: Any) -> bytes:
        """`members` of this chunk alone."""
        if self._warnings:
            members["warnings"], self._warnings = self._warnings, []
        if self._counter is not None:
            members["usage"] = self._counter.usage()
        if members:
            return event(_encode(msgspec.structs.replace(self._chunk, choices=[choice], **members)))
        return self._before + _encode(choice) + self._after

    def index(self, number: int, choice: int) -> int:
        return number * self._n + choice


class ChatChunkWriter:
    """chat.completion.chunk: the role in a choice's first chunk alone, its finish_reason in an empty last one."""

    def __init__(self, job: Job, vocabulary: Vocabulary) -> None:
        self._job = job
        self._vocabulary = vocabulary
        self._chunk = ChatChunk(
            id=job.id,
            created=job.created,
            model=job.model,
            system_fingerprint=job.fingerprint,
            choices=[],
            usage=None if job.include_usage else UNSET,  # null on all chunks but the last, as OpenAI sends it
        )
        self._frame = _Frame(job, self._chunk)
        self._choices: dict[int, ChoiceEvents] = {}
        self._stopwatch = Stopwatch(job) if job.return_timings else None

    def write(self, outputs: list[Output]) -> bytes:
        parts: list[bytes] = []
        if self._stopwatch is not None:
            self._stopwatch.add(outputs)
        for number, delta in outputs:
            if delta.cache_report is not None:
                parts.append(report_event(self._chunk, self._job, number, delta.cache_report, self._vocabulary))
            index = self._frame.index(number, delta.index)
            if index not in self._choices:
                self._choices[index] = ChoiceEvents(self._job.new_parser())
                parts.append(self._first(index, delta.prompt_logprobs))
            self._frame.count(number, delta)
            choice = self._choices[index]
            events = choice.push(delta.text, is_last=delta.finish_reason is not None)
            parts += map(self._frame.wrap, self._chunks(index, events, delta))
            if delta.finish_reason is not None:
                last = ChatChunkChoice(
                    index=index,
                    delta=Delta(),
                    finish_reason=choice.finish_reason(str(delta.finish_reason)),
                    stop_reason=delta.stop_reason,
                )
                parts.append(self._frame.wrap(last))
        return b"".join(parts)

    def end(self, usage: Usage) -> bytes:
        return last_events(self._chunk, self._job, usage, self._stopwatch)

    def _first(self, index: int, scores: list[TokenLogprobs | None] | None) -> bytes:
        """The role, what is known of the prompt, and the message that is continued if it is to be echoed."""
        job, members = self._job, dict[str, Any]()
        if job.return_token_ids and len(self._choices) == 1:  # once: all choices have the same prompt
            members["prompt_token_ids"] = job.prompts[0].token_ids
        if scores is not None:
            members["prompt_logprobs"] = shown_prompt_logprobs(job, scores, self._vocabulary)
        first = self._frame.wrap(ChatChunkChoice(index=index, delta=Delta(role="assistant", content="")), **members)
        if not (job.echo and job.prompts[0].text):
            return first
        return first + self._frame.wrap(ChatChunkChoice(index=index, delta=Delta(content=job.prompts[0].text)))

    def _chunks(self, index: int, events: list[ChatEvent], delta: OutputDelta) -> list[ChatChunkChoice]:
        """One chunk for each event. Log-probabilities and ids come with the first, or alone while the text they are of
        is held back."""
        chunks = [ChatChunkChoice(index=index, delta=show_event(event)) for event in events]
        token_ids = delta.token_ids if self._job.return_token_ids else []
        if delta.logprobs or token_ids:
            chunks = chunks or [ChatChunkChoice(index=index, delta=Delta(content=""))]
            if delta.logprobs:
                chunks[0].logprobs = shown_logprobs(self._job, delta.logprobs, self._vocabulary)
            if token_ids:
                chunks[0].token_ids = token_ids
        return chunks


def show_event(event: ChatEvent) -> Delta:
    match event:
        case ContentDelta():
            return Delta(content=event.text)
        case ReasoningDelta():
            return Delta(reasoning=event.text, reasoning_content=event.text)
        case ToolCallStart():
            function = FunctionCall(name=event.name)
            return Delta(tool_calls=[ToolCallChunk(index=event.index, id=event.id, type="function", function=function)])
        case ToolCallDelta():
            return Delta(
                tool_calls=[ToolCallChunk(index=event.index, function=FunctionCall(arguments=event.arguments))]
            )


class CompletionChunkWriter:
    """text_completion chunks. An echoed prompt, with its logprobs, comes in the first chunk of each of its choices."""

    def __init__(self, job: Job, vocabulary: Vocabulary) -> None:
        self._job = job
        self._vocabulary = vocabulary
        self._chunk = Completion(
            id=job.id,
            created=job.created,
            model=job.model,
            system_fingerprint=job.fingerprint,
            choices=[],
            usage=None if job.include_usage else UNSET,
        )
        self._frame = _Frame(job, self._chunk)
        self._started: set[int] = set()
        self._stopwatch = Stopwatch(job) if job.return_timings else None
        self._logprobs: dict[int, LogprobsWriter] = {}
        self._prompt_scores: dict[int, list[TokenLogprobs | None]] = {}

    def write(self, outputs: list[Output]) -> bytes:
        parts: list[bytes] = []
        if self._stopwatch is not None:
            self._stopwatch.add(outputs)
        for number, delta in outputs:
            if delta.cache_report is not None:
                parts.append(report_event(self._chunk, self._job, number, delta.cache_report, self._vocabulary))
            if delta.prompt_logprobs is not None:
                self._prompt_scores[number] = delta.prompt_logprobs
            self._frame.count(number, delta)
            index = self._frame.index(number, delta.index)
            first = index not in self._started
            self._started.add(index)
            choice = CompletionChoice(
                index=index,
                text=delta.text,
                finish_reason=None if delta.finish_reason is None else str(delta.finish_reason),
                stop_reason=delta.stop_reason,
                token_ids=delta.token_ids if self._job.return_token_ids else UNSET,
            )
            self._add_prompt_and_logprobs(choice, number, first, delta.token_ids, delta.logprobs or [])
            if first or choice.text or choice.logprobs or choice.finish_reason or choice.token_ids:
                parts.append(self._frame.wrap(choice))
        return b"".join(parts)

    def end(self, usage: Usage) -> bytes:
        return last_events(self._chunk, self._job, usage, self._stopwatch)

    def _add_prompt_and_logprobs(
        self, choice: CompletionChoice, number: int, first: bool, token_ids: list[int], logprobs: list[TokenLogprobs]
    ) -> None:
        prompt = self._job.prompts[number]
        echoed = first and self._job.echo
        if echoed:
            choice.text = prompt.text + choice.text
        if first and self._job.return_token_ids:
            choice.prompt_token_ids = prompt.token_ids
        if first and self._job.prompt_logprobs:
            choice.prompt_logprobs = shown_prompt_logprobs(self._job, self._prompt_scores[number], self._vocabulary)
        if self._job.params.logprobs is None:
            return
        if choice.index not in self._logprobs:
            self._logprobs[choice.index] = logprobs_writer(self._job, self._vocabulary)
        writer = self._logprobs[choice.index]
        if echoed:
            choice.logprobs = writer.write_echo(self._prompt_scores[number], prompt.token_ids, prompt.text)
        if logprobs:
            choice.logprobs = joined(choice.logprobs, writer.write(logprobs, token_ids))
