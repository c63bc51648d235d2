"""RequestRecord: what is known of one HTTP request, for the log line, the metrics and the trace.

Knows: names of facts. Must not know: how they are found or shown. It never holds a prompt, an output or a key.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from starlette.types import Scope

from pinnate.core.sampling import SamplingParams
from pinnate.server.auth import EVERYONE, Caller
from pinnate.server.request_ids import given_request_id, new_request_id

TRACE_HEADERS = frozenset({b"traceparent", b"tracestate"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What one job of the engine was and came to. Times in seconds; None where it never got that far.

    `queue_seconds` and `prefill_seconds` are the engine's own, of its first prompt: from its arrival there to its first
    step, and from then to its first token. `first_token_seconds` counts from the request's arrival at the server.
    """

    id: str
    model: str
    params: SamplingParams
    stream: bool
    num_prompts: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reasons: tuple[str, ...]  # of each choice that ended, in the order of their ends
    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    first_token_seconds: float | None = None
    decode_seconds: float | None = None


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One HTTP request while it lives. `status` 0: nothing was sent. `route` is the pattern of its path, None where no
    route knows it. `error_code` is the code of the error object it was answered with."""

    request_id: str
    has_given_id: bool
    method: str
    path: str
    client: str = ""
    began: float = field(default_factory=time.monotonic)
    began_ns: int = field(default_factory=time.time_ns)
    status: int = 0
    route: str | None = None
    caller: Caller = EVERYONE
    error_code: str | None = None
    trace_context: dict[str, str] = field(default_factory=dict)  # W3C's headers, as the client sent them
    generations: list[Generation] = field(default_factory=list)

    @classmethod
    def begin(cls, scope: Scope) -> RequestRecord:
        given = given_request_id(scope)
        client = scope.get("client")
        context = {k.decode(): v.decode("latin-1") for k, v in scope["headers"] if k in TRACE_HEADERS}
        return cls(
            request_id=given or new_request_id(),
            has_given_id=given is not None,
            method=scope["method"],
            path=scope["path"],
            client=client[0] if client else "",
            trace_context=context,
        )


def record_of(scope: Scope) -> RequestRecord:
    """The record of this HTTP request; one that nobody reads where the application has no Observer."""
    record: RequestRecord | None = scope.get("state", {}).get("record")
    return RequestRecord.begin(scope) if record is None else record
