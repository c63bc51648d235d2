"""The engine process: `python -m pinnate.engine.process`. Started by EngineChild, never by hand.

Knows: its stdin (Startup, then silence until the parent is gone), its socket, how a failure to start is told. Must not
know: HTTP, text.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # nothing that an import makes is garbage; main() enables it

import faulthandler
import logging
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from time import perf_counter
from typing import BinaryIO

import msgspec
import zmq

from pinnate.core.errors import PinnateError
from pinnate.core.logs import setup_logging
from pinnate.core.messages import EngineFailed, EngineReady, FromEngine, ToEngine
from pinnate.engine.build import build_engine
from pinnate.engine.child import LENGTH_BYTES, Startup
from pinnate.engine.heartbeat import Heart

log = logging.getLogger("pinnate.engine.process")  # not __name__: this module is __main__

HELLO = b""  # first frame: this end is connected
LAST_WORDS_MS = 2000
REMOVALS = 10


class Channel:
    """The core's port over one ZeroMQ PAIR socket; no limit on what waits in it (the facade limits requests)."""

    def __init__(self, address: str, heart: Heart) -> None:
        self._heart = heart
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, LAST_WORDS_MS)
        self._socket.bind(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._socket.send(HELLO)

    def receive(self, wait: bool) -> list[ToEngine]:
        if wait:
            self._heart.rest()
        messages = [self._decoder.decode(self._socket.recv())] if wait else []
        self._heart.work()
        while self._socket.poll(0):
            messages.append(self._decoder.decode(self._socket.recv()))
        return messages

    def send(self, message: FromEngine) -> None:
        self._socket.send(self._encoder.encode(message))

    def close(self) -> None:
        """Waits until what was sent has left, at most LAST_WORDS_MS."""
        self._socket.close()
        self._context.term()


def read_startup(stream: BinaryIO) -> Startup:
    """
    Raises:
        EOFError: the parent went away before it had said anything.
    """
    size = int.from_bytes(_read_exactly(stream, LENGTH_BYTES), "big")
    return msgspec.msgpack.decode(_read_exactly(stream, size), type=Startup)


def _read_exactly(stream: BinaryIO, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = stream.read(count - len(data))
        if not part:
            raise EOFError("stdin ended before the start-up frame; this program is started by pinnate itself")
        data += part
    return data


def end_with_parent(stream: BinaryIO, address: str) -> None:
    """Starts a thread that ends this process when the parent's end of stdin closes: it is done with us, or dead."""

    def watch() -> None:
        while stream.read(4096):
            pass
        folder = Path(address.removeprefix("ipc://")).parent
        for _ in range(REMOVALS):  # the main thread, still starting, may put its socket there meanwhile
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
        os._exit(0)  # whatever the main thread is in the middle of, nobody will read it

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def run(startup: Startup) -> int:
    began = perf_counter()
    heart = Heart()
    heart.start(startup.heartbeat)
    try:
        channel = Channel(startup.address, heart)
    except zmq.ZMQError:
        if Path(startup.address.removeprefix("ipc://")).parent.exists():
            raise
        return 1  # the parent ended while this process started, and its folder went with it
    try:
        core, info = build_engine(startup.config, channel)
    except PinnateError as error:
        channel.send(EngineFailed(type(error).__name__, str(error)))
        channel.close()
        return 1
    info["pid"] = os.getpid()
    info["startup"]["total in the engine process"] = perf_counter() - began
    gc.freeze()  # what is here now stays: no collection need look at it
    gc.enable()
    log.debug("ready after %.2f s: %s", perf_counter() - began, startup.config.model)
    channel.send(EngineReady(info))
    while True:
        core.step()


def main() -> int:
    # The parent ends this process by closing its stdin, once it has drained; a signal to all processes of a service
    # (Ctrl-C in a terminal, a service manager's SIGTERM) must not come before that.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    # Unbuffered: a buffered reader would hold its lock inside the watching thread while the interpreter ends.
    stream = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)  # noqa: SIM115
    try:
        startup = read_startup(stream)
    except EOFError as error:
        setup_logging("info", process="engine")
        log.error("%s", error)
        return 1
    setup_logging(startup.config.log_level, startup.config.log_format, "engine")
    end_with_parent(stream, startup.address)
    return run(startup)


if __name__ == "__main__":
    sys.exit(main())
