"""From the body of POST /v1/messages to a Job.

Knows: what the fields mean, what they are called in a chat. Must not know: HTTP, events. Sampling, the messages, tools
and formats are checked by the chat's own code; its refusals are put into this API's words.

`max_tokens` is required and clients send large ones, so it is capped to what is left of the context; an answer that
this ends has the stop reason `model_context_window_exceeded`.
"""

from __future__ import annotations

import dataclasses
import uuid
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from pinnate.core.errors import InvalidRequestError, UnsupportedError
from pinnate.server import chat
from pinnate.server.anthropic.blocks import Conversation, check_cache_control
from pinnate.server.body import FieldNotes, FieldWarning, convert, without_nulls
from pinnate.server.field_names import Renames, renamed
from pinnate.server.generation import Job
from pinnate.server.params import check_model
from pinnate.server.protocol.anthropic import (
    UNSUPPORTED_MESSAGES,
    CountTokensRequest,
    MessagesRequest,
    MetadataParam,
    OutputConfig,
    OutputFormat,
    ThinkingParam,
    TokensCount,
    ToolChoiceParam,
    ToolParam,
)
from pinnate.server.rendering import chat_formats
from pinnate.server.request_ids import check_request_id
from pinnate.server.state import ServerState

if TYPE_CHECKING:
    from pinnate.engine.async_engine import AsyncEngine

MIN_THINKING_BUDGET = 1024
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}  # a chat's words

RENAMES: Renames = (
    (r"^prompt$", "messages"),
    (r"\bresponse_format(?:\.json_schema)?\b", "output_config.format"),
    (r"\b(tools\[\d+\])\.function\.parameters\b", r"\1.input_schema"),
    (r"\b(tools\[\d+\])\.function\b", r"\1"),
    (r"\btool_choice\.function\b", "tool_choice"),
    (r"\bstop\b(?! )", "stop_sequences"),
    (r"^stop ", "stop_sequences "),
    (r"\breasoning_effort\b", "output_config.effort"),
)


async def prepare(state: ServerState, engine: AsyncEngine, fields: dict[str, Any]) -> Job:
    """
    Raises:
        RequestError: whatever is wrong with the request, naming the field.
    """
    notes = state.field_notes()
    request = convert(fields, MessagesRequest, unsupported=UNSUPPORTED_MESSAGES, notes=notes)
    if request.max_tokens < 1:
        raise InvalidRequestError(f"max_tokens must be at least 1, got {request.max_tokens}", param="max_tokens")
    if not 0 <= request.temperature <= 1:
        raise InvalidRequestError(f"temperature must be from 0 to 1, got {request.temperature}", param="temperature")
    if request.service_tier not in ("auto", "standard_only"):
        raise InvalidRequestError("service_tier must be auto or standard_only", param="service_tier")
    convert(request.metadata, MetadataParam, at="metadata", notes=notes)
    sampling = {
        "stream": request.stream,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop": request.stop_sequences,
    }
    job = await _chat_job(state, engine, request, sampling, notes)
    prompts = job.prompts
    if request.request_id is not None:
        prompts = [dataclasses.replace(prompts[0], request_id=check_request_id(request.request_id))]
    room = engine.max_model_len - len(job.prompts[0].token_ids)
    # Beyond the room None means all of it; the KV pool may allow less, which the engine knows.
    capped = None if request.max_tokens > room else request.max_tokens
    return dataclasses.replace(job, prompts=prompts, params=replace(job.params, max_tokens=capped))


async def count_tokens(state: ServerState, engine: AsyncEngine, fields: dict[str, Any]) -> TokensCount:
    """How long the prompt of these messages would be. Raises as `prepare`."""
    notes = state.field_notes()
    request = convert(fields, CountTokensRequest, unsupported=UNSUPPORTED_MESSAGES, notes=notes)
    job = await _chat_job(state, engine, request, {}, notes)
    notes.warnings = list(job.warnings)
    return TokensCount(len(job.prompts[0].token_ids), **notes.members("/v1/messages/count_tokens"))


async def _chat_job(
    state: ServerState,
    engine: AsyncEngine,
    request: CountTokensRequest,
    sampling: dict[str, Any],
    notes: FieldNotes,
) -> Job:
    model = check_model(request.model, state.model_names)
    check_cache_control({"cache_control": request.cache_control}, "", notes)
    if not request.messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    conversation = Conversation(notes)
    conversation.add_system(request.system)
    for number, message in enumerate(request.messages):
        conversation.add(message, f"messages[{number}]")
    chat_fields = {
        "model": model,
        "messages": conversation.messages,
        **sampling,
        **_tools(request, notes),
        **_output(request, notes),
    }
    thinks = _thinking(request, notes)
    if thinks is not None:
        chat_fields["chat_template_kwargs"] = {"enable_thinking": thinks}
        if thinks and chat_formats(state, engine).reasoning is None:
            notes.warnings.append(FieldWarning("thinking", "thinking: the model does not think; it has no effect"))
    if conversation.ends_with_assistant:
        chat_fields["continue_final_message"] = True
    with renamed(RENAMES, conversation.origins):
        job = await chat.prepare(state, engine, chat_fields)
    return dataclasses.replace(job, id=f"msg_{uuid.uuid4().hex}", warnings=(*notes.warnings, *job.warnings))


def _tools(request: CountTokensRequest, notes: FieldNotes) -> dict[str, Any]:
    tools = []
    for number, given in enumerate(request.tools):
        at = f"tools[{number}]"
        kind = given.get("type") or "custom"
        if kind != "custom":
            shown = kind[:64] if isinstance(kind, str) else "none"
            raise UnsupportedError(f"{at}: tools of type {shown} are not supported, only custom", param=f"{at}.type")
        check_cache_control(given, at, notes)
        tool = convert(given, ToolParam, at=at, notes=notes)
        function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        tools.append({"type": "function", "function": without_nulls(function | {"strict": tool.strict})})
    choice = convert(request.tool_choice, ToolChoiceParam, at="tool_choice", notes=notes)
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequestError("tool_choice.name is required", param="tool_choice.name")
        chosen: Any = {"type": "function", "function": {"name": choice.name}}
    elif choice.type in _CHOICES:
        chosen = _CHOICES[choice.type]
    else:
        raise InvalidRequestError("tool_choice.type must be auto, any, tool or none", param="tool_choice.type")
    if not tools and chosen in ("auto", "none"):
        return {}
    return {"tools": tools, "tool_choice": chosen, "parallel_tool_calls": not choice.disable_parallel_tool_use}


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _thinking(request: CountTokensRequest, notes: FieldNotes) -> bool | None:
    """Whether the chat template shall let the model think. None, not given or `adaptive`: what it does by itself.

    There is no budget: a model stops thinking when it does, or at max_tokens.
    """
    if not request.thinking:
        return None
    thinking = convert(request.thinking, ThinkingParam, at="thinking", notes=notes)
    if thinking.type not in ("enabled", "disabled", "adaptive"):
        raise UnsupportedError("thinking.type must be enabled, disabled or adaptive", param="thinking.type")
    if thinking.display != "summarized":
        raise UnsupportedError("thinking.display is not supported, thinking is always shown", param="thinking.display")
    if thinking.type == "adaptive":
        return None
    if thinking.type == "enabled":
        budget = thinking.budget_tokens
        if budget is None:
            raise InvalidRequestError("thinking.budget_tokens is required", param="thinking.budget_tokens")
        limit = request.max_tokens if isinstance(request, MessagesRequest) else None
        if budget < MIN_THINKING_BUDGET or (limit is not None and budget >= limit):
            raise InvalidRequestError(
                f"thinking.budget_tokens must be at least {MIN_THINKING_BUDGET} and less than max_tokens, got {budget}",
                param="thinking.budget_tokens",
            )
    return thinking.type == "enabled"


def _output(request: CountTokensRequest, notes: FieldNotes) -> dict[str, Any]:
    config = convert(request.output_config, OutputConfig, at="output_config", notes=notes)
    fields: dict[str, Any] = {}
    if config.effort is not None:
        if config.effort not in EFFORTS:
            raise InvalidRequestError(
                f"output_config.effort must be one of {', '.join(EFFORTS)}", param="output_config.effort"
            )
        fields["reasoning_effort"] = EFFORTS[config.effort]
    if config.format is not None:
        chosen = convert(config.format, OutputFormat, at="output_config.format", notes=notes)
        if chosen.type != "json_schema":
            raise InvalidRequestError(
                "output_config.format.type must be json_schema", param="output_config.format.type"
            )
        named = {"name": "output", "schema": chosen.schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": named}
    return fields
