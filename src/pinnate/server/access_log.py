"""The access log: one line for each request, when it has ended.

Knows: which facts of a record are shown, and how. Must not know: where lines go (core/logs.py). No prompt, output, key
or query string is ever shown: a query may hold a key that somebody put there by mistake.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from pinnate.server.request_record import Generation, RequestRecord

LOGGER = "pinnate.access"
MAX_PATH = 200
# Polled every few seconds by machines: shown where something is wrong with them.
PROBES = frozenset({"/health", "/ready", "/ping", "/metrics", "/load"})

_SUMS = ("prompt_tokens", "cached_tokens", "output_tokens")
_TIMES = ("queue_seconds", "prefill_seconds", "first_token_seconds", "decode_seconds")


def make_access_log(log_format: str) -> Callable[[RequestRecord], None]:
    """A listener for the Observer. Its lines come at every log level."""
    logger = logging.getLogger(LOGGER)
    logger.setLevel(logging.INFO)

    def write_json(record: RequestRecord) -> None:
        if not _is_dull(record):
            logger.info("request", extra={"fields": facts(record, time.monotonic())})

    def write_text(record: RequestRecord) -> None:
        if not _is_dull(record):
            logger.info(as_text(facts(record, time.monotonic())))

    return write_json if log_format == "json" else write_text


def facts(record: RequestRecord, now: float) -> dict[str, Any]:
    """What a line tells, without what does not apply. `now`: monotonic seconds, the request's end."""
    found: dict[str, Any] = {
        "request_id": record.request_id,
        "method": record.method,
        "route": record.route if record.route is not None else quote(record.path[:MAX_PATH]),
        "status": record.status,
        "seconds": round(now - record.began, 6),
        "client": record.client,
    }
    if record.caller.namespace:
        found["key"] = record.caller.namespace
    if record.error_code is not None:
        found["error"] = record.error_code
    if record.generations:
        found |= _of_generations(record.generations)
    return found


def _of_generations(generations: list[Generation]) -> dict[str, Any]:
    """Tokens are sums; the rest is that of the first one, which is mostly the only one."""
    first = generations[0]
    found: dict[str, Any] = {"id": first.id, "model": first.model, "stream": first.stream}
    found |= {name: sum(getattr(generation, name) for generation in generations) for name in _SUMS}
    found["finish_reason"] = ",".join(dict.fromkeys(r for g in generations for r in g.finish_reasons))
    found |= {name: round(seconds, 6) for name in _TIMES if (seconds := getattr(first, name)) is not None}
    return found


def as_text(found: dict[str, Any]) -> str:
    """`POST /v1/completions 200 0.123 s request_id=... prompt_tokens=5 ...`."""
    shown = dict(found)
    head = f"{shown.pop('method')} {shown.pop('route')} {shown.pop('status')} {shown.pop('seconds'):.3f} s"
    return " ".join((head, *(f"{name}={value}" for name, value in shown.items())))


def _is_dull(record: RequestRecord) -> bool:
    return record.route in PROBES and record.status == 200
