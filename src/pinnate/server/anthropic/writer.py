"""Events as server-sent events, and the two ways to answer: a stream, or the finished message.

Knows: SSE framing, what a step's outputs are. Must not know: the order of events (`assembler.py`), HTTP. A stream that
fails ends with an `error` event.
"""

from __future__ import annotations

import msgspec

from pinnate.server.anthropic.assembler import Assembler
from pinnate.server.cache_report import Vocabulary
from pinnate.server.errors import ErrorObject, anthropic_error_bytes
from pinnate.server.generation import Job, Output
from pinnate.server.protocol.anthropic import Event, Message
from pinnate.server.protocol.common import Usage
from pinnate.server.replies import Gathered
from pinnate.server.streaming import named_event


class MessageWriter:
    """The stream of one message."""

    def __init__(self, job: Job, vocabulary: Vocabulary) -> None:  # noqa: ARG002
        self._assembler = Assembler(job)
        self._started = False
        self._ending: tuple[str, str | int | None] = ("", None)

    def write(self, outputs: list[Output]) -> bytes:
        events: list[Event] = []
        for _, delta in outputs:
            if not self._started:
                self._started = True
                events += self._assembler.start(delta.num_cached_tokens)
            events += self._assembler.push(delta.text, len(delta.token_ids))
            if delta.finish_reason is not None:
                self._ending = str(delta.finish_reason), delta.stop_reason
        return _encode(events)

    def end(self, usage: Usage) -> bytes:
        return _encode(self._assembler.finish(*self._ending, usage))


def message(job: Job, gathered: Gathered, usage: Usage, vocabulary: Vocabulary) -> Message:  # noqa: ARG001
    """The message that a stream of the same deltas shows."""
    assembler, choice = Assembler(job), gathered.choices[0]
    for text, num_tokens, _ in choice.deltas():
        assembler.push(text, num_tokens)
    assembler.finish(choice.finish_reason or "", choice.stop_reason, usage)
    return assembler.message


def fail(error: ErrorObject) -> bytes:
    return named_event("error", anthropic_error_bytes(error))


def _encode(events: list[Event]) -> bytes:
    return b"".join(named_event(_name(event), msgspec.json.encode(event)) for event in events)


def _name(event: Event) -> str:
    return str(event.__struct_config__.tag)
