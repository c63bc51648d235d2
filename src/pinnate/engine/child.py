"""EngineChild: the engine process as its parent sees it: started, watched, ended.

Knows: the process, the folder of its socket, its last words on stderr. Must not know: messages (client.py).
Light to import, so that a program can start the child first and import the rest of itself meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import IO

import msgspec

from pinnate.core.config import EngineConfig
from pinnate.engine.launch import Launched

log = logging.getLogger(__name__)

LENGTH_BYTES = 4
STDERR_LINES = 6
CLOSE_SECONDS = 5.0
MAX_FOLDER_LENGTH = 95  # the path of a Unix socket has at most 107 bytes (103 on macOS)


class Startup(msgspec.Struct, frozen=True):
    """The one frame that the child reads from its stdin (msgpack after its length, big endian)."""

    config: EngineConfig
    address: str
    heartbeat: int = -1  # its end of the pipe, see heartbeat.py


class EngineChild:
    """Owns one engine process (launch.py; `launched`, or a new one) and the private folder of its ipc socket.

    The process reads its Startup from stdin.

    A thread copies the child's stderr to `forward` (default: sys.stderr), keeps the last lines, and then waits for the
    process, so `exited` is complete the moment it dies: its result is the exit code as in subprocess. Where logs are
    JSON, what the child writes past its logging (an abort's last words) becomes a line of this process's log.
    """

    def __init__(
        self,
        config: EngineConfig,
        forward: Callable[[str], object] | None = None,
        launched: Launched | None = None,
    ) -> None:
        self._folder = private_folder()
        self.address = f"ipc://{self._folder}/engine"
        self.exited: Future[int] = Future()
        self._tail: deque[str] = deque(maxlen=STDERR_LINES)
        self._forward = forward or (_to_json_log if config.log_format == "json" else _to_stderr)
        try:
            launched = launched or Launched()
        except BaseException:
            self.remove_socket()
            raise
        self._process, self.heartbeat, beats = launched.take(), launched.heartbeat, launched.beats
        self._send(msgspec.msgpack.encode(Startup(config, self.address, beats)))
        self._watcher = threading.Thread(target=self._watch, name="pinnate-engine-watch", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def cause_of_death(self) -> str:
        """Signal or exit code, in words. Only once `exited` is done."""
        code = self.exited.result()
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"the engine process was killed by {signal.Signals(-code).name}"
        return f"the engine process ended with exit code {code}"

    def last_words(self) -> str:
        """The end of what it wrote to stderr, on one line; complete once `exited` is done."""
        return " | ".join(line for line in self._tail if line)

    def remove_socket(self) -> None:
        """Removes the socket's folder; both ends are connected, or never will be."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Ends the child and waits for it: by closing its stdin, by SIGKILL if that takes too long."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self.exited.result(timeout=CLOSE_SECONDS)
        except TimeoutError:
            self._process.kill()
        self._watcher.join()
        self.remove_socket()
        if self.heartbeat >= 0:
            os.close(self.heartbeat)
            self.heartbeat = -1

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _send(self, frame: bytes) -> None:
        # A child that died at once is noticed by the watcher, which knows why.
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(len(frame).to_bytes(LENGTH_BYTES, "big") + frame)
            self._stdin.flush()

    def _watch(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stderr:
            for line in stderr:
                text = line.decode("utf-8", "replace")
                self._tail.append(text.strip())
                self._forward(text)
        self.exited.set_result(self._process.wait())


def private_folder() -> Path:
    """A new folder of mode 0700 whose path is short enough for a socket in it."""
    folder = Path(tempfile.mkdtemp(prefix="pinnate-"))
    if len(os.fsencode(folder)) > MAX_FOLDER_LENGTH:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="pinnate-", dir="/tmp"))
    return folder


def _to_json_log(text: str) -> None:
    if text.startswith("{"):
        _to_stderr(text)
    elif text.strip():
        log.error("the engine process wrote: %s", text.rstrip())


def _to_stderr(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # closed at interpreter exit
        sys.stderr.write(text)
        sys.stderr.flush()
