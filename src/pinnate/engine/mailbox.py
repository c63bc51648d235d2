"""Port: where an EngineCore's messages come from and go to. Mailbox: the port where core and caller share one thread.

Knows: two lists. Must not know: what a message means. The port of an engine process is `process.Channel`.
"""

from __future__ import annotations

from typing import Protocol

from pinnate.core.messages import FromEngine, ToEngine


class Port(Protocol):
    def receive(self, wait: bool) -> list[ToEngine]:
        """All messages that have arrived; with `wait`, sleeps until there is at least one."""
        ...

    def send(self, message: FromEngine) -> None:
        """Never blocks."""
        ...


class Mailbox:
    """The caller fills `inbox` and empties the outbox by `collect`, between steps."""

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
