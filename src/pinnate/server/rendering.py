"""A conversation to the text and the ids that the model continues.

Knows: the template, its variables, what it cannot show by itself. Must not know: how a template renders, what becomes
of the output.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from pinnate.core.errors import InvalidRequestError, UnsupportedError
from pinnate.server.body import FieldNotes
from pinnate.server.chat_formats import ChatFormats
from pinnate.server.messages import check_messages
from pinnate.server.params import truncation
from pinnate.server.protocol.chat import ChatRequest
from pinnate.server.protocol.operator import TokenizeRequest
from pinnate.server.state import ServerState
from pinnate.server.tokenizing import tokenize
from pinnate.server.tools import ToolUse, tool_use
from pinnate.text.tool_prompt import messages_for

if TYPE_CHECKING:
    from pinnate.engine.async_engine import AsyncEngine
    from pinnate.text.chat_template import ChatTemplate

LARGE_CHARACTERS = 20_000  # longer conversations are rendered in a thread, so that the loop never stalls
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_RESERVED = frozenset(
    {"messages", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token", "tools"}
)


def chat_formats(state: ServerState, engine: AsyncEngine) -> ChatFormats:
    """Chosen once, when first asked for."""
    if state.chat_formats is None:
        template = state.chat_template or engine.chat_template
        settings = state.settings
        state.chat_formats = ChatFormats.choose(
            None if template is None else template.source, settings.tool_call_parser, settings.reasoning_parser
        )
    return state.chat_formats


async def render_and_tokenize(
    state: ServerState,
    engine: AsyncEngine,
    messages: list[dict[str, Any]],
    flags: TokenizeRequest,
    notes: FieldNotes,
) -> list[int]:
    """The conversation as token ids. The template writes its own BOS, so none is added unless asked for.

    Raises:
        InvalidRequestError: a bad message, no template, flags that contradict, or the template's own refusal.
    """
    use = tool_use(flags.tools, None, notes=notes)
    text = await render(state, engine, messages, flags, use, notes)
    return await tokenize_chat(state, engine, text, flags)


async def tokenize_chat(
    state: ServerState, engine: AsyncEngine, text: str, flags: ChatRequest | TokenizeRequest
) -> list[int]:
    keep = truncation(flags, engine.max_model_len) if isinstance(flags, ChatRequest) else None
    special = bool(flags.add_special_tokens)
    return await tokenize(state, engine, text, add_special_tokens=special, param="messages", keep=keep)


async def render(
    state: ServerState,
    engine: AsyncEngine,
    messages: list[dict[str, Any]],
    flags: ChatRequest | TokenizeRequest,
    use: ToolUse,
    notes: FieldNotes,
) -> str:
    """The conversation as text, with the tools that the model is shown.

    Raises:
        InvalidRequestError: as render_and_tokenize.
        UnsupportedError: a reasoning_effort that the template knows nothing of.
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
    variables = _variables(template, flags)
    if use.shown:
        variables["tools"] = list(use.shown)
    generation_prompt = flags.add_generation_prompt
    if generation_prompt is None:
        generation_prompt = not flags.continue_final_message
    shown = messages_for(template.source, checked, use.shown, chat_formats(state, engine).tools)

    def write() -> str:
        return template.render(
            shown,
            add_generation_prompt=generation_prompt,
            continue_final_message=flags.continue_final_message,
            **variables,
        )

    size = sum(len(message["content"]) + 32 for message in shown)
    return await asyncio.to_thread(write) if size > LARGE_CHARACTERS else write()


def _variables(template: ChatTemplate, flags: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """What the template gets by name. `reasoning_effort` reaches it under its own name; none also switches thinking
    off as the templates of Qwen and others know it."""
    for name in flags.chat_template_kwargs:
        if name in _RESERVED:
            raise InvalidRequestError(f"chat_template_kwargs must not set {name}", param="chat_template_kwargs")
    effort = flags.reasoning_effort if isinstance(flags, ChatRequest) else None
    if effort is None:
        return dict(flags.chat_template_kwargs)
    if effort not in EFFORTS:
        raise InvalidRequestError(f"reasoning_effort must be one of {', '.join(EFFORTS)}", param="reasoning_effort")
    if effort != "none" and "reasoning_effort" not in template.source:
        raise UnsupportedError(
            "reasoning_effort is not supported: the model's chat template knows no efforts", param="reasoning_effort"
        )
    variables: dict[str, Any] = {"reasoning_effort": effort}
    if effort == "none":
        variables["enable_thinking"] = False
    return variables | flags.chat_template_kwargs
