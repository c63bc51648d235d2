"""One request of a batch: checked and answered as its route would do it, without HTTP.

Knows: routes' parts (prepare, reply), errors as answers. Must not know: files, the database, other requests.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from pinnate.core.errors import EngineDeadError, QueueFullError, UnsupportedError
from pinnate.core.logs import log_fault
from pinnate.core.request import BACKGROUND_PRIORITY
from pinnate.server.batches.lines import parse
from pinnate.server.batches.tables import Result
from pinnate.server.best_of import choose
from pinnate.server.endpoint import Route
from pinnate.server.errors import ErrorBody, NotReadyError, describe
from pinnate.server.generation import Job, abort, merge
from pinnate.server.protocol.batches import LineError, LineResponse, OutputLine
from pinnate.server.protocol.common import PromptTokensDetails, Usage
from pinnate.server.replies import Gathered
from pinnate.server.state import ServerState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pinnate.engine.async_engine import AsyncEngine
    from pinnate.engine.stream import RequestStream

TRY_AGAIN = (QueueFullError, NotReadyError, EngineDeadError)  # says nothing about the request

log = logging.getLogger("pinnate.server")


async def prepare(
    state: ServerState, engine: AsyncEngine, routes: Mapping[str, Route], raw: bytes
) -> tuple[Job, Route]:
    """The job of a line that LineChecker has found good, less urgent than any live request.

    Raises:
        RequestError: what the route refuses, or a stream, which nobody could read.
    """
    line = parse(raw)
    if line.body.get("stream"):
        raise UnsupportedError("stream is not available in a batch", param="stream")
    route = routes[line.url]
    job = await route.prepare(state, engine, line.body)
    return replace(job, priority=job.priority + BACKGROUND_PRIORITY), route


async def answer(
    engine: AsyncEngine, job: Job, route: Route, streams: list[RequestStream], number: int, custom_id: str
) -> Result:
    """Reads the job's outputs to their end.

    Raises:
        EngineError: the request failed inside the engine.
    """
    gathered = Gathered(job)
    cached = [0] * len(job.prompts)
    outputs = merge(streams, job)
    try:
        async for batch in outputs:
            gathered.add(batch)
            for prompt, delta in batch:
                cached[prompt] = max(cached[prompt], delta.num_cached_tokens)
    finally:
        abort(streams)
    usage = _usage(job, gathered, sum(cached))
    shown, best = choose(job, gathered)
    body = route.reply(shown, best, usage, engine.tokenizer)
    return Result(
        number=number,
        ok=True,
        output=_line(custom_id, LineResponse(status_code=200, request_id=job.id, body=body)),
        input_tokens=usage.prompt_tokens,
        cached_tokens=usage.prompt_tokens_details.cached_tokens,
        output_tokens=usage.completion_tokens,
    )


def refusal(number: int, custom_id: str, error: Exception) -> Result:
    """What the client would have got over HTTP."""
    status, described = describe(error)
    if described.code == "internal_error":
        log_fault(log, f"request {custom_id} of a batch", error)
    elif status >= 500:
        log.error("request %s of a batch failed: %s", custom_id, error)
    response = LineResponse(status_code=status, request_id=f"req_{uuid.uuid4().hex}", body=ErrorBody(described))
    return Result(number=number, ok=False, output=_line(custom_id, response))


def never_run(custom_id: str, code: str, message: str) -> bytes:
    """The line of a request that was not run."""
    return _line(custom_id, None, LineError(code=code, message=message))


def _line(custom_id: str, response: LineResponse | None, error: LineError | None = None) -> bytes:
    line = OutputLine(id=f"batch_req_{uuid.uuid4().hex}", custom_id=custom_id, response=response, error=error)
    return msgspec.json.encode(line) + b"\n"


def _usage(job: Job, gathered: Gathered, cached: int) -> Usage:
    prompt_tokens = sum(len(prompt.token_ids) for prompt in job.prompts)
    completion_tokens = sum(len(choice.token_ids) for choice in gathered.choices)
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, PromptTokensDetails(cached))


def num_sequences(job: Job) -> int:
    """How many of the engine's places it takes."""
    return len(job.prompts) * job.params.num_sequences
