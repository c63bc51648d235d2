"""The engine process before it knows what to do: it starts and imports while its parent still reads its own flags.

Knows: how the process is started. Must not know: what is said to it (child.py). Imports next to nothing, or its parent
would come later to the point of starting it.
"""

from __future__ import annotations

import os
import subprocess
import sys


class Launched:
    """One `python -m pinnate.engine.process`, waiting on its stdin. To be taken by an EngineChild, or abandoned.

    It lives as long as its stdin is open: when this process ends, however it ends, it ends. It is in a process group of
    its own, so that Ctrl-C reaches this process alone.
    """

    def __init__(self) -> None:
        self.heartbeat, self.beats = os.pipe()  # this process's end and its own
        try:
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                [sys.executable, "-P", "-m", "pinnate.engine.process"],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,
                pass_fds=(self.beats,),
                text=False,
            )
        except BaseException:
            os.close(self.heartbeat)
            raise
        finally:
            os.close(self.beats)

    def take(self) -> subprocess.Popen[bytes]:
        """The process, with `heartbeat`, is the caller's from here on.

        Raises:
            RuntimeError: somebody has it already.
        """
        process, self._process = self._process, None
        if process is None:
            raise RuntimeError("this engine process was taken before")
        return process

    def abandon(self) -> None:
        """Ends it, unless somebody took it."""
        if self._process is None:
            return
        with self.take() as process:  # closes its pipes and waits for it
            process.kill()
        os.close(self.heartbeat)
