"""How far batches are: for logs and metrics.

Knows: counts, times. Must not know: where they come from.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

LOG_SECONDS = 30.0

log = logging.getLogger("pinnate.server")


class Progress:
    """One batch runs at a time. `completed` and `failed` count the requests of all batches since the start."""

    def __init__(self) -> None:
        self.completed = 0
        self.failed = 0
        self.in_flight = 0
        self._batch = ""
        self._total = 0  # that this run has to do
        self._done = 0
        self._began = 0.0
        self._logged = 0.0

    def begin(self, batch_id: str, total: int) -> None:
        self._batch, self._total, self._done, self.in_flight = batch_id, total, 0, 0
        self._began = self._logged = time.monotonic()
        log.info("%s: %d requests to run", batch_id, total)

    def add(self, *, completed: int, failed: int) -> None:
        """Requests that now have their result stored."""
        self.completed += completed
        self.failed += failed
        self._done += completed + failed
        if time.monotonic() - self._logged >= LOG_SECONDS:
            self._log()

    def end(self) -> None:
        if self._done:
            self._log()
        self._batch, self._total, self._done, self.in_flight = "", 0, 0, 0

    @property
    def pending(self) -> int:
        """Requests of the batch that runs which have no result yet."""
        return self._total - self._done

    def collect(self, prefix: str) -> Iterator[Metric]:
        """For /metrics."""
        done = CounterMetricFamily(
            prefix + "batch_requests", "Requests of batches that have their result, since the start.", labels=["result"]
        )
        done.add_metric(["completed"], self.completed)
        done.add_metric(["failed"], self.failed)
        yield done
        text = "Requests of the batch that runs that have no result yet."
        yield GaugeMetricFamily(prefix + "batch_requests_pending", text, value=self.pending)
        text = "Requests of batches that the engine has."
        yield GaugeMetricFamily(prefix + "batch_requests_in_flight", text, value=self.in_flight)

    def _log(self) -> None:
        self._logged = now = time.monotonic()
        rate = self._done / max(now - self._began, 1e-9)
        log.info("%s: %d of %d requests done, %.2f a second", self._batch, self._done, self._total, rate)
