"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import UNSET, UnsetType

from pinnate.server.body import FieldWarning, Neutral
from pinnate.server.protocol.common import (
    UNSUPPORTED_EVERYWHERE,
    CacheReport,
    GenerationFields,
    PromptLogprobs,
    Timings,
    Usage,
    is_one_of,
)


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions. `prompt`: a text, ids, or a list of texts or of lists of ids."""

    prompt: str | list[str | int | list[int]]
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None


UNSUPPORTED_COMPLETION: Mapping[str, Neutral] = {
    **UNSUPPORTED_EVERYWHERE,
    "suffix": is_one_of(""),
}


class CompletionLogprobs(msgspec.Struct):
    """The older form: parallel lists. `text_offset` counts characters from the start of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A choice of a completion; also of its chunks, where `text` is what is new."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """`usage` null or UNSET: a chunk that carries none."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    cache_report: list[CacheReport] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    warnings: list[FieldWarning] | UnsetType = UNSET
