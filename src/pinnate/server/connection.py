"""Connection: uvicorn's HTTP/1.1 protocol, and the limits that it has no setting for.

Knows: bytes, heads and bodies, timers. Must not know: routes, requests' meaning. uvicorn bounds neither the size of a
head, nor the time a client takes to send a head or a body or to read an answer: each is a way to hold memory, an open
file and, for an answer, a running request. Everything refused here gets the error object of all other errors, or, in
the middle of an answer, the end of the connection; the application then sees that its client has left.

A subclass since `uvicorn.Config(http=...)` takes one: the parser calls its methods.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from pinnate.server.errors import ErrorObject, error_response
from pinnate.server.limits import SPOOLED_PATHS, ServerLimits

WRITE_PROGRESS = 16 * 2**10  # bytes that a client must read in `write_timeout` while more than its buffer waits

_logger = logging.getLogger("pinnate.server")


@dataclass(slots=True)
class Arriving:
    """What all connections hold together of bodies that are not complete."""

    num_bytes: int = 0


class Connection(HttpToolsProtocol):
    """One client's connection. `max_connections` counts this server's, `arriving` is shared by all of them."""

    def __init__(self, limits: ServerLimits, max_connections: int, arriving: Arriving, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._limits = limits
        self._arriving = arriving
        self._body_bytes = 0
        self._max_connections = max_connections
        self._reading: asyncio.TimerHandle | None = None  # runs while a head or a body is on its way
        self._writing: asyncio.TimerHandle | None = None  # runs while the client does not read
        self._unread = 0  # bytes that waited for the client when `_writing` was set
        self._in_head = True
        self._head_bytes = 0

    # ------------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            self._refuse(
                503, f"{self._max_connections} connections are open, no more are taken", "too_many_connections"
            )
            return
        self._expect(self._limits.head_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading()
        self._forget_body()
        if self._writing is not None:
            self._writing.cancel()
        super().connection_lost(exc)

    # ------------------------------------------------------------------ what the client sends

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._reading is None and self.timeout_keep_alive_task is None and not self._is_answering():
            self._expect(self._limits.head_timeout)  # blank lines before a request have stopped uvicorn's own timer
        if self._body_bytes and self._arriving.num_bytes > self._limits.max_arriving_bytes:
            most = self._limits.max_arriving_bytes
            self._refuse(503, f"bodies of more than {most} bytes are arriving at the same time", "too_many_bodies")
        elif self._in_head and self._head_bytes > self._limits.max_head_bytes and not self.transport.is_closing():
            self._refuse(431, f"the headers are larger than {self._limits.max_head_bytes} bytes", "headers_too_large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        if self._reading is None:
            self._expect(self._limits.head_timeout)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._expect(self._limits.body_timeout)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._expect(self._limits.body_timeout)
        if self._is_answering() and self.scope["path"] not in SPOOLED_PATHS:  # after its answer it is dropped
            self._body_bytes += len(body)
            self._arriving.num_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_reading()
        self._forget_body()
        self._head_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg.rstrip("."), "invalid_http")

    def _forget_body(self) -> None:
        self._arriving.num_bytes -= self._body_bytes
        self._body_bytes = 0

    def _expect(self, seconds: float) -> None:
        self._stop_reading()
        self._reading = self.loop.call_later(seconds, self._on_silence, seconds)

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _on_silence(self, seconds: float) -> None:
        if self._in_head and self._is_answering():  # the next request's head, which is not read before this answer ends
            self._expect(seconds)
            return
        if not self._head_bytes:  # nothing was ever said: no request to answer
            self.transport.close()
            return
        part = "headers" if self._in_head else "body"
        self._refuse(408, f"the rest of the {part} did not come in {seconds:g} s", "request_incomplete")

    # ------------------------------------------------------------------ what the client reads

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        if self._writing is not None and not self.transport.is_closing():
            self._writing.cancel()
            self._writing = None
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        if self._writing is None and self.transport.get_write_buffer_size():
            self._watch_writing()

    def _watch_writing(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._writing = self.loop.call_later(self._limits.write_timeout, self._on_unread)

    def _on_unread(self) -> None:
        unread = self.transport.get_write_buffer_size()
        if not unread:
            self._writing = None
        elif unread <= self._unread - WRITE_PROGRESS:
            self._watch_writing()
        else:
            _logger.warning("a client left %d bytes unread for %g s, it is cut off", unread, self._limits.write_timeout)
            self.transport.abort()

    # ------------------------------------------------------------------ refusals

    def refuse_unread(self) -> None:
        """The server ends: a request whose body is still on its way is not waited for."""
        if self._is_answering() and self.cycle.more_body:
            self._refuse(503, "the server is shutting down", "shutting_down")

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Closes the connection; with an answer, unless another one is under way or has been given."""
        self._stop_reading()
        _logger.info("a connection is ended: %s", message)
        unanswered = not self._is_answering() if self._in_head else not self.cycle.response_started
        if unanswered:
            kind = "service_unavailable_error" if status == 503 else "invalid_request_error"
            answer = error_response(status, ErrorObject(message, kind, None, code), {"Connection": "close"})
            lines = [STATUS_LINE[status], *(name + b": " + value + b"\r\n" for name, value in answer.raw_headers)]
            self.transport.write(b"".join(lines) + b"\r\n" + bytes(answer.body))
        self.transport.close()


def connection_factory(limits: ServerLimits, max_connections: int) -> Callable[..., Connection]:
    """What uvicorn calls for each connection."""

    arriving = Arriving()

    def make(**uvicorn: Any) -> Connection:
        return Connection(limits, max_connections, arriving, **uvicorn)

    return make
