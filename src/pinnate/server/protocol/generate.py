"""POST /generate and /abort_request: SGLang's own API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from pinnate.server.body import FieldWarning, Neutral
from pinnate.server.protocol.common import falsy, is_one_of, never

DEFAULT_MAX_NEW_TOKENS = 128


class GenerateRequest(msgspec.Struct, kw_only=True):
    """One of `text` and `input_ids`, alone or as a list. In a batch the fields that may be lists give each member its
    own value."""

    model: str | None = None
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] = {}
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    top_logprobs_num: int | list[int] = 0
    token_ids_logprob: list[int | list[int]] | None = None
    return_text_in_logprobs: bool = False
    priority: int = 0
    extra_key: str | None = None
    cache_salt: str | None = None
    # Accepted and without effect: about logs and metrics, not about the answer.
    log_metrics: bool = True
    no_logs: bool = False
    custom_labels: dict[str, Any] | None = None


class GenerateSampling(msgspec.Struct, kw_only=True):
    """`sampling_params` of /generate."""

    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: int = 0
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = {}
    sampling_seed: int | None = None
    n: int = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # no effect, see GenerationFields
    no_stop_trim: bool = False
    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    stream_interval: int | None = None  # no effect: every step is sent


UNSUPPORTED_GENERATE: Mapping[str, Neutral] = {
    "image_data": is_one_of([]),
    "audio_data": is_one_of([]),
    "video_data": is_one_of([]),
    "lora_path": never,
    "lora_id": never,
    "input_embeds": never,
    "modalities": is_one_of([], ["text"]),
    "session_params": never,
    "custom_logit_processor": never,
    "return_hidden_states": falsy,
    "return_routed_experts": falsy,
    "bootstrap_host": never,
    "bootstrap_port": never,
    "bootstrap_room": never,
}
UNSUPPORTED_GENERATE_SAMPLING: Mapping[str, Neutral] = {
    "stop_regex": is_one_of([], ""),
    "custom_params": falsy,
    "beam_width": is_one_of(1),
}


class AbortRequest(msgspec.Struct, kw_only=True):
    """POST /abort_request. An empty `rid` with `abort_all` false ends nothing."""

    rid: str = ""
    abort_all: bool = False
    abort_message: str | None = None  # no effect


class Stopped(msgspec.Struct, frozen=True, tag_field="type", tag="stop"):
    """`matched`: the stop text, or the id of the stop token or of the token that ends a turn."""

    matched: str | int | None


class Cut(msgspec.Struct, frozen=True, tag_field="type", tag="length"):
    length: int


class Aborted(msgspec.Struct, frozen=True, tag_field="type", tag="abort"):
    message: str = "Aborted"


# A log-probability (null for the first token of a prompt), the token's id, its text where asked for.
Scored = tuple[float | None, int, str | None]


class MetaInfo(msgspec.Struct, kw_only=True):
    """`finish_reason` is null while a stream goes on. What was not asked for is left out."""

    id: str
    finish_reason: Stopped | Cut | Aborted | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float
    input_token_logprobs: list[Scored] | UnsetType = UNSET
    output_token_logprobs: list[Scored] | UnsetType = UNSET
    input_top_logprobs: list[list[Scored] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[Scored] | None] | UnsetType = UNSET
    input_token_ids_logprobs: list[list[Scored] | None] | UnsetType = UNSET
    output_token_ids_logprobs: list[list[Scored] | None] | UnsetType = UNSET
    warnings: list[FieldWarning] | UnsetType = UNSET


class Generated(msgspec.Struct, kw_only=True):
    """An answer; in a stream, what there is of it so far. `index` tells the members of a streamed list apart."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET
