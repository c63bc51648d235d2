"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API.

Shapes as https://docs.anthropic.com/en/api/messages has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from pinnate.server.body import FieldWarning, Neutral
from pinnate.server.protocol.common import falsy, is_one_of, never

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """Fields of a body. `None` is: not given. `cache_control` is accepted everywhere and has no effect: all prompts are
    cached."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []
    tool_choice: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "auto"})
    thinking: dict[str, Any] = {}
    output_config: dict[str, Any] = {}
    cache_control: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_sequences: list[str] = []
    stream: bool = False
    metadata: dict[str, Any] = {}
    service_tier: str = "auto"
    request_id: str | None = None  # not Anthropic's: what an operator may abort it by, as on our other routes


UNSUPPORTED_MESSAGES: Mapping[str, Neutral] = {
    "container": never,
    "mcp_servers": is_one_of([]),
    "context_management": falsy,
    "diagnostics": falsy,
    "inference_geo": never,
    "speed": is_one_of("standard"),
    "user_profile_id": never,
    "workspace_id": never,
    "output_format": never,
}


class InputMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[dict[str, Any]]


class TextBlockParam(msgspec.Struct, kw_only=True):
    type: str
    text: str
    cache_control: dict[str, Any] | None = None
    citations: list[Any] | None = None


class ThinkingBlockParam(msgspec.Struct, kw_only=True):
    type: str
    thinking: str
    signature: str = ""


class ToolUseBlockParam(msgspec.Struct, kw_only=True):
    type: str
    id: str
    name: str
    input: dict[str, Any]
    cache_control: dict[str, Any] | None = None
    caller: dict[str, Any] | None = None


class ToolResultBlockParam(msgspec.Struct, kw_only=True):
    """`is_error` has no place in a chat template: what went wrong is in `content`."""

    type: str
    tool_use_id: str
    content: str | list[dict[str, Any]] = ""
    is_error: bool = False
    cache_control: dict[str, Any] | None = None


class ToolParam(msgspec.Struct, kw_only=True):
    name: str
    input_schema: dict[str, Any]
    type: str = "custom"
    description: str | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None


class ToolChoiceParam(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingParam(msgspec.Struct, kw_only=True):
    type: str
    budget_tokens: int | None = None
    display: str = "summarized"


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: dict[str, Any] | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    type: str
    schema: dict[str, Any]


class CacheControl(msgspec.Struct, kw_only=True):
    """No effect, wherever it is."""

    type: str = "ephemeral"
    ttl: str | None = None


class MetadataParam(msgspec.Struct, kw_only=True):
    user_id: str | None = None


# --- what is sent ---------------------------------------------------------------------------------------------------


class TextBlock(msgspec.Struct, kw_only=True, tag="text"):
    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, kw_only=True, tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = {}


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class CacheCreation(msgspec.Struct, frozen=True, kw_only=True):
    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """`input_tokens` are those that were not cached. Writing to the cache is not counted apart: nothing is paid for."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    cache_creation: CacheCreation = CacheCreation()
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    service_tier: str = "standard"


class DeltaUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Of the whole message so far."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class Message(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    warnings: list[FieldWarning] | UnsetType = UNSET


class TokensCount(msgspec.Struct, frozen=True):
    input_tokens: int
    warnings: list[FieldWarning] | UnsetType = UNSET


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    lifecycle: str = "active"
    max_input_tokens: int
    max_tokens: int


class ModelPage(msgspec.Struct, frozen=True, kw_only=True):
    data: list[ModelInfo]
    has_more: bool = False
    first_id: str
    last_id: str


class TextDelta(msgspec.Struct, frozen=True, tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag="signature_delta"):
    signature: str


class InputJSONDelta(msgspec.Struct, frozen=True, tag="input_json_delta"):
    partial_json: str


class MessageStart(msgspec.Struct, frozen=True, tag="message_start"):
    message: Message


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    pass


class BlockStart(msgspec.Struct, frozen=True, tag="content_block_start"):
    index: int
    content_block: ContentBlock


class BlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJSONDelta


class BlockStop(msgspec.Struct, frozen=True, tag="content_block_stop"):
    index: int


class Ending(msgspec.Struct, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag="message_delta"):
    delta: Ending
    usage: DeltaUsage


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop"):
    pass


Event = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
