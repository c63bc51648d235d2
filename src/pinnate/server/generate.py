"""POST /generate, SGLang's own API: from a body to a Job, and what its answer must show.

Knows: the fields of a request and of a batch. Must not know: how a Job runs, how an answer is written
(generate_replies.py). Documentation: docs.sglang.io, "SGLang Native APIs" and "Sampling Parameters".
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from pinnate.core.errors import InvalidRequestError, RequestError
from pinnate.core.sampling import SamplingParams
from pinnate.server.body import FieldNotes, convert, read_json, without_nulls
from pinnate.server.endpoint import GenerationEndpoint, Route, refusals_counted
from pinnate.server.generate_replies import GenerateWriter, Shown, generated
from pinnate.server.generation import Job, Prompt
from pinnate.server.params import MAX_PROMPTS, check_cache_salt, check_model, check_priority, logit_bias
from pinnate.server.protocol.generate import (
    UNSUPPORTED_GENERATE,
    UNSUPPORTED_GENERATE_SAMPLING,
    GenerateRequest,
    GenerateSampling,
)
from pinnate.server.request_ids import check_request_id
from pinnate.server.request_record import record_of
from pinnate.server.state import ServerState
from pinnate.server.structured import structured_output
from pinnate.server.tokenizing import tokenize

if TYPE_CHECKING:
    from pinnate.engine.async_engine import AsyncEngine

T = TypeVar("T")

# Our names of fields, in a refusal, to SGLang's.
_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "logprob_token_ids": "token_ids_logprob",
}


class GenerateEndpoint:
    """ASGI application of /generate."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state
        with refusals_counted(state):
            state.ready_engine().check_queue()
            fields = await read_json(Request(scope, receive), state.settings.max_body_bytes)
            reader = GenerateReader()
            route = Route(
                reader.prepare,
                lambda job, vocabulary: GenerateWriter(job, vocabulary, reader.shown),
                lambda job, gathered, _, vocabulary: generated(job, gathered, vocabulary, reader.shown),
            )
            try:
                await GenerationEndpoint(state, route).serve(fields, receive, send, record_of(scope))
            except RequestError as error:
                raise _in_their_words(error) from None


class GenerateReader:
    """Reads one request; `shown` tells afterwards what its answer has."""

    def __init__(self) -> None:
        self.shown = Shown()

    async def prepare(self, state: ServerState, engine: AsyncEngine, fields: dict[str, Any]) -> Job:
        """
        Raises:
            RequestError: whatever is wrong with the request, naming the field (by our names for those of sampling).
        """
        notes = state.field_notes()
        request = convert(fields, GenerateRequest, unsupported=UNSUPPORTED_GENERATE, notes=notes)
        model = check_model(request.model, state.model_names)
        inputs, is_batch = _inputs(request)
        members = _members(request, len(inputs), notes, state.settings.max_logprobs)
        salt = _salt(request)
        priority = check_priority(request.priority)
        rids = _request_ids(request.rid, len(inputs), is_batch)
        prompts = []
        for number, given in enumerate(inputs):
            token_ids = await _tokenize(state, engine, given) if isinstance(given, str) else given
            params = members[number].params(len(token_ids), engine.max_model_len)
            prompts.append(Prompt(token_ids=token_ids, params=params, request_id=rids[number]))
        first = prompts[0].params
        assert first is not None
        self.shown = Shown(
            members=[member.logprob_start if member.return_logprob else None for member in members],
            text=request.return_text_in_logprobs,
            is_list=is_batch or first.n > 1,
        )
        return Job(
            id=rids[0] if len(rids) == 1 else f"generate-{uuid.uuid4().hex}",
            model=model,
            prompts=prompts,
            params=first,
            stream=request.stream,
            cache_salt=salt,
            priority=priority,
            warnings=tuple(notes.warnings),
        )


@dataclass(frozen=True, slots=True)
class _Member:
    """What one prompt of a batch asks for."""

    sampling: GenerateSampling
    is_length_given: bool
    return_logprob: bool
    logprob_start: int  # of the prompt's tokens, those from here on are scored; -1: none
    top: int
    token_ids: tuple[int, ...]

    def params(self, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
        given = self.sampling
        if self.logprob_start > num_prompt_tokens:
            raise InvalidRequestError(
                f"logprob_start_len is {self.logprob_start}, the prompt has {num_prompt_tokens} tokens",
                param="logprob_start_len",
            )
        scored = self.return_logprob and 0 <= self.logprob_start < num_prompt_tokens
        start = self.logprob_start if scored else num_prompt_tokens
        max_tokens = given.max_new_tokens
        if not self.is_length_given:
            max_tokens = min(max_tokens, max(1, max_model_len - num_prompt_tokens))
        # The engine takes a request without output for scoring alone; its scores need not be shown.
        prompt_logprobs = self.top if scored else 0 if max_tokens == 0 else None
        return SamplingParams(
            n=given.n,
            max_tokens=max_tokens,
            min_tokens=given.min_new_tokens,
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=min(given.top_k, 2**31 - 1),
            min_p=given.min_p,
            presence_penalty=given.presence_penalty,
            frequency_penalty=given.frequency_penalty,
            repetition_penalty=given.repetition_penalty,
            logit_bias=logit_bias(given.logit_bias),
            seed=given.sampling_seed,
            stop=(given.stop,) if isinstance(given.stop, str) else tuple(given.stop),
            stop_token_ids=tuple(given.stop_token_ids),
            include_stop_str_in_output=given.no_stop_trim,
            ignore_eos=given.ignore_eos,
            skip_special_tokens=given.skip_special_tokens,
            logprobs=self.top if self.return_logprob else None,
            logprob_token_ids=self.token_ids,
            prompt_logprobs=prompt_logprobs,
            prompt_logprobs_start=0 if prompt_logprobs is None else start,
            structured_output=structured_output(
                {name: getattr(given, name) for name in ("json_schema", "regex", "ebnf", "structural_tag")}
            ),
        )


def _inputs(request: GenerateRequest) -> tuple[list[str | list[int]], bool]:
    """The prompts, and whether they came as a list.

    Raises:
        InvalidRequestError: none, both kinds, an empty one, or too many.
    """
    if (request.text is None) == (request.input_ids is None):
        raise InvalidRequestError("one of text and input_ids is needed", param="text")
    name, given = ("text", request.text) if request.input_ids is None else ("input_ids", request.input_ids)
    if not given:
        raise InvalidRequestError(f"{name} must not be empty", param=name)
    if isinstance(given, str):
        return [given], False
    ids = [token for token in given if isinstance(token, int)]
    if ids and len(ids) == len(given):
        return [ids], False
    if ids or not all(given):
        raise InvalidRequestError(f"{name} must be one prompt or a list of prompts, none of them empty", param=name)
    if len(given) > MAX_PROMPTS:
        raise InvalidRequestError(f"{name} has {len(given)} prompts, at most {MAX_PROMPTS} are allowed", param=name)
    return given, True  # type: ignore[return-value]


def _members(request: GenerateRequest, count: int, notes: FieldNotes, max_logprobs: int) -> list[_Member]:
    samplings = _each(request.sampling_params, count, "sampling_params")
    flags = _each(request.return_logprob, count, "return_logprob")
    starts = _each(request.logprob_start_len, count, "logprob_start_len")
    tops = _each(request.top_logprobs_num, count, "top_logprobs_num")
    token_ids = _token_ids(request.token_ids_logprob, count)
    members = []
    for number in range(count):
        at = f"sampling_params[{number}]" if isinstance(request.sampling_params, list) else "sampling_params"
        fields = without_nulls(samplings[number])
        sampling = convert(fields, GenerateSampling, at=at, unsupported=UNSUPPORTED_GENERATE_SAMPLING, notes=notes)
        if not 0 <= tops[number] <= max_logprobs:
            raise InvalidRequestError(
                f"top_logprobs_num must be at least 0 and at most {max_logprobs} (--max-logprobs)",
                param="top_logprobs_num",
            )
        if starts[number] < -1:
            raise InvalidRequestError("logprob_start_len must be at least -1", param="logprob_start_len")
        asked = flags[number]
        members.append(
            _Member(
                sampling=sampling,
                is_length_given="max_new_tokens" in fields,
                return_logprob=asked,
                logprob_start=starts[number],
                top=tops[number],
                token_ids=token_ids[number] if asked else (),
            )
        )
    if len({member.sampling.n for member in members}) > 1:
        raise InvalidRequestError("sampling_params: n must be the same for the whole batch", param="sampling_params")
    return members


def _each(value: T | list[T], count: int, name: str) -> Sequence[T]:
    """One value for each prompt."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(f"{name} has {len(value)} members for {count} prompts", param=name)
    return value


def _token_ids(given: list[int | list[int]] | None, count: int) -> list[tuple[int, ...]]:
    if not given:
        return [()] * count
    ids = tuple(token for token in given if isinstance(token, int))
    if len(ids) == len(given):
        return [ids] * count
    lists = [tuple(member) for member in given if not isinstance(member, int)]
    if ids or len(lists) != count:
        raise InvalidRequestError(
            "token_ids_logprob must be a list of ids, or one for each prompt", param="token_ids_logprob"
        )
    return lists


def _request_ids(given: str | list[str] | None, count: int, is_batch: bool) -> list[str]:
    if given is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(given, str):
        check_request_id(given, "rid")
        return [f"{given}_{number}" for number in range(count)] if is_batch else [given]
    if len(given) != count:
        raise InvalidRequestError(f"rid has {len(given)} members for {count} prompts", param="rid")
    return [check_request_id(rid, "rid") for rid in given]


def _salt(request: GenerateRequest) -> str:
    """`extra_key` is SGLang's name of it."""
    if request.extra_key is not None and request.cache_salt not in (None, request.extra_key):
        raise InvalidRequestError("extra_key and cache_salt must not differ", param="extra_key")
    return check_cache_salt(request.cache_salt if request.extra_key is None else request.extra_key)


async def _tokenize(state: ServerState, engine: AsyncEngine, text: str) -> list[int]:
    return await tokenize(state, engine, text, add_special_tokens=True, param="text")


def _in_their_words(error: RequestError) -> RequestError:
    """The refusal with SGLang's names of the fields."""
    if error.param == "prompt":
        error.param = "input_ids" if error.message.startswith("prompt: token id") else "text"
    elif error.param in SamplingParams.__struct_fields__:
        ours = error.param
        theirs = _NAMES.get(ours, ours)
        error.message = error.message.replace(ours, theirs)
        top_level = theirs in GenerateRequest.__struct_fields__
        error.param = theirs if top_level else f"sampling_params.{theirs}"
    error.args = (error.message,)
    return error
