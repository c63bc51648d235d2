"""The messages of a chat: checked one by one, and as chat templates take them.

Knows: roles, text parts, tool calls and their results. Must not know: any template. What templates of the Hugging Face
hub expect: `content` is text, never null; the `arguments` of a call are an object, not its JSON text; reasoning is
`reasoning_content`. Text parts of one message are joined by a newline; the role `developer` becomes `system`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pinnate.core.errors import InvalidRequestError, UnsupportedError
from pinnate.server.body import FieldNotes, convert, without_nulls
from pinnate.server.protocol.chat import UNSUPPORTED_MESSAGE, ChatMessage, GivenFunction, GivenToolCall, TextPart

ROLES = ("system", "developer", "user", "assistant", "tool")
PART_SEPARATOR = "\n"
MAX_CALLS = 128  # of one message


def check_messages(messages: list[dict[str, Any]], notes: FieldNotes) -> list[dict[str, Any]]:
    """Messages as the template takes them.

    Raises:
        InvalidRequestError, UnsupportedError: naming message and part.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    checked = [_check_message(message, f"messages[{number}]", notes) for number, message in enumerate(messages)]
    _name_results(checked)
    return checked


def _name_results(messages: list[dict[str, Any]]) -> None:
    """Gives a tool's result the name of the tool whose call it answers, which some templates show."""
    names = {call["id"]: call["function"]["name"] for each in messages for call in each.get("tool_calls", ())}
    for message in messages:
        name = names.get(message.get("tool_call_id"))
        if name is not None:
            message.setdefault("name", name)


def _check_message(fields: dict[str, Any], at: str, notes: FieldNotes) -> dict[str, Any]:
    message = convert(without_nulls(fields), ChatMessage, at=at, unsupported=UNSUPPORTED_MESSAGE, notes=notes)
    if message.role == "function":
        raise UnsupportedError(f"{at}.role: function messages are not supported, use tool", param=f"{at}.role")
    if message.role not in ROLES:
        raise InvalidRequestError(f"{at}.role must be one of {', '.join(ROLES)}", param=f"{at}.role")
    content = message.content
    if content is None and message.tool_calls:
        content = ""
    if content is None:
        raise InvalidRequestError(f"{at}.content is required", param=f"{at}.content")
    if not isinstance(content, str):
        content = _join_parts(content, f"{at}.content", notes)
    checked: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name is not None:
        checked["name"] = message.name
    return checked | _tool_members(message, at, notes) | _reasoning(message, at)


def _tool_members(message: ChatMessage, at: str, notes: FieldNotes) -> dict[str, Any]:
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequestError(f"{at}.tool_calls belongs to assistant messages", param=f"{at}.tool_calls")
    if message.role == "tool":
        if not message.tool_call_id:
            raise InvalidRequestError(f"{at}.tool_call_id is required", param=f"{at}.tool_call_id")
        return {"tool_call_id": message.tool_call_id}
    if message.tool_call_id is not None:
        raise InvalidRequestError(f"{at}.tool_call_id belongs to tool messages", param=f"{at}.tool_call_id")
    if not message.tool_calls:
        return {}
    if len(message.tool_calls) > MAX_CALLS:
        raise InvalidRequestError(f"{at}.tool_calls has more than {MAX_CALLS} calls", param=f"{at}.tool_calls")
    calls = enumerate(message.tool_calls)
    return {"tool_calls": [_check_call(call, f"{at}.tool_calls[{number}]", notes) for number, call in calls]}


def _check_call(fields: dict[str, Any], at: str, notes: FieldNotes) -> dict[str, Any]:
    call = convert(without_nulls(fields), GivenToolCall, at=at, notes=notes)
    if call.type != "function":
        raise UnsupportedError(f"{at}.type: only function calls are supported", param=f"{at}.type")
    function = convert(without_nulls(call.function), GivenFunction, at=f"{at}.function", notes=notes)
    if not function.name:
        raise InvalidRequestError(f"{at}.function.name must not be empty", param=f"{at}.function.name")
    arguments = _arguments(function.arguments)
    return {"id": call.id, "type": "function", "function": {"name": function.name, "arguments": arguments}}


def _arguments(given: str | dict[str, Any]) -> str | dict[str, Any]:
    """As an object; what is none (a model's slip, sent back with its error) stays the text that it is."""
    if not isinstance(given, str):
        return given
    try:
        meant = msgspec.json.decode(given) if given.strip() else {}
    except (msgspec.MsgspecError, RecursionError):
        return given
    return meant if isinstance(meant, dict) else given


def _reasoning(message: ChatMessage, at: str) -> dict[str, Any]:
    old, new = message.reasoning_content, message.reasoning
    if old is not None and new is not None and old != new:
        raise InvalidRequestError(f"{at}.reasoning and {at}.reasoning_content differ", param=f"{at}.reasoning")
    text = old or new
    if not text:
        return {}
    if message.role != "assistant":
        raise InvalidRequestError(f"{at}.reasoning belongs to assistant messages", param=f"{at}.reasoning")
    return {"reasoning_content": text}


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
        texts.append(convert(without_nulls(part), TextPart, at=here, notes=notes).text)
    return PART_SEPARATOR.join(texts)
