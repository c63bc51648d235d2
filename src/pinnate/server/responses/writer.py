"""Events as server-sent events, and the two ways to answer: a stream, or the finished response.

Knows: SSE framing, what a step's outputs are. Must not know: the order of events (`assembler.py`), HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pinnate.core.batch import TokenLogprobs
from pinnate.server.generation import Output
from pinnate.server.protocol.common import Usage
from pinnate.server.protocol.responses import Event, Response
from pinnate.server.replies import Gathered
from pinnate.server.responses.assembler import Assembler
from pinnate.server.streaming import named_event


def encode(events: list[Event]) -> list[bytes]:
    return [named_event(event.type, msgspec.json.encode(event)) for event in events]


class ResponseWriter:
    """The stream of one response. A failed one ends with `response.failed`, never in silence; there is no [DONE]."""

    def __init__(self, assembler: Assembler) -> None:
        self._assembler = assembler
        self._started = False
        self._reason = ""

    def events(self, outputs: list[Output]) -> list[Event]:
        events = [] if self._started else self._assembler.start()
        self._started = True
        for _, delta in outputs:
            scored = _of_text(delta.logprobs or (), delta.finish_reason, delta.stop_reason)
            events += self._assembler.push(delta.text, len(delta.token_ids), scored)
            if delta.finish_reason is not None:
                self._reason = str(delta.finish_reason)
        return events

    def last_events(self, usage: Usage) -> list[Event]:
        return self._assembler.finish(self._reason, usage)

    def write(self, outputs: list[Output]) -> bytes:
        return b"".join(encode(self.events(outputs)))

    def end(self, usage: Usage) -> bytes:
        return b"".join(encode(self.last_events(usage)))


def _of_text(
    logprobs: Sequence[TokenLogprobs], finish_reason: str | None, stop_reason: str | int | None
) -> Sequence[TokenLogprobs]:
    """Without that of a token which ended the turn."""
    ends_by_token = finish_reason == "stop" and not isinstance(stop_reason, str)
    return logprobs[:-1] if ends_by_token else logprobs


def finished(assembler: Assembler, gathered: Gathered, usage: Usage) -> Response:
    """The response that a stream of the same deltas ends with."""
    choice = gathered.choices[0]
    assembler.start()
    deltas = list(choice.deltas())
    for number, (text, num_tokens, logprobs) in enumerate(deltas, start=1):
        reason = choice.finish_reason if number == len(deltas) else None
        assembler.push(text, num_tokens, _of_text(logprobs, reason, choice.stop_reason))
    assembler.finish(choice.finish_reason or "", usage)
    return assembler.response
