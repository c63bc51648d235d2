"""Who is told of each request when it has ended, and what /metrics shows besides our own names: put together from the
settings.

Knows: the listeners and sources. Must not know: what they make of a record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from pinnate.server.access_log import make_access_log
from pinnate.server.metrics_compat import compat_sources
from pinnate.server.observer import Listener
from pinnate.server.state import ServerState
from pinnate.server.tracing import make_tracer


def add_sources(state: ServerState) -> None:
    """What the metrics show besides their own: the engine's heartbeat, and other engines' names where the settings ask
    for them."""

    def engine_info() -> Mapping[str, Any]:
        return {} if state.engine is None else state.engine.info

    def heartbeat(prefix: str) -> list[Metric]:
        if state.engine is None:
            return []
        text = "Since the engine's process last showed a sign of life."
        return [GaugeMetricFamily(prefix + "engine_heartbeat_age_seconds", text, value=state.engine.heartbeat_age)]

    state.metrics.sources.append(heartbeat)
    state.metrics.sources += compat_sources(
        state.settings.metrics_compat, state.metrics, state.model_names[0], engine_info
    )


def listeners(state: ServerState) -> list[Listener]:
    """The metrics always; the access log and the traces where the settings ask for them."""
    told: list[Listener] = [state.metrics.count_http]
    if state.settings.access_log:
        told.append(make_access_log(state.settings.log_format))
    if state.settings.otlp_traces_endpoint is not None:
        tracer = make_tracer(state.settings.otlp_traces_endpoint)
        told.append(tracer)
        state.closers.append(tracer.close)
    return told
