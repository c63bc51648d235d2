"""POST /v1/chat/completions: from a body to a Job.

Knows: the order of the checks. Must not know: how a template renders, how a Job runs. The other APIs that show chats
translate their bodies into these fields and call `prepare` too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pinnate.core.errors import InvalidRequestError
from pinnate.server.body import FieldNotes, convert, shorten
from pinnate.server.chat_formats import ChatOutput
from pinnate.server.generation import Job, Prompt
from pinnate.server.messages import check_messages
from pinnate.server.params import (
    check_cache_report,
    check_cache_salt,
    check_max_tokens,
    check_model,
    check_priority,
    object_id,
    sampling_params,
    stream_options,
)
from pinnate.server.protocol.chat import UNSUPPORTED_CHAT, ChatRequest
from pinnate.server.rendering import chat_formats, render, tokenize_chat
from pinnate.server.state import ServerState
from pinnate.server.tools import tool_use

if TYPE_CHECKING:
    from pinnate.engine.async_engine import AsyncEngine


async def prepare_own(state: ServerState, engine: AsyncEngine, fields: dict[str, Any]) -> Job:
    """Of this route: as `prepare`, and the client hears of variables that the template does not look at."""
    job = await prepare(state, engine, fields)
    template = state.chat_template or engine.chat_template
    unused = [name for name in fields.get("chat_template_kwargs", ()) if template and name not in template.source]
    if not unused:
        return job
    notes = state.field_notes()
    for name in unused:
        notes.without_effect(f"chat_template_kwargs.{shorten(name)}", "is not used by the chat template")
    return replace(job, warnings=(*job.warnings, *notes.warnings))


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
        notes=notes,
    )
    request_id = object_id("chatcmpl", request.request_id)
    options = stream_options(request, notes)
    check_cache_report(request.cache_report, engine.info)
    salt, priority = check_cache_salt(request.cache_salt), check_priority(request.priority)
    use = tool_use(request.tools, request.tool_choice, parallel=request.parallel_tool_calls, notes=notes)
    text = await render(state, engine, request.messages, request, use, notes)
    token_ids = await tokenize_chat(state, engine, text, request)
    output = ChatOutput(
        formats=chat_formats(state, engine),
        use=use,
        prompt=text,
        given=params.structured_output,
        shows_reasoning=request.include_reasoning,
    )
    return Job(
        id=request_id,
        model=model,
        prompts=[Prompt(token_ids=token_ids, text=_continued(request) if request.echo else "")],
        params=output.constrain(params, engine.tokenizer),
        stream=request.stream,
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage_stats,
        cache_salt=salt,
        cache_report=request.cache_report,
        priority=priority,
        prompt_logprobs=request.prompt_logprobs is not None,
        echo=request.echo,
        return_token_ids=request.return_token_ids,
        return_tokens_as_token_ids=request.return_tokens_as_token_ids,
        return_timings=request.return_timings,
        new_parser=output.new_parser,
        warnings=tuple(notes.warnings),
        fingerprint=state.fingerprint(),
    )


def _max_tokens(request: ChatRequest) -> int | None:
    """max_completion_tokens, or its older name. Two different values are a contradiction."""
    old, new = request.max_tokens, request.max_completion_tokens
    for name, value in (("max_tokens", old), ("max_completion_tokens", new)):
        check_max_tokens(value, name=name, may_be_zero=request.prompt_logprobs is not None, unless="prompt_logprobs")
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
