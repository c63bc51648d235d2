"""RunningJobs: what is being generated now, for the operator who ends it.

Knows: jobs' names and streams. Must not know: HTTP, shapes of answers.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pinnate.engine.stream import RequestStream
    from pinnate.server.generation import Job


class RunningJobs:
    """Each of a job's prompts by the job's id and by its own. Names need not be unique: all that bear one are ended."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._running: dict[int, list[tuple[frozenset[str], RequestStream]]] = {}

    def add(self, job: Job, streams: list[RequestStream]) -> int:
        """Returns what `remove` takes."""
        number = next(self._numbers)
        names = [frozenset((job.id, job.id.partition("-")[2], prompt.request_id)) - {""} for prompt in job.prompts]
        self._running[number] = list(zip(names, streams, strict=True))
        return number

    def remove(self, number: int) -> None:
        del self._running[number]

    def abort(self, name: str | None) -> int:
        """Ends what bears `name`, or everything. Returns how many prompts; their choices end with `abort`."""
        found = [
            stream for entries in self._running.values() for names, stream in entries if name is None or name in names
        ]
        for stream in found:
            stream.stop()
        return len(found)
