"""The API's shapes as msgspec structs: what a body may hold, what an answer looks like.

Knows: names, types, defaults of OpenAI's API and of the extra fields that vLLM's users send. Must not know: ranges
(they are `SamplingParams`' business), the engine, HTTP. Answers: a key that OpenAI always sends is always there, null
if need be; a key of ours that was not asked for is UNSET, which leaves it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from pinnate.server.body import Neutral

# ------------------------------------------------------------------------------------------------ requests


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool = False
    include_obfuscation: bool = False  # accepted, no effect: chunks are never padded


class GenerationFields(msgspec.Struct, kw_only=True):
    """What chat and completions have in common. `None` is: not given."""

    model: str | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = {}
    seed: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    cache_report: bool = False
    priority: int = 0
    add_special_tokens: bool | None = None
    return_token_ids: bool = False
    # Accepted and without effect: what clients say about themselves, not about the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions. `prompt`: a text, ids, or a list of texts or of lists of ids."""

    prompt: str | list[str | int | list[int]]
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None


class ChatRequest(GenerationFields, kw_only=True):
    """POST /v1/chat/completions. The messages are checked one by one in `chat.py`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    parallel_tool_calls: bool | None = None  # no effect without tools, which are refused


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None


class TextPart(msgspec.Struct, kw_only=True):
    type: str
    text: str


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a text, or a chat as it would be sent to the model."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False


class PrefixRequest(TokenizeRequest, kw_only=True):
    """POST /pin_prefix and /debug/match: a text, ids, or the first messages of a chat."""

    prompt: str | list[int] | None = None  # type: ignore[assignment]
    cache_salt: str | None = None


class UnpinRequest(msgspec.Struct, kw_only=True):
    pin_id: str


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


def _never(_: Any) -> bool:
    return False


def _falsy(value: Any) -> bool:
    return not value


def _is(*values: Any) -> Neutral:
    return lambda value: any(value == other and type(value) is type(other) for other in values)


# What is known and not offered, with the values that ask for nothing.
_UNSUPPORTED_EVERYWHERE: Mapping[str, Neutral] = {
    "response_format": _is({"type": "text"}),
    "structured_outputs": _never,
    "guided_json": _never,
    "guided_regex": _never,
    "guided_choice": _never,
    "guided_grammar": _never,
    "guided_decoding_backend": _never,
    "guided_whitespace_pattern": _never,
    "json_schema": _never,
    "regex": _never,
    "ebnf": _never,
    "tools": _is([]),
    "tool_choice": _is("none", "auto"),
    "functions": _is([]),
    "function_call": _is("none", "auto"),
    "store": _is(False),
    "lora_request": _never,
    "lora_path": _never,
    "truncate_prompt_tokens": _never,
    "allowed_token_ids": _never,
    "bad_words": _is([]),
    "logits_processors": _is([]),
    "spaces_between_special_tokens": _is(True),
    "return_tokens_as_token_ids": _is(False),
    "kv_transfer_params": _never,
    "vllm_xargs": _falsy,
    "request_id": _never,
}
UNSUPPORTED_COMPLETION: Mapping[str, Neutral] = {
    **_UNSUPPORTED_EVERYWHERE,
    "suffix": _is(""),
    "prompt_embeds": _never,
}
UNSUPPORTED_CHAT: Mapping[str, Neutral] = {
    **_UNSUPPORTED_EVERYWHERE,
    "echo": _is(False),
    "best_of": _is(1),
    "modalities": _is(["text"]),
    "audio": _never,
    "prediction": _never,
    "reasoning_effort": _is("none"),
    "verbosity": _is("medium"),
    "web_search_options": _never,
    "moderation": _never,
    "chat_template": _never,
    "documents": _is([]),
    "mm_processor_kwargs": _falsy,
    "include_reasoning": _is(False, True),
}
UNSUPPORTED_MESSAGE: Mapping[str, Neutral] = {
    "tool_calls": _is([]),
    "function_call": _never,
    "tool_call_id": _never,
    "audio": _never,
    "refusal": _is(""),
    "reasoning": _is(""),
    "reasoning_content": _is(""),
}

# ------------------------------------------------------------------------------------------------ answers


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the prefix cache did for one prompt. `before` and `after` are the text around the first token that was not
    found. `num_lost_tokens`: see `core.messages.CacheReport`."""

    num_prompt_tokens: int
    num_cached_tokens: int
    reason: str
    num_lost_tokens: int
    num_tier_tokens: int
    before: str
    after: str
    explanation: str


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a whole request: each prompt once, all of its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


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


class CompletionLogprobs(msgspec.Struct):
    """The older form: parallel lists. `text_offset` counts characters from the start of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


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
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    cache_report: list[CacheReport] | UnsetType = UNSET


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str
    refusal: None = None


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
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    cache_report: list[CacheReport] | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


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
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    cache_report: list[CacheReport] | UnsetType = UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "pinnate"
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]
