"""InprocClient: an EngineCore in the caller's own thread, the request path with no crossing.

Knows: how to feed a core and collect what it sends. Must not know: text, sampling.
"""

from __future__ import annotations

from pinnate.core.config import EngineConfig
from pinnate.core.messages import FromEngine, ToEngine
from pinnate.engine.build import build_engine


class Mailbox:
    """Inbox and outbox of a core that runs in the caller's thread: two lists, no waiting."""

    def __init__(self) -> None:
        self.inbox: list[ToEngine] = []
        self.outbox: list[FromEngine] = []

    def receive(self, wait: bool) -> list[ToEngine]:  # noqa: ARG002 (nobody else could send while this thread waits)
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: FromEngine) -> None:
        self.outbox.append(message)

    def collect(self) -> list[FromEngine]:
        messages, self.outbox = self.outbox, []
        return messages


class InprocClient:
    """Runs the engine one step at a time. `info` is what EngineReady carries across a process boundary.

    Raises:
        ModelError, ConfigError: as `build_engine`.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._mailbox = Mailbox()
        self.core, self.info = build_engine(config, self._mailbox, self._mailbox)

    def send(self, message: ToEngine) -> None:
        """Delivered with the next step."""
        self._mailbox.inbox.append(message)

    def step(self) -> list[FromEngine]:
        self.core.step()
        return self._mailbox.collect()

    def close(self) -> None:
        self.core.close()
