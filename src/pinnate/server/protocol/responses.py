"""POST /v1/responses and its relatives: OpenAI's Responses API.

Shapes as https://platform.openai.com/docs/api-reference/responses has them. What is always null here is still sent,
since clients read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from pinnate.server.body import FieldWarning, Neutral
from pinnate.server.protocol.chat import ChatTokenLogprob
from pinnate.server.protocol.common import falsy, is_one_of, never

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Fields of a body. Those of `EXTRAS` go to the chat's own checks unread. `None` is: not given."""

    model: str | None = None
    input: str | list[dict[str, Any]] = []
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_logprobs: int | None = None
    include: list[str] = []
    text: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    reasoning: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    store: bool = True
    background: bool = False
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    truncation: str = "disabled"
    max_tool_calls: int | None = None  # counts built-in tools, of which there are none
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


# Fields of our chat that a Responses request may carry too: what vLLM's users send as extra_body.
EXTRAS = frozenset(
    {
        "top_k", "min_p", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "presence_penalty",
        "frequency_penalty", "repetition_penalty", "logit_bias", "skip_special_tokens", "include_stop_str_in_output",
        "cache_salt", "priority", "chat_template_kwargs", "structured_outputs", "request_id",
    }
)  # fmt: skip

UNSUPPORTED_RESPONSES: Mapping[str, Neutral] = {
    "conversation": never,
    "prompt": never,
    "moderation": never,
    "context_management": is_one_of([]),
    "access_programs": falsy,
    "image": falsy,
    "background_options": is_one_of({}, {"completion_window": "soonest"}),
    "prompt_cache_options": falsy,
}

# `include` names details of items. Of these kinds there is never an item here, so nothing is left out.
INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = frozenset(
    {
        INCLUDE_LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
        "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)  # fmt: skip


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "text"})
    verbosity: str | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A tool as the request has it, and as the answer shows it."""

    type: str
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InputMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[dict[str, Any]]
    type: str = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class InputPart(msgspec.Struct, kw_only=True):
    """input_text, output_text or refusal."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] = []
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class InputCall(msgspec.Struct, kw_only=True):
    type: str
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class InputCallOutput(msgspec.Struct, kw_only=True):
    type: str
    call_id: str
    output: str | list[dict[str, Any]]
    id: str | None = None
    status: str | None = None


class InputReasoning(msgspec.Struct, kw_only=True):
    type: str
    id: str | None = None
    summary: list[dict[str, Any]] = []
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None
    status: str | None = None


class InputThought(msgspec.Struct, kw_only=True):
    """A part of a reasoning item."""

    type: str
    text: str


class FunctionChoice(msgspec.Struct, kw_only=True):
    name: str
    type: str = "function"


class AllowedTools(msgspec.Struct, kw_only=True):
    type: str
    mode: str = ""
    tools: list[dict[str, Any]] = []


class ItemReference(msgspec.Struct, kw_only=True):
    id: str
    type: str = "item_reference"


# --- what is sent ---------------------------------------------------------------------------------------------------


class OutputText(msgspec.Struct, kw_only=True, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag="reasoning_text"):
    text: str


class Message(msgspec.Struct, kw_only=True, tag="message"):
    id: str
    status: ItemStatus
    role: str = "assistant"
    content: list[OutputText] = []


class FunctionCall(msgspec.Struct, kw_only=True, tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class ReasoningItem(msgspec.Struct, kw_only=True, tag="reasoning"):
    id: str
    summary: list[Any] = []
    content: list[ReasoningText] = []
    encrypted_content: None = None
    status: ItemStatus


OutputItem = Message | FunctionCall | ReasoningItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class Reasoning(msgspec.Struct, frozen=True):
    effort: str | None
    summary: str | None


class Response(msgspec.Struct, kw_only=True, frozen=True):
    """Made once for a request; each state of it is a copy with another status and output."""

    id: str
    object: str = "response"
    created_at: int
    status: Status
    background: bool
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: Reasoning
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]
    warnings: list[FieldWarning] | UnsetType = UNSET


class ResponseEvent(msgspec.Struct, kw_only=True):
    """response.created, .queued, .in_progress, .completed, .incomplete, .failed."""

    type: str
    sequence_number: int
    response: Response


class ItemEvent(msgspec.Struct, kw_only=True):
    """response.output_item.added and .done."""

    type: str
    sequence_number: int
    output_index: int
    item: OutputItem


class PartEvent(msgspec.Struct, kw_only=True):
    """response.content_part.added and .done."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class EventTopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float


class EventLogprob(msgspec.Struct, frozen=True):
    """Events have no bytes; the finished part has them."""

    token: str
    logprob: float
    top_logprobs: list[EventTopLogprob]


class DeltaEvent(msgspec.Struct, kw_only=True):
    """response.output_text.delta, .reasoning_text.delta, .function_call_arguments.delta, which has no content_index."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int | UnsetType = UNSET
    delta: str
    logprobs: list[EventLogprob] | UnsetType = UNSET


class DoneEvent(msgspec.Struct, kw_only=True):
    """response.output_text.done, .reasoning_text.done, .function_call_arguments.done."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    logprobs: list[EventLogprob] | UnsetType = UNSET


class ErrorEvent(msgspec.Struct, kw_only=True):
    type: str = "error"
    sequence_number: int
    code: str | None
    message: str
    param: str | None = None


Event = ResponseEvent | ItemEvent | PartEvent | DeltaEvent | DoneEvent | ErrorEvent


class DeletedResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "response"
    deleted: bool = True


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "response.input_tokens"
    input_tokens: int
    warnings: list[FieldWarning] | UnsetType = UNSET
