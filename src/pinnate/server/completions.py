"""POST /v1/completions: from a body to a Job.

Knows: the four forms of a prompt, echo, scoring. Must not know: how a Job runs.
"""

from __future__ import annotations

import asyncio
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
    object_id,
    sampling_params,
    stream_options,
    truncation,
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
    may_be_zero = request.echo or scored is not None
    check_max_tokens(request.max_tokens, name="max_tokens", may_be_zero=may_be_zero, unless="echo or prompt_logprobs")
    # Checked before the prompt is tokenised: a refusal must be cheap.
    best_of = check_best_of(
        request.best_of,
        request.n,
        most=engine.info["max_num_seqs"],
        stream=request.stream,
        beams=request.use_beam_search,
    )
    params = sampling_params(
        request,
        max_tokens=request.max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=scored,
        best_of=best_of,
        max_logprobs=state.settings.max_logprobs,
        notes=notes,
    )
    options = stream_options(request, notes)
    check_cache_report(request.cache_report, engine.info)
    salt, priority = check_cache_salt(request.cache_salt), check_priority(request.priority)
    request_id = object_id("cmpl", request.request_id)
    prompts = await _PromptReader(state, engine, request).read()
    if request.max_tokens is None:
        longest = max(len(prompt.token_ids) for prompt in prompts)
        room = max(1, engine.max_model_len - longest)
        params = msgspec.structs.replace(params, max_tokens=min(DEFAULT_MAX_TOKENS, room))
    shown = None
    if best_of is not None and not params.use_beam_search:  # candidates are ranked by their log-probabilities
        shown = msgspec.structs.replace(params, n=request.n)
        params = msgspec.structs.replace(params, logprobs=request.logprobs or 0)
    return Job(
        id=request_id,
        model=model,
        prompts=prompts,
        params=params,
        stream=request.stream,
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage_stats,
        cache_salt=salt,
        cache_report=request.cache_report,
        priority=priority,
        echo=request.echo,
        prompt_logprobs=request.prompt_logprobs is not None,
        return_token_ids=request.return_token_ids,
        return_tokens_as_token_ids=request.return_tokens_as_token_ids,
        return_timings=request.return_timings,
        shown=shown,
        warnings=tuple(notes.warnings),
        fingerprint=state.fingerprint(),
    )


def _scored_alternatives(request: CompletionRequest) -> int | None:
    """How many alternatives of each prompt token to score; None for no scoring. An echo shows its tokens' logprobs."""
    asked, echoed = request.prompt_logprobs, request.logprobs if request.echo else None
    if asked is not None and echoed is not None and asked != echoed:
        raise InvalidRequestError("prompt_logprobs must equal logprobs where echo is true", param="prompt_logprobs")
    if request.echo and request.max_tokens == 0:
        echoed = echoed or 0  # an echo and nothing else: the engine takes a request without output for scoring alone
    return echoed if asked is None else asked


class _PromptReader:
    """The prompts of one request, in any of the four forms."""

    def __init__(self, state: ServerState, engine: AsyncEngine, request: CompletionRequest) -> None:
        self._state = state
        self._engine = engine
        self._given = request.prompt
        self._special = request.add_special_tokens is not False
        self._echo = request.echo
        self._keep = truncation(request, engine.max_model_len)

    async def read(self) -> list[Prompt]:
        """
        Raises:
            InvalidRequestError: an empty prompt, or a list of mixed kinds. Ids are checked by the engine.
        """
        members: list[str | int | list[int]] = [self._given] if isinstance(self._given, str) else self._given
        if not members:
            raise InvalidRequestError("prompt must not be empty", param="prompt")
        if all(isinstance(member, int) for member in members):
            return [await self._from_ids([m for m in members if isinstance(m, int)])]
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
            read = self._from_text(member) if isinstance(member, str) else self._from_ids(member)
            prompts.append(await read)
        return prompts

    async def _from_text(self, text: str) -> Prompt:
        token_ids = await tokenize(
            self._state, self._engine, text, add_special_tokens=self._special, param="prompt", keep=self._keep
        )
        if not self._echo:
            return Prompt(token_ids=token_ids)
        return Prompt(token_ids=token_ids, text=text if self._keep is None else await self._text_of(token_ids))

    async def _from_ids(self, token_ids: list[int]) -> Prompt:
        if self._keep is not None:
            token_ids = self._keep.cut(token_ids)
        if not self._echo:
            return Prompt(token_ids=token_ids)
        for token_id in token_ids:
            if not 0 <= token_id < self._engine.vocab_size:
                raise InvalidRequestError(f"prompt: token id {token_id} is not in the vocabulary", param="prompt")
        return Prompt(token_ids=token_ids, text=await self._text_of(token_ids))

    async def _text_of(self, token_ids: list[int]) -> str:
        return await asyncio.to_thread(self._engine.tokenizer.decode, token_ids, skip_special_tokens=False)
