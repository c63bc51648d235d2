"""POST /v1/chat/completions: from a body to a Job.

Knows: messages and their parts, the chat template's place. Must not know: how a template renders, how a Job runs.
Text parts of one message are joined by a newline. The role `developer` is given to the template as `system`, which
is what templates know.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from pinnate.core.errors import InvalidRequestError, UnsupportedError
from pinnate.server.body import FieldNotes, convert
from pinnate.server.generation import Job, Prompt
from pinnate.server.params import (
    check_cache_report,
    check_cache_salt,
    check_max_tokens,
    check_model,
    check_priority,
    includes_usage,
    object_id,
    sampling_params,
    truncation,
)
from pinnate.server.protocol.chat import UNSUPPORTED_CHAT, UNSUPPORTED_MESSAGE, ChatMessage, ChatRequest, TextPart
from pinnate.server.protocol.operator import TokenizeRequest
from pinnate.server.state import ServerState
from pinnate.server.tokenizing import tokenize

if TYPE_CHECKING:
    from pinnate.engine.async_engine import AsyncEngine

ROLES = ("system", "developer", "user", "assistant")
PART_SEPARATOR = "\n"
LARGE_CHARACTERS = 20_000  # longer conversations are rendered in a thread, so that the loop never stalls
_RESERVED = frozenset(
    {"messages", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token", "tools"}
)


async def prepare(state: ServerState, engine: AsyncEngine, fields: dict[str, Any]) -> Job:
    """
    Raises:
        RequestError: whatever is wrong with the request, naming the field.
    """
    notes = state.field_notes()
    request = convert(fields, ChatRequest, unsupported=UNSUPPORTED_CHAT, notes=notes)
    model = check_model(request.model, state.model_names)
    max_tokens = _max_tokens(request)
    params = sampling_params(
        request,
        max_tokens=max_tokens,
        logprobs=_logprobs(request),
        prompt_logprobs=request.prompt_logprobs,
        max_logprobs=state.settings.max_logprobs,
    )
    request_id = object_id("chatcmpl", request.request_id)
    include_usage = includes_usage(request, notes)
    check_cache_report(request.cache_report, engine.info)
    salt, priority = check_cache_salt(request.cache_salt), check_priority(request.priority)
    token_ids = await render_and_tokenize(state, engine, request.messages, request, notes)
    return Job(
        id=request_id,
        model=model,
        prompts=[Prompt(token_ids=token_ids, text=_continued(request) if request.echo else "")],
        params=params,
        stream=request.stream,
        include_usage=include_usage,
        cache_salt=salt,
        cache_report=request.cache_report,
        priority=priority,
        prompt_logprobs=request.prompt_logprobs is not None,
        echo=request.echo,
        return_token_ids=request.return_token_ids,
        return_tokens_as_token_ids=request.return_tokens_as_token_ids,
        return_timings=request.return_timings,
        warnings=tuple(notes.warnings),
    )


async def render_and_tokenize(
    state: ServerState,
    engine: AsyncEngine,
    messages: list[dict[str, Any]],
    flags: ChatRequest | TokenizeRequest,
    notes: FieldNotes,
) -> list[int]:
    """The conversation as token ids. The template writes its own BOS, so none is added unless asked for.

    Raises:
        InvalidRequestError: a bad message, no template, flags that contradict, or the template's own refusal.
    """
    checked = check_messages(messages, notes)
    template = state.chat_template or engine.chat_template
    if template is None:
        raise InvalidRequestError(
            "the model has no chat template; start the server with --chat-template FILE, or use /v1/completions",
            param="messages",
        )
    if flags.continue_final_message and flags.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt must not both be true", param="continue_final_message"
        )
    for name in flags.chat_template_kwargs:
        if name in _RESERVED:
            raise InvalidRequestError(f"chat_template_kwargs must not set {name}", param="chat_template_kwargs")
    generation_prompt = flags.add_generation_prompt
    if generation_prompt is None:
        generation_prompt = not flags.continue_final_message

    def render() -> str:
        return template.render(
            checked,
            add_generation_prompt=generation_prompt,
            continue_final_message=flags.continue_final_message,
            **flags.chat_template_kwargs,
        )

    size = sum(len(message["content"]) + 32 for message in checked)
    text = await asyncio.to_thread(render) if size > LARGE_CHARACTERS else render()
    keep = truncation(flags, engine.max_model_len) if isinstance(flags, ChatRequest) else None
    special = bool(flags.add_special_tokens)
    return await tokenize(state, engine, text, add_special_tokens=special, param="messages", keep=keep)


def check_messages(messages: list[dict[str, Any]], notes: FieldNotes) -> list[dict[str, Any]]:
    """Messages as the template takes them: role, content as one text, and the name if there is one.

    Raises:
        InvalidRequestError, UnsupportedError: naming message and part.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    return [_check_message(message, f"messages[{number}]", notes) for number, message in enumerate(messages)]


def _check_message(fields: dict[str, Any], at: str, notes: FieldNotes) -> dict[str, Any]:
    given = {name: value for name, value in fields.items() if value is not None}
    message = convert(given, ChatMessage, at=at, unsupported=UNSUPPORTED_MESSAGE, notes=notes)
    if message.role in ("tool", "function"):
        raise UnsupportedError(f"{at}.role: {message.role} messages are not supported", param=f"{at}.role")
    if message.role not in ROLES:
        raise InvalidRequestError(f"{at}.role must be one of {', '.join(ROLES)}", param=f"{at}.role")
    if message.content is None:
        raise InvalidRequestError(f"{at}.content is required", param=f"{at}.content")
    content = message.content
    if not isinstance(content, str):
        content = _join_parts(content, f"{at}.content", notes)
    checked = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name is not None:
        checked["name"] = message.name
    return checked


def _join_parts(parts: list[dict[str, Any]], at: str, notes: FieldNotes) -> str:
    if not parts:
        raise InvalidRequestError(f"{at} must not be an empty list", param=at)
    texts = []
    for number, part in enumerate(parts):
        here = f"{at}[{number}]"
        kind = part.get("type")
        if kind != "text":
            shown = kind[:64] if isinstance(kind, str) else "none"
            raise UnsupportedError(f"{here}: parts of type {shown} are not supported, only text", param=f"{here}.type")
        texts.append(convert(part, TextPart, at=here, notes=notes).text)
    return PART_SEPARATOR.join(texts)


def _max_tokens(request: ChatRequest) -> int | None:
    """max_completion_tokens, or its older name. Two different values are a contradiction."""
    old, new = request.max_tokens, request.max_completion_tokens
    check_max_tokens(old, name="max_tokens", may_be_zero=request.prompt_logprobs is not None)
    check_max_tokens(new, name="max_completion_tokens", may_be_zero=False)
    if old is not None and new is not None and old != new:
        raise InvalidRequestError(
            f"max_completion_tokens ({new}) and max_tokens ({old}) must not differ", param="max_completion_tokens"
        )
    return old if new is None else new


def _continued(request: ChatRequest) -> str:
    """The text of a last message of the assistant, which the answer goes on with."""
    (last,) = check_messages(request.messages[-1:], FieldNotes(strict=False))
    return str(last["content"]) if last["role"] == "assistant" else ""


def _logprobs(request: ChatRequest) -> int | None:
    if not request.logprobs:
        if request.top_logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        return None
    return request.top_logprobs or 0
