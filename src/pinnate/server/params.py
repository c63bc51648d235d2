"""From a body's fields to `SamplingParams`, and the checks that belong to the API rather than to the engine.

Knows: the served names, the fields' meaning. Must not know: prompts' text, HTTP, or the engine's limits (context,
vocabulary, KV pool), which `AsyncEngine.submit` checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pinnate.core.errors import InvalidRequestError, NotFoundError, UnsupportedError
from pinnate.core.sampling import SamplingParams
from pinnate.server.body import FieldNotes, convert
from pinnate.server.protocol.common import GenerationFields, StreamOptions
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


def includes_usage(fields: GenerationFields, notes: FieldNotes) -> bool:
    """Whether the stream ends with a chunk that carries the usage."""
    if fields.stream_options is None:
        return False
    if not fields.stream:
        raise InvalidRequestError("stream_options is allowed with stream: true only", param="stream_options")
    options = {name: value for name, value in fields.stream_options.items() if value is not None}
    return convert(options, StreamOptions, at="stream_options", notes=notes).include_usage


def sampling_params(
    fields: GenerationFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    best_of: int | None = None,
) -> SamplingParams:
    """`best_of`: so many beams, or candidates of which best_of.py chooses, in place of n.

    Raises:
        InvalidRequestError: naming the field that is out of range.
    """
    beams = fields.use_beam_search
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
        logit_bias=_logit_bias(fields.logit_bias),
        seed=fields.seed,
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids),
        include_stop_str_in_output=fields.include_stop_str_in_output,
        ignore_eos=fields.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=fields.skip_special_tokens,
        structured_output=structured_output({name: getattr(fields, name) for name in CONSTRAINTS}),
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


def check_max_tokens(value: int | None, *, name: str, may_be_zero: bool) -> None:
    """0 is for scoring alone: it needs `echo` or `prompt_logprobs`."""
    if value is None or value > 0 or (value == 0 and may_be_zero):
        return
    why = " (0 is allowed with echo or prompt_logprobs only)" if value == 0 else ""
    raise InvalidRequestError(f"{name} must be at least 1, got {value}{why}", param=name)


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        # Ids beyond the vocabulary are the engine's to refuse; here it must be a number at all.
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise InvalidRequestError(f"logit_bias: {key[:32]!r} is not a token id", param="logit_bias")
        bias[int(key)] = value
    return bias
