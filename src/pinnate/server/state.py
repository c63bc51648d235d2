"""ServerState: what all routes share.

Knows: the engine, the phase of the server's life, the requests under way. Must not know: HTTP shapes. `lifecycle.py`
alone changes `engine`, `phase` and `stopping`; handlers read them.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pinnate.core.errors import EngineDeadError
from pinnate.server.body import FieldNotes
from pinnate.server.errors import NotReadyError
from pinnate.server.fingerprint import fingerprint
from pinnate.server.metrics import Metrics
from pinnate.server.metrics_compat import more_bounds
from pinnate.server.running import RunningJobs
from pinnate.server.settings import ServerSettings, model_names

if TYPE_CHECKING:
    from pinnate.engine.async_engine import AsyncEngine
    from pinnate.server.batches.batches import Batches
    from pinnate.server.chat_formats import ChatFormats
    from pinnate.server.responses.store import Store
    from pinnate.text.chat_template import ChatTemplate

HEARTBEAT_SECONDS = 4.0  # eight beats (engine/heartbeat.py)


class Phase(enum.StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    SHUTTING_DOWN = "shutting_down"


class ServerState:
    """`ongoing` holds the task of each request under way; `chat_template` replaces the model's own if set."""

    def __init__(self, model: str, settings: ServerSettings) -> None:
        self.settings = settings
        self.model_path = model
        self.model_names = model_names(model, settings.served_model_name)
        self.created = int(time.time())
        self.phase = Phase.STARTING
        self.stopping = False  # requests under way are being ended by the server
        self.engine: AsyncEngine | None = None
        self.chat_template: ChatTemplate | None = None
        self.metrics = Metrics(more_bounds(settings.metrics_compat))
        self.closers: list[Callable[[], None]] = []  # called at the end of the server's life, in a thread
        self.batches: Batches | None = None  # with --data-dir
        self.responses: Store | None = None  # likewise; without it they are kept in memory
        self.chat_formats: ChatFormats | None = None  # chosen when first needed
        self.longest_token: int | None = None  # bytes; found when first needed
        self._fingerprint: tuple[dict[str, Any], str] | None = None  # of the engine with this info
        self.running = RunningJobs()
        self.ongoing: set[asyncio.Task[None]] = set()

    def ready_engine(self) -> AsyncEngine:
        """
        Raises:
            NotReadyError: the server starts or shuts down.
            EngineDeadError: the engine's process ended; a restart may be under way.
        """
        if self.phase is Phase.SHUTTING_DOWN:
            raise shutting_down()
        if self.engine is None:
            raise NotReadyError("the server is starting, the model is not loaded yet", code=str(Phase.STARTING))
        if self.engine.state != "ready":
            raise EngineDeadError(f"the engine is not running (state: {self.engine.state})")
        return self.engine

    def live_engine(self) -> AsyncEngine:
        """For health checks: as `ready_engine`, and the engine has shown lately that it is alive.

        Raises:
            NotReadyError, EngineDeadError: as `ready_engine`, or the engine's process is stuck.
        """
        engine = self.ready_engine()
        if engine.heartbeat_age > HEARTBEAT_SECONDS:
            raise EngineDeadError(f"the engine has shown no sign of life for {engine.heartbeat_age:.0f} s")
        return engine

    def fingerprint(self) -> str:
        """`system_fingerprint` of answers (fingerprint.py)."""
        info = {} if self.engine is None else self.engine.info
        if self._fingerprint is None or self._fingerprint[0] is not info:
            self._fingerprint = info, fingerprint(self.model_path, info)
        return self._fingerprint[1]

    def field_notes(self) -> FieldNotes:
        """For the unknown fields of one request."""
        return FieldNotes(strict=self.settings.strict)

    def stop_requests(self) -> None:
        """Ends every request under way with an error that says so."""
        self.stopping = True
        for task in self.ongoing:
            task.cancel()


def shutting_down() -> NotReadyError:
    return NotReadyError("the server is shutting down", code=str(Phase.SHUTTING_DOWN))
