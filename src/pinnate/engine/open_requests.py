"""OpenRequests: the unfinished requests of an AsyncEngine, and where their outputs go.

Knows: which stream an output is for, when a request has ended. Must not know: how messages travel.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import NamedTuple

from pinnate.core.errors import EngineError, PinnateError
from pinnate.core.logs import log_fault
from pinnate.core.messages import Abort, TokenOutput
from pinnate.core.request import Request
from pinnate.engine.output_processor import OutputProcessor
from pinnate.engine.queue_gate import Place, QueueGate
from pinnate.engine.stream import Channel

log = logging.getLogger(__name__)


class _Open(NamedTuple):
    processor: OutputProcessor
    channel: Channel
    place: Place


class OpenRequests:
    """Keyed by the id on the wire, which is never used twice: late outputs of an aborted request find nobody.

    `gate` knows of each from `add` to its end.
    """

    def __init__(self) -> None:
        self.gate = QueueGate()
        self._open: dict[str, _Open] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def add(self, processor: OutputProcessor, request: Request) -> tuple[Channel, Place]:
        """Where its outputs will come, and its place in the queue, which is none for background work."""
        taken = (0, 0) if request.is_background else (processor.num_sequences, len(request.prompt_token_ids))
        channel, place = Channel(), Place(*taken)
        self._open[processor.request_id] = _Open(processor, channel, place)
        self.gate.enter(place)
        self._empty.clear()
        return channel, place

    def start(self, wire_ids: Iterable[str]) -> None:
        """These have been computed for the first time."""
        for wire_id in wire_ids:
            entry = self._open.get(wire_id)
            if entry is not None:
                self.gate.start(entry.place)

    def deliver(self, outputs: Iterable[TokenOutput]) -> list[Abort]:
        """Hands out one step's outputs. Returns what the engine must be told: choices that stopped at a stop string."""
        return [abort for output in outputs if (abort := self._deliver(output)) is not None]

    def end(self, wire_id: str, error: PinnateError | None = None) -> bool:
        """Forgets a request; its consumer sees the end, or the error. False if it was not open."""
        entry = self._open.pop(wire_id, None)
        if entry is None:
            return False
        entry.channel.end(error)
        self.gate.leave(entry.place)
        if not self._open:
            self._empty.set()
        return True

    def end_all(self, error: PinnateError) -> int:
        """Ends every open request with `error`; returns how many there were."""
        wire_ids = list(self._open)
        for wire_id in wire_ids:
            self.end(wire_id, error)
        return len(wire_ids)

    async def wait_until_empty(self) -> None:
        await self._empty.wait()

    def _deliver(self, output: TokenOutput) -> Abort | None:
        entry = self._open.get(output.request_id)
        if entry is None:
            return None
        try:
            delta, stopped_here = entry.processor.push(output)
        except EngineError as error:
            self.end(output.request_id, error)
            return Abort([output.request_id])
        except Exception as error:  # a bug of ours must end this request alone
            log_fault(log, f"output of request {output.request_id}", error)
            self.end(output.request_id, EngineError(f"{type(error).__name__} while the output was made into text"))
            return Abort([output.request_id])
        if delta is not None:
            entry.channel.put(delta)
        if entry.processor.is_finished:
            self.end(output.request_id)
        return Abort([output.request_id], output.index) if stopped_here else None
