"""What the generation routes have in common: fields of a body, usage, log-probabilities of a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from pinnate.server.body import Neutral


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool = False
    include_obfuscation: bool = False  # accepted, no effect: chunks are never padded


class ChunkOptions(StreamOptions, frozen=True, kw_only=True):
    """Of chat completions and completions. `continuous_usage_stats`: each chunk has the usage so far."""

    continuous_usage_stats: bool = False


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
    stop: str | list[str | int] = []  # numbers are stop_token_ids
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # no effect: our decoders, like Hugging Face's fast ones, add no spaces
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    cache_report: bool = False
    priority: int = 0
    request_id: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_timings: bool = False
    # One constraint of the output at most, by any of its names (server/structured.py).
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None
    # Accepted and without effect: what clients say about themselves, not about the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


def never(_: Any) -> bool:
    return False


def falsy(value: Any) -> bool:
    return not value


def is_one_of(*values: Any) -> Neutral:
    return lambda value: any(value == other and type(value) is type(other) for other in values)


# What is known and not offered, with the values that ask for nothing. These decide what an answer is about or must obey
# (input, adapter, format), so they are refused always; what is only unknown gets a warning unless the server is strict.
UNSUPPORTED_EVERYWHERE: Mapping[str, Neutral] = {
    "guided_decoding_backend": is_one_of("auto", "guidance", "llguidance"),
    "guided_whitespace_pattern": never,
    "tools": is_one_of([]),
    "tool_choice": is_one_of("none", "auto"),
    "functions": is_one_of([]),
    "function_call": is_one_of("none", "auto"),
    "store": is_one_of(False),
    "lora_request": never,
    "lora_path": never,
    "lora": never,
    "lora_id": never,
    "lora_name": never,
    "adapter_id": never,
    "images": is_one_of([]),
    "image_data": is_one_of([]),
    "audio_data": is_one_of([]),
    "video_data": is_one_of([]),
    "input_embeds": never,
    "prompt_embeds": never,
    "logits_processors": is_one_of([]),
    "kv_transfer_params": never,
    "vllm_xargs": falsy,
}


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


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """llama.cpp's `timings`. Prompt: from the request's arrival, so waiting counts, to its first token; `prompt_n` of
    its tokens were computed and `cache_n` found in the cache. Prediction: from the first token to the last, all
    choices."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
