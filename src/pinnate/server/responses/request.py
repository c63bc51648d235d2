"""From the body of POST /v1/responses to a Job, and to the response as it begins.

Knows: what the fields mean, what they are called in a chat. Must not know: HTTP, events. Sampling, the messages, tools
and formats are checked by the chat's own code; its refusals are put into this API's words.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from pinnate.core.errors import InvalidRequestError, UnsupportedError
from pinnate.server import chat
from pinnate.server.body import FieldNotes, convert
from pinnate.server.field_names import Renames, renamed
from pinnate.server.generation import Job
from pinnate.server.params import check_model
from pinnate.server.protocol.common import StreamOptions
from pinnate.server.protocol.responses import (
    EXTRAS,
    INCLUDABLE,
    INCLUDE_LOGPROBS,
    UNSUPPORTED_RESPONSES,
    FunctionTool,
    Reasoning,
    ReasoningOptions,
    Response,
    ResponsesRequest,
    TextFormat,
    TextOptions,
)
from pinnate.server.responses.items import check_items, new_id, references, to_messages
from pinnate.server.responses.store import Store, Turn, previous_turn
from pinnate.server.responses.tools import check_tool, tool_fields
from pinnate.server.state import ServerState

if TYPE_CHECKING:
    from pinnate.engine.async_engine import AsyncEngine

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

RENAMES: Renames = (
    (r"\bmax_(?:completion_)?tokens\b", "max_output_tokens"),
    (r"\bresponse_format\.json_schema\b", "text.format"),
    (r"\bresponse_format\b", "text.format"),
    (r"\b(tools\[\d+\])\.function\b", r"\1"),
    (r"\btool_choice\.function\b", "tool_choice"),
    (r"^(?:messages\b|prompt$)", "input"),
    (r"\breasoning_effort\b", "reasoning.effort"),
    (r"\bverbosity\b", "text.verbosity"),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """`turn` is what this request adds to its conversation. `response` is its first state, queued."""

    job: Job
    response: Response
    turn: Turn
    wants_logprobs: bool


async def prepare(
    state: ServerState, engine: AsyncEngine, fields: dict[str, Any], store: Store, namespace: str
) -> Plan:
    """
    Raises:
        RequestError: whatever is wrong with the request, naming the field.
    """
    extras = {name: value for name, value in fields.items() if name in EXTRAS}
    own = {name: value for name, value in fields.items() if name not in EXTRAS}
    notes = state.field_notes()
    request = convert(own, ResponsesRequest, unsupported=UNSUPPORTED_RESPONSES, notes=notes)
    model = check_model(request.model, state.model_names)
    _check_options(request, notes)
    metadata = check_metadata(request.metadata)
    before = None
    if request.previous_response_id is not None:
        before = await previous_turn(store, namespace, request.previous_response_id)
    named = await store.find_items(namespace, references(request.input))
    turn = Turn(before, check_items(request.input, named, notes))
    tools = [check_tool(tool, f"tools[{number}]", notes) for number, tool in enumerate(request.tools)]
    text, reasoning = _text(request, notes), _reasoning(request, notes)
    shape = _format(text, notes)
    chat_fields = _chat_fields(request, model, tools, (text, shape, reasoning), notes) | extras
    messages, origins = _messages(request, turn)
    with renamed(RENAMES, origins):
        job = await chat.prepare(state, engine, chat_fields | {"messages": messages})
    warnings = (*notes.warnings, *job.warnings)
    prompts = [dataclasses.replace(prompt, request_id=extras.get("request_id", "")) for prompt in job.prompts]
    job = dataclasses.replace(job, id=new_id("resp"), prompts=prompts, warnings=warnings)
    response = Response(
        id=job.id,
        created_at=job.created,
        status="queued",
        background=request.background,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=model,
        parallel_tool_calls=request.parallel_tool_calls,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=Reasoning(reasoning.effort, reasoning.summary),
        safety_identifier=request.safety_identifier,
        store=request.store,
        temperature=request.temperature,
        text={"format": _shown_format(shape), "verbosity": text.verbosity or "medium"},
        tool_choice=request.tool_choice,
        tools=tools,
        top_logprobs=request.top_logprobs or 0,
        top_p=request.top_p,
        truncation=request.truncation,
        user=request.user,
        metadata=metadata,
        warnings=list(warnings) or UNSET,
    )
    return Plan(job, response, turn, wants_logprobs="logprobs" in chat_fields)


def _check_options(request: ResponsesRequest, notes: FieldNotes) -> None:
    """What is a matter of this API alone."""
    if request.background and not request.store:
        raise InvalidRequestError("background: true needs store: true", param="background")
    if request.stream_options is not None:
        if not request.stream:
            raise InvalidRequestError("stream_options is allowed with stream: true only", param="stream_options")
        convert(request.stream_options, StreamOptions, at="stream_options", notes=notes)
    if request.truncation == "auto":
        raise UnsupportedError("truncation: auto is not supported, only disabled", param="truncation")
    if request.truncation != "disabled":
        raise InvalidRequestError("truncation must be auto or disabled", param="truncation")
    if request.max_output_tokens is not None and request.max_output_tokens < 1:
        raise InvalidRequestError(
            f"max_output_tokens must be at least 1, got {request.max_output_tokens}", param="max_output_tokens"
        )
    for number, name in enumerate(request.include):
        if name not in INCLUDABLE:
            raise InvalidRequestError(
                f"include[{number}]: {name[:64]!r} is not one of {', '.join(sorted(INCLUDABLE))}", param="include"
            )


def check_metadata(metadata: dict[str, Any]) -> dict[str, str]:
    """
    Raises:
        InvalidRequestError: more than 16 pairs, or a key or value that is no text or too long.
    """
    if len(metadata) > MAX_METADATA:
        raise InvalidRequestError(
            f"metadata has {len(metadata)} pairs, at most {MAX_METADATA} are allowed", param="metadata"
        )
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY:
            raise InvalidRequestError(
                f"metadata: a key has {len(key)} characters, at most {MAX_METADATA_KEY} are allowed", param="metadata"
            )
        if not isinstance(value, str):
            raise InvalidRequestError(f"metadata.{key}: expected a string", param=f"metadata.{key}")
        if len(value) > MAX_METADATA_VALUE:
            raise InvalidRequestError(
                f"metadata.{key} has {len(value)} characters, at most {MAX_METADATA_VALUE} are allowed",
                param=f"metadata.{key}",
            )
    return metadata


def _text(request: ResponsesRequest, notes: FieldNotes) -> TextOptions:
    return convert(request.text, TextOptions, at="text", notes=notes)


def _reasoning(request: ResponsesRequest, notes: FieldNotes) -> ReasoningOptions:
    """`summary` is accepted: the reasoning's own text is given, which says more."""
    options = convert(request.reasoning, ReasoningOptions, at="reasoning", notes=notes)
    for name in ("summary", "generate_summary"):
        if getattr(options, name) not in (None, "auto", "concise", "detailed"):
            raise InvalidRequestError(f"reasoning.{name} must be auto, concise or detailed", param=f"reasoning.{name}")
    return options


def _format(text: TextOptions, notes: FieldNotes) -> TextFormat:
    chosen = convert(text.format, TextFormat, at="text.format", notes=notes)
    if chosen.type == "json_schema":
        for name in ("name", "schema"):
            if getattr(chosen, name) is None:
                raise InvalidRequestError(f"text.format.{name} is required", param=f"text.format.{name}")
    elif chosen.type not in ("text", "json_object"):
        raise InvalidRequestError("text.format.type must be text, json_object or json_schema", param="text.format.type")
    return chosen


def _shown_format(chosen: TextFormat) -> dict[str, Any]:
    if chosen.type != "json_schema":
        return {"type": chosen.type}
    return {
        "type": chosen.type,
        "name": chosen.name,
        "description": chosen.description,
        "schema": chosen.schema,
        "strict": bool(chosen.strict),
    }


def _chat_fields(
    request: ResponsesRequest,
    model: str,
    tools: list[FunctionTool],
    options: tuple[TextOptions, TextFormat, ReasoningOptions],
    notes: FieldNotes,
) -> dict[str, Any]:
    """Everything but the messages, under the chat's names. What was not asked for is left out."""
    text, chosen, reasoning = options
    fields: dict[str, Any] = {
        "model": model,
        "stream": request.stream,
        "temperature": request.temperature,
        "top_p": request.top_p,
    }
    if request.max_output_tokens is not None:
        fields["max_completion_tokens"] = request.max_output_tokens
    if INCLUDE_LOGPROBS in request.include or request.top_logprobs:
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    if text.verbosity is not None:
        fields["verbosity"] = text.verbosity
    if reasoning.effort is not None:
        fields["reasoning_effort"] = reasoning.effort
    if chosen.type == "json_schema":
        schema = {"name": chosen.name, "schema": chosen.schema, "strict": bool(chosen.strict)}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif chosen.type == "json_object":
        fields["response_format"] = {"type": "json_object"}
    return fields | tool_fields(request, tools, notes)


def _messages(request: ResponsesRequest, turn: Turn) -> tuple[list[dict[str, Any]], list[str]]:
    """The whole conversation as chat messages. The instructions of earlier turns are not carried over."""
    items = turn.items()
    earlier = len(items) - len(turn.input)
    places = ["previous_response_id"] * earlier + [
        "input" if isinstance(request.input, str) else f"input[{number}]" for number in range(len(turn.input))
    ]
    messages, origins = to_messages(zip(places, items, strict=True))
    if request.instructions is not None:
        messages.insert(0, {"role": "system", "content": request.instructions})
        origins.insert(0, "instructions")
    if not messages:
        raise InvalidRequestError("input is required", param="input")
    return messages, origins
