"""Events as server-sent events, and the two ways to answer: a stream, or the finished response.

Knows: SSE framing, what a step's outputs are. Must not know: the order of events (`assembler.py`), HTTP.
"""

from __future__ import annotations

import msgspec

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
            events += self._assembler.push(delta.text, len(delta.token_ids), delta.logprobs or ())
            if delta.finish_reason is not None:
                self._reason = str(delta.finish_reason)
        return events

    def last_events(self, usage: Usage) -> list[Event]:
        return self._assembler.finish(self._reason, usage)

    def write(self, outputs: list[Output]) -> bytes:
        return b"".join(encode(self.events(outputs)))

    def end(self, usage: Usage) -> bytes:
        return b"".join(encode(self.last_events(usage)))


def finished(assembler: Assembler, gathered: Gathered, usage: Usage) -> Response:
    """The response that a stream of the same deltas ends with."""
    choice = gathered.choices[0]
    assembler.start()
    for text, num_tokens, logprobs in choice.deltas():
        assembler.push(text, num_tokens, logprobs)
    assembler.finish(choice.finish_reason or "", usage)
    return assembler.response
