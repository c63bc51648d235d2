"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    falsy,
    is_one_of,
    never,
)


class ChatRequest(GenerationFields, kw_only=True):
    """POST /v1/chat/completions. The messages are checked one by one in `chat.py`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    echo: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[Any] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    reasoning_effort: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] = []
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class GivenToolCall(msgspec.Struct, kw_only=True):
    """A call of an earlier answer, as the client sends it back."""

    id: str = ""
    type: str = "function"
    index: int = 0  # of the chunk it came in; some clients keep it
    function: dict[str, Any]


class GivenFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any] = ""


class TextPart(msgspec.Struct, kw_only=True):
    type: str
    text: str


UNSUPPORTED_CHAT: Mapping[str, Neutral] = {
    **UNSUPPORTED_EVERYWHERE,
    "best_of": is_one_of(1),
    "modalities": is_one_of(["text"]),
    "audio": never,
    "prediction": never,
    "verbosity": is_one_of("medium"),
    "web_search_options": never,
    "moderation": never,
    "chat_template": never,
    "documents": is_one_of([]),
    "mm_processor_kwargs": falsy,
}
UNSUPPORTED_MESSAGE: Mapping[str, Neutral] = {
    "function_call": never,
    "audio": never,
    "refusal": is_one_of(""),
    "annotations": is_one_of([]),
}


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """`arguments` is JSON text as the model wrote it. In a chunk: what is new of it, and the name once."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: str = "function"
    function: FunctionCall


class ToolCallChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A call's first piece has id, type and name; the others have arguments alone."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCall


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """`content` is null where there are calls and no text. `reasoning` and `reasoning_content` are two names of one
    text; clients know one or the other."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    cache_report: list[CacheReport] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    warnings: list[FieldWarning] | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallChunk] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    cache_report: list[CacheReport] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    warnings: list[FieldWarning] | UnsetType = UNSET
