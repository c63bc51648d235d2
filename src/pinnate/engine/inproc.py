"""InprocClient: an EngineCore in the caller's own thread, the request path with no crossing.

Knows: how to feed a core and collect what it sends. Must not know: text, sampling.
"""

from __future__ import annotations

from pinnate.core.config import EngineConfig
from pinnate.core.messages import FromEngine, ToEngine
from pinnate.engine.build import build_engine
from pinnate.engine.mailbox import Mailbox


class InprocClient:
    """Runs the engine one step at a time. `info` is what EngineReady carries across a process boundary.

    Raises:
        ModelError, ConfigError: as `build_engine`.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._mailbox = Mailbox()
        self.core, self.info = build_engine(config, self._mailbox)

    def send(self, message: ToEngine) -> None:
        """Delivered with the next step."""
        self._mailbox.inbox.append(message)

    def step(self) -> list[FromEngine]:
        self.core.step()
        return self._mailbox.collect()

    def close(self) -> None:
        self.core.close()
