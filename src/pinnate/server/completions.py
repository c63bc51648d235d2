"""POST /v1/completions: from a body to a Job.

Knows: the four forms of a prompt, echo, scoring. Must not know: how a Job runs.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any

import msgspec

from pinnate.core.errors import InvalidRequestError
from pinnate.server.best_of import check_best_of
from pinnate.server.body import convert
from pinnate.server.generation import Job, Prompt
from pinnate.server.params import (
    MAX_PROMPTS,
    check_cache_report,
    check_cache_salt,
    check_max_tokens,
    check_model,
    check_priority,
    includes_usage,
    sampling_params,
)
from pinnate.server.protocol.completions import UNSUPPORTED_COMPLETION, CompletionRequest
from pinnate.server.state import ServerState
from pinnate.server.tokenizing import tokenize

if TYPE_CHECKING:
    from pinnate.engine.async_engine import AsyncEngine

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this route


async def prepare(state: ServerState, engine: AsyncEngine, fields: dict[str, Any]) -> Job:
    """
    Raises:
        RequestError: whatever is wrong with the request, naming the field.
    """
    notes = state.field_notes()
    request = convert(fields, CompletionRequest, unsupported=UNSUPPORTED_COMPLETION, notes=notes)
    model = check_model(request.model, state.model_names)
    scored = _scored_alternatives(request)
    check_max_tokens(request.max_tokens, name="max_tokens", may_be_zero=request.echo or scored is not None)
    # Checked before the prompt is tokenised: a refusal must be cheap.
    best_of = check_best_of(
        request.best_of,
        request.n,
        most=engine.info["max_num_seqs"],
        stream=request.stream,
        beams=request.use_beam_search,
    )
    params = sampling_params(
        request, max_tokens=request.max_tokens, logprobs=request.logprobs, prompt_logprobs=scored, best_of=best_of
    )
    include_usage = includes_usage(request, notes)
    check_cache_report(request.cache_report, engine.info)
    salt, priority = check_cache_salt(request.cache_salt), check_priority(request.priority)
    special = True if request.add_special_tokens is None else request.add_special_tokens
    prompts = await _read_prompts(state, engine, request.prompt, special, echo=request.echo)
    if request.max_tokens is None:
        longest = max(len(prompt.token_ids) for prompt in prompts)
        room = max(1, engine.max_model_len - longest)
        params = msgspec.structs.replace(params, max_tokens=min(DEFAULT_MAX_TOKENS, room))
    shown = None
    if best_of is not None and not params.use_beam_search:  # candidates are ranked by their log-probabilities
        shown = msgspec.structs.replace(params, n=request.n)
        params = msgspec.structs.replace(params, logprobs=request.logprobs or 0)
    return Job(
        id=f"cmpl-{uuid.uuid4().hex}",
        model=model,
        prompts=prompts,
        params=params,
        stream=request.stream,
        include_usage=include_usage,
        cache_salt=salt,
        cache_report=request.cache_report,
        priority=priority,
        echo=request.echo,
        prompt_logprobs=request.prompt_logprobs is not None,
        return_token_ids=request.return_token_ids,
        shown=shown,
        warnings=tuple(notes.warnings),
    )


def _scored_alternatives(request: CompletionRequest) -> int | None:
    """How many alternatives of each prompt token to score; None for no scoring. An echo shows its tokens' logprobs."""
    asked, echoed = request.prompt_logprobs, request.logprobs if request.echo else None
    if asked is not None and request.stream:
        raise InvalidRequestError("prompt_logprobs is not available with stream: true", param="prompt_logprobs")
    if asked is not None and echoed is not None and asked != echoed:
        raise InvalidRequestError("prompt_logprobs must equal logprobs where echo is true", param="prompt_logprobs")
    if request.echo and request.max_tokens == 0:
        echoed = echoed or 0  # an echo and nothing else: the engine takes a request without output for scoring alone
    return echoed if asked is None else asked


async def _read_prompts(
    state: ServerState,
    engine: AsyncEngine,
    given: str | list[str | int | list[int]],
    add_special_tokens: bool,
    *,
    echo: bool,
) -> list[Prompt]:
    """
    Raises:
        InvalidRequestError: an empty prompt, or a list of mixed kinds. Ids are checked by the engine.
    """
    members: list[str | int | list[int]] = [given] if isinstance(given, str) else given
    if not members:
        raise InvalidRequestError("prompt must not be empty", param="prompt")
    if all(isinstance(member, int) for member in members):
        return [await _from_ids(engine, [m for m in members if isinstance(m, int)], echo)]
    if len(members) > MAX_PROMPTS:
        raise InvalidRequestError(
            f"prompt has {len(members)} members, at most {MAX_PROMPTS} are allowed", param="prompt"
        )
    prompts = []
    for member in members:
        if isinstance(member, int) or type(member) is not type(members[0]):
            raise InvalidRequestError("prompt must be a text, ids, or a list of one of them", param="prompt")
        if not member:
            raise InvalidRequestError("prompt must not be empty", param="prompt")
        if isinstance(member, str):
            token_ids = await tokenize(state, engine, member, add_special_tokens=add_special_tokens, param="prompt")
            prompts.append(Prompt(token_ids=token_ids, text=member if echo else ""))
        else:
            prompts.append(await _from_ids(engine, member, echo))
    return prompts


async def _from_ids(engine: AsyncEngine, token_ids: list[int], echo: bool) -> Prompt:
    if not echo:
        return Prompt(token_ids=token_ids)
    for token_id in token_ids:
        if not 0 <= token_id < engine.vocab_size:
            raise InvalidRequestError(f"prompt: token id {token_id} is not in the vocabulary", param="prompt")
    text = await asyncio.to_thread(engine.tokenizer.decode, token_ids, skip_special_tokens=False)
    return Prompt(token_ids=token_ids, text=text)
