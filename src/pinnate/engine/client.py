"""ProcessClient: the way to an engine in a process of its own (ZeroMQ over ipc, msgpack).

Knows: frames, how a start fails, how a death is noticed. Must not know: what messages mean, NumPy, executors.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
import zmq

from pinnate.core.errors import ConfigError, EngineDeadError, EngineError, ModelError, PinnateError
from pinnate.core.messages import EngineFailed, EngineReady, FromEngine, ToEngine
from pinnate.engine.child import EngineChild
from pinnate.engine.heartbeat_reader import HeartbeatReader

LAST_MESSAGES_SECONDS = 0.2  # what a dead child had sent is still read this long

START_ERRORS: Mapping[str, type[PinnateError]] = MappingProxyType(
    {"ConfigError": ConfigError, "ModelError": ModelError}
)


class EngineClient(Protocol):
    """What AsyncEngine needs of an engine, wherever it runs."""

    async def ready(self) -> dict[str, Any]:
        """Waits until requests can be sent; returns the engine's `info`.

        Raises:
            ModelError, ConfigError: the engine refused to start.
            EngineDeadError: it ended without a word.
        """
        ...

    def send(self, message: ToEngine) -> None:
        """Never blocks. Messages to a dead engine are dropped; `receive` tells."""
        ...

    async def receive(self) -> FromEngine:
        """
        Raises:
            EngineDeadError: the engine has ended, and everything it sent has been received.
        """
        ...

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the engine last showed that it is alive."""
        ...

    async def close(self) -> None: ...


class ProcessClient:
    """Owns the child and the socket to it. Made and used inside one event loop."""

    def __init__(self, child: EngineChild) -> None:
        self._child = child
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 5)  # ms; the child binds when it has started
        self._socket.connect(child.address)
        self._frames: deque[bytes] = deque()  # read, and not asked for yet
        self._reader: asyncio.Future[None] | None = None  # of `receive`, which waits for a frame or the child's end
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._exited = asyncio.wrap_future(child.exited)
        self._exited.add_done_callback(lambda _: self._wake())
        self._heartbeat = HeartbeatReader(child.heartbeat)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def heartbeat_age(self) -> float:
        return self._heartbeat.age

    async def ready(self) -> dict[str, Any]:
        await self._receive_frame()  # the hello: both ends are connected
        self._child.remove_socket()
        message = await self.receive()
        if isinstance(message, EngineFailed):
            raise START_ERRORS.get(message.kind, EngineError)(message.message)
        assert isinstance(message, EngineReady)
        return message.info

    def send(self, message: ToEngine) -> None:
        if not self._socket.closed:
            self._socket.send(self._encoder.encode(message))
            self._read()  # sending may have taken the news of frames that came, which is told once

    async def receive(self) -> FromEngine:
        return self._decoder.decode(await self._receive_frame())

    async def close(self) -> None:
        """Ends the child and waits for it. Nothing is left: no process, socket, file or thread."""
        self._heartbeat.close()
        await asyncio.to_thread(self._child.close)
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
        self._context.destroy(linger=0)

    async def _receive_frame(self) -> bytes:
        while not self._frames and not self._exited.done():
            await self._news()
        if not self._frames:
            await self._last_frames()
        return self._frames.popleft()

    async def _last_frames(self) -> None:
        """What a dead child had sent may still be on its way.

        Raises:
            EngineDeadError: there is nothing.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_MESSAGES_SECONDS):
                while not self._frames:
                    await self._news()
        if not self._frames:
            words = self._child.last_words()
            raise EngineDeadError(self._child.cause_of_death() + (f"; it wrote last: {words}" if words else ""))

    async def _news(self) -> None:
        """Until there are frames, or the child has ended."""
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _read(self) -> None:
        """Takes all frames that are there. ZeroMQ tells once that there are some, and again only when all were taken.

        Without zmq.asyncio: a future for each frame, and another for waiting for it or the child's end, were a fifth of
        this process's time for one stream.
        """
        with contextlib.suppress(zmq.Again):
            while True:
                self._frames.append(self._socket.recv(zmq.NOBLOCK))
        if self._frames:
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
