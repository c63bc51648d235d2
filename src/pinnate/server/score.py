"""POST /score: probabilities of label tokens after a query and each of several items.

Knows: how prompts are put together, what a score is. Must not know: how a Job runs. One token is computed for each
item; the query before the items is computed once, by the prefix cache.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from pinnate.core.errors import EngineError, InvalidRequestError, RequestError
from pinnate.core.sampling import SamplingParams
from pinnate.server.body import convert, read_json
from pinnate.server.cache_report import Vocabulary
from pinnate.server.endpoint import GenerationEndpoint, Route, refusals_counted
from pinnate.server.generation import Job, Prompt
from pinnate.server.logprobs import finite
from pinnate.server.params import MAX_PROMPTS, check_cache_salt, check_model, check_priority, object_id
from pinnate.server.protocol.common import Usage
from pinnate.server.protocol.score import UNSUPPORTED_SCORE, ItemScore, ScoreRequest, Scores
from pinnate.server.replies import Gathered
from pinnate.server.request_record import record_of
from pinnate.server.state import ServerState
from pinnate.server.streaming import CompletionChunkWriter
from pinnate.server.tokenizing import tokenize

if TYPE_CHECKING:
    from pinnate.engine.async_engine import AsyncEngine


class ScoreEndpoint:
    """ASGI application of /score."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state
        with refusals_counted(state):
            state.ready_engine().check_queue()
            fields = await read_json(Request(scope, receive), state.settings.max_body_bytes)
            softmax = fields.get("apply_softmax") is True

            def reply(job: Job, gathered: Gathered, usage: Usage, _: Vocabulary) -> Scores:
                return scores(job, gathered, usage, softmax=softmax)

            route = Route(prepare, CompletionChunkWriter, reply)  # nothing is streamed
            try:
                await GenerationEndpoint(state, route).serve(fields, receive, send, record_of(scope))
            except RequestError as error:
                if error.param == "prompt":
                    error.param = "items"
                raise


async def prepare(state: ServerState, engine: AsyncEngine, fields: dict[str, Any]) -> Job:
    """
    Raises:
        RequestError: whatever is wrong with the request, naming the field.
    """
    notes = state.field_notes()
    request = convert(fields, ScoreRequest, unsupported=UNSUPPORTED_SCORE, notes=notes)
    model = check_model(request.model, state.model_names)
    if not request.label_token_ids:
        raise InvalidRequestError("label_token_ids must not be empty", param="label_token_ids")
    for token in request.label_token_ids:
        if not 0 <= token < engine.vocab_size:
            raise InvalidRequestError(
                f"label_token_ids: token id {token} is not in the vocabulary of {engine.vocab_size}",
                param="label_token_ids",
            )
    try:
        params = SamplingParams(
            max_tokens=1, temperature=0.0, logprobs=0, logprob_token_ids=tuple(request.label_token_ids)
        )
    except InvalidRequestError as error:
        message = error.message.replace("logprob_token_ids", "label_token_ids")
        raise InvalidRequestError(message, param="label_token_ids") from None
    salt, priority = check_cache_salt(request.cache_salt), check_priority(request.priority)
    return Job(
        id=object_id("score", request.request_id),
        model=model,
        prompts=await _prompts(state, engine, request),
        params=params,
        cache_salt=salt,
        priority=priority,
        warnings=tuple(notes.warnings),
    )


def scores(job: Job, gathered: Gathered, usage: Usage, *, softmax: bool) -> Scores:
    """Probabilities of the labels among all tokens, or among each other.

    Raises:
        EngineError: an operator has aborted an item.
    """
    rows = []
    for choice in gathered.choices:
        if not choice.logprobs:
            raise EngineError("the request was aborted before it was scored")
        logprobs = [finite(logprob) for _, logprob in choice.logprobs[0].chosen]
        total = math.log(sum(math.exp(logprob - max(logprobs)) for logprob in logprobs)) + max(logprobs)
        rows.append([math.exp(logprob - total if softmax else logprob) for logprob in logprobs])
    return Scores(
        id=job.id,
        created=job.created,
        model=job.model,
        scores=rows,
        data=[ItemScore(index=index, score=row[0]) for index, row in enumerate(rows)],
        usage=usage,
        warnings=list(job.warnings) or UNSET,
    )


async def _prompts(state: ServerState, engine: AsyncEngine, request: ScoreRequest) -> list[Prompt]:
    query = request.query
    if isinstance(query, str):
        items = [request.items] if isinstance(request.items, str) else request.items
        if not items or not all(isinstance(item, str) and item for item in items):
            raise InvalidRequestError("items must be texts, as query is, and none of them empty", param="items")
        _check_number(len(items))
        texts = [f"{item}{query}" if request.item_first else f"{query}{item}" for item in items]
        special = request.add_special_tokens
        return [
            Prompt(token_ids=await tokenize(state, engine, text, add_special_tokens=special, param="items"))
            for text in texts
        ]
    runs = _runs(request.items)
    _check_number(len(runs))
    return [Prompt(token_ids=[*run, *query] if request.item_first else [*query, *run]) for run in runs]


def _runs(items: str | list[str | int | list[int]]) -> list[list[int]]:
    """Lists of ids, or one."""
    given = [] if isinstance(items, str) else items
    ids = [item for item in given if isinstance(item, int)]
    runs = [ids] if ids else [item for item in given if isinstance(item, list)]
    if not runs or not all(runs) or (len(ids) if ids else len(runs)) != len(given):
        raise InvalidRequestError("items must be lists of token ids, as query is, none of them empty", param="items")
    return runs


def _check_number(count: int) -> None:
    if count > MAX_PROMPTS:
        raise InvalidRequestError(f"items has {count} members, at most {MAX_PROMPTS} are allowed", param="items")
