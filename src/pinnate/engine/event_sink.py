"""EventSink: whom the loop tells, step by step, that the prefix cache may have changed; NoEvents: nobody.

Must not know: events. The one that publishes them is `kv_event_publisher.KVEventPublisher`.
"""

from __future__ import annotations

from typing import Protocol


class EventSink(Protocol):
    def publish(self) -> None:
        """Hands on what changed since the last call. Must be quick: the step waits for it."""
        ...

    def close(self) -> None: ...


class NoEvents:
    """Implements EventSink."""

    def publish(self) -> None:
        pass

    def close(self) -> None:
        pass
