"""Who is told of each request when it has ended: put together from the settings.

Knows: the listeners. Must not know: what they make of a record.
"""

from __future__ import annotations

from pinnate.server.access_log import make_access_log
from pinnate.server.observer import Listener
from pinnate.server.state import ServerState


def listeners(state: ServerState) -> list[Listener]:
    """The metrics always; the access log and the traces where the settings ask for them."""
    told: list[Listener] = [state.metrics.count_http]
    if state.settings.access_log:
        told.append(make_access_log(state.settings.log_format))
    return told
