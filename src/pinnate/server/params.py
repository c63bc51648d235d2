"""From a body's fields to `SamplingParams`, and the checks that belong to the API rather than to the engine.

Knows: the served names, the fields' meaning. Must not know: prompts' text, HTTP, or the engine's limits (context,
vocabulary, KV pool), which `AsyncEngine.submit` checks.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pinnate.core.errors import InvalidRequestError, NotFoundError, UnsupportedError
from pinnate.core.sampling import SamplingParams
from pinnate.server.body import FieldNotes, convert, without_nulls
from pinnate.server.protocol.common import ChunkOptions, GenerationFields
from pinnate.server.request_ids import check_request_id
from pinnate.server.settings import DEFAULT_MAX_LOGPROBS
from pinnate.server.structured import CONSTRAINTS, structured_output

MAX_PROMPTS = 1024


def check_model(name: str | None, served: tuple[str, ...]) -> str:
    """The name to answer under; a request without one gets the default model.

    Raises:
        NotFoundError: a model that is not served here.
    """
    if name is None:
        return served[0]
    if name not in served:
        shown = name if len(name) <= 128 else name[:128] + "..."
        raise NotFoundError(f"the model {shown!r} is not served here", param="model", code="model_not_found")
    return name


def stream_options(fields: GenerationFields, notes: FieldNotes) -> ChunkOptions:
    """What the chunks of a stream shall carry.

    Raises:
        InvalidRequestError: given without a stream, or malformed.
    """
    if fields.stream_options is None:
        return ChunkOptions()
    at = "stream_options"
    if not fields.stream:
        raise InvalidRequestError(f"{at} is allowed with stream: true only", param=at)
    options = convert(without_nulls(fields.stream_options), ChunkOptions, at=at, notes=notes)
    if options.continuous_usage_stats and not options.include_usage:
        notes.without_effect(f"{at}.continuous_usage_stats", "needs include_usage: true")
        return ChunkOptions()
    return options


def sampling_params(
    fields: GenerationFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    best_of: int | None = None,
    max_logprobs: int = DEFAULT_MAX_LOGPROBS,
    notes: FieldNotes | None = None,
) -> SamplingParams:
    """`best_of`: so many beams, or candidates of which best_of.py chooses, in place of n. `max_logprobs`: the server's
    limit for alternatives of a token. `notes` takes unknown members of a constraint.

    Raises:
        InvalidRequestError: naming the field that is out of range.
    """
    beams = fields.use_beam_search
    name = "top_logprobs" if "top_logprobs" in fields.__struct_fields__ else "logprobs"
    for param, value in ((name, logprobs), ("prompt_logprobs", prompt_logprobs)):
        if value is not None and not 0 <= value <= max_logprobs:
            limit = f"{param} must be at least 0 and at most {max_logprobs} (--max-logprobs), got {value}"
            raise InvalidRequestError(limit, param=param)
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop
    return SamplingParams(
        n=fields.n if beams or best_of is None else best_of,
        use_beam_search=beams,
        beam_width=best_of if beams else None,
        length_penalty=fields.length_penalty,
        early_stopping=fields.early_stopping,
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=min(fields.top_k, 2**31 - 1),  # beyond any vocabulary, within any integer
        min_p=fields.min_p,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        repetition_penalty=fields.repetition_penalty,
        logit_bias=logit_bias(fields.logit_bias),
        seed=fields.seed,
        stop=tuple(text for text in stop if isinstance(text, str)),
        stop_token_ids=(*fields.stop_token_ids, *(token for token in stop if isinstance(token, int))),
        include_stop_str_in_output=fields.include_stop_str_in_output,
        ignore_eos=fields.ignore_eos,
        allowed_token_ids=None if fields.allowed_token_ids is None else tuple(fields.allowed_token_ids),
        bad_words=tuple(fields.bad_words),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=fields.skip_special_tokens,
        structured_output=structured_output({name: getattr(fields, name) for name in CONSTRAINTS}, notes),
    )


def check_cache_salt(salt: str | None) -> str:
    """The salt, or "" where none is given. An empty one would give no isolation and is refused."""
    if salt is None:
        return ""
    if not salt or len(salt) > 1024:
        raise InvalidRequestError("cache_salt must be a string of 1 to 1024 characters", param="cache_salt")
    return salt


def check_cache_report(asked: bool, info: Mapping[str, Any]) -> None:
    if asked and info.get("cache_report", "off") == "off":
        raise UnsupportedError("cache_report: the server was started without --cache-report", param="cache_report")


def check_priority(priority: int) -> int:
    if not -(2**31) <= priority < 2**31:
        raise InvalidRequestError(f"priority must fit in 32 bits, got {priority}", param="priority")
    return priority


def object_id(prefix: str, request_id: str | None) -> str:
    """The id of an answer: of the client's choice, after the prefix that tells the kind, or a new one.

    Raises:
        InvalidRequestError: `request_id` is too long, or has characters that do not belong into logs.
    """
    return f"{prefix}-{uuid.uuid4().hex if request_id is None else check_request_id(request_id)}"


@dataclass(frozen=True, slots=True)
class Truncation:
    """How many tokens of a prompt to keep, and which end of it goes."""

    tokens: int
    side: Literal["left", "right"] = "left"

    def cut(self, token_ids: list[int]) -> list[int]:
        return token_ids[-self.tokens :] if self.side == "left" else token_ids[: self.tokens]


def truncation(fields: GenerationFields, max_model_len: int) -> Truncation | None:
    """-1 keeps what fits the context beside the output that is asked for.

    Raises:
        InvalidRequestError: 0, less than -1, or more than the context.
    """
    asked = fields.truncate_prompt_tokens
    if asked is None:
        if fields.truncation_side is not None:
            raise InvalidRequestError("truncation_side needs truncate_prompt_tokens", param="truncation_side")
        return None
    if not (asked == -1 or 1 <= asked <= max_model_len):
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be -1 or from 1 to the context of {max_model_len} tokens, got {asked}",
            param="truncate_prompt_tokens",
        )
    output = fields.max_tokens or getattr(fields, "max_completion_tokens", None) or 1
    return Truncation(max(1, max_model_len - output) if asked == -1 else asked, fields.truncation_side or "left")


def check_max_tokens(value: int | None, *, name: str, may_be_zero: bool, unless: str) -> None:
    """0 is for scoring alone: it needs the field that `unless` names."""
    if value is None or value > 0 or (value == 0 and may_be_zero):
        return
    why = f" (0 is allowed with {unless} only)" if value == 0 else ""
    raise InvalidRequestError(f"{name} must be at least 1, got {value}{why}", param=name)


def logit_bias(given: dict[str, float]) -> dict[int, float]:
    """By token id. Ids are strings in JSON."""
    bias: dict[int, float] = {}
    for key, value in given.items():
        # Ids beyond the vocabulary are the engine's to refuse; here it must be a number at all.
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and str(int(key)) == key):
            raise InvalidRequestError(f"logit_bias: {key[:32]!r} is not a token id", param="logit_bias")
        bias[int(key)] = value
    return bias
