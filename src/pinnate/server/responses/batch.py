"""A response as a line of a batch: nothing is stored, and there is no earlier one to go on from.

Knows: the parts of a Route. Must not know: files, batches.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from pinnate.core.errors import UnsupportedError
from pinnate.server.cache_report import Vocabulary
from pinnate.server.endpoint import Route
from pinnate.server.generation import Job
from pinnate.server.protocol.common import Usage
from pinnate.server.protocol.responses import Response
from pinnate.server.replies import Gathered
from pinnate.server.responses.assembler import Assembler
from pinnate.server.responses.request import RENAMES, Plan, prepare
from pinnate.server.responses.store import MemoryStore
from pinnate.server.responses.writer import ResponseWriter, finished
from pinnate.server.state import ServerState

if TYPE_CHECKING:
    from pinnate.engine.async_engine import AsyncEngine


def batch_route() -> Route:
    return Route(_prepare, _writer, _reply, names=RENAMES)


async def _prepare(state: ServerState, engine: AsyncEngine, fields: dict[str, Any]) -> Job:
    for name in ("background", "previous_response_id"):
        if fields.get(name):
            raise UnsupportedError(f"{name} is not available in a batch", param=name)
    plan = await prepare(state, engine, {**fields, "store": False}, MemoryStore(), "")
    return dataclasses.replace(plan.job, context=plan)


def _writer(job: Job, vocabulary: Vocabulary) -> ResponseWriter:
    return ResponseWriter(_assembler(job, vocabulary))


def _reply(job: Job, gathered: Gathered, usage: Usage, vocabulary: Vocabulary) -> Response:
    return finished(_assembler(job, vocabulary), gathered, usage)


def _assembler(job: Job, vocabulary: Vocabulary) -> Assembler:
    plan = job.context
    assert isinstance(plan, Plan)
    return Assembler(plan.response, job.new_parser(), vocabulary, logprobs=plan.wants_logprobs)
