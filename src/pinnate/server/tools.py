"""The fields `tools`, `tool_choice` and `parallel_tool_calls` of a chat: checked, and what they ask for.

Knows: OpenAI's shapes and rules. Must not know: formats, templates, grammars.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pinnate.core.errors import InvalidRequestError, UnsupportedError
from pinnate.server.body import FieldNotes, without_nulls
from pinnate.text.tool_grammar import Tool

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_TO_TEMPLATE = "it reaches the chat template and nothing else"

Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`shown`: the tools as the client wrote them, for the chat template; `callable`: those that may be called.
    With `mode` required one of them is; `many` calls may come in one answer."""

    shown: tuple[dict[str, Any], ...] = ()
    callable: tuple[Tool, ...] = ()
    mode: Mode = "none"
    many: bool = True


NO_TOOLS = ToolUse()


def tool_use(
    tools: list[Any],
    choice: str | dict[str, Any] | None,
    *,
    parallel: bool = True,
    notes: FieldNotes | None = None,
) -> ToolUse:
    """What the fields ask for. `choice` None is `auto` with tools and `none` without. With `none` the model is not
    shown the tools. `notes` takes unknown members; without it they are refused.

    Raises:
        InvalidRequestError: a malformed tool or choice, or one that names no tool of the request.
        UnsupportedError: a kind of tool other than functions.
    """
    notes = notes or FieldNotes()
    checked = _check_tools(tools, notes)
    tools = [_without_nulls(tool) for tool in tools]
    if choice is None:
        choice = "auto" if tools else "none"
    if isinstance(choice, str):
        return _by_mode(choice, tools, checked, parallel)
    match choice.get("type"):
        case "function":
            name = _chosen_name(choice, "tool_choice", notes)
            return ToolUse(tuple(tools), (_find(checked, name, "tool_choice"),), "required", many=False)
        case "allowed_tools":
            return _allowed(choice, tools, checked, parallel, notes)
    raise InvalidRequestError(
        "tool_choice must be none, auto, required or an object of type function or allowed_tools", param="tool_choice"
    )


def _by_mode(choice: str, tools: list[Any], checked: tuple[Tool, ...], parallel: bool) -> ToolUse:
    match choice:
        case "none":
            return NO_TOOLS
        case "auto":
            return ToolUse(tuple(tools), checked, "auto", parallel) if tools else NO_TOOLS
        case "required":
            if not tools:
                raise InvalidRequestError("tool_choice required needs tools", param="tool_choice")
            return ToolUse(tuple(tools), checked, "required", parallel)
    raise InvalidRequestError(
        f"tool_choice must be none, auto, required or an object, got {choice[:64]!r}", param="tool_choice"
    )


def _chosen_name(choice: Mapping[str, Any], at: str, notes: FieldNotes) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise InvalidRequestError(f"{at}.function.name is required", param="tool_choice")
    notes.check(choice, ("type", "function"), at)
    notes.check(function, ("name",), f"{at}.function")
    return name


def _find(checked: tuple[Tool, ...], name: str, at: str) -> Tool:
    for tool in checked:
        if tool.name == name:
            return tool
    raise InvalidRequestError(f"{at}: no tool of the request is called {name[:64]!r}", param="tool_choice")


def _allowed(
    choice: Mapping[str, Any], tools: list[Any], checked: tuple[Tool, ...], parallel: bool, notes: FieldNotes
) -> ToolUse:
    """A part of the tools; the others are not shown to the model."""
    inner = choice.get("allowed_tools")
    if not isinstance(inner, dict) or inner.get("mode") not in ("auto", "required"):
        raise InvalidRequestError("tool_choice.allowed_tools.mode must be auto or required", param="tool_choice")
    entries = inner.get("tools")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidRequestError("tool_choice.allowed_tools.tools must be a list of tools", param="tool_choice")
    at = "tool_choice.allowed_tools"
    notes.check(choice, ("type", "allowed_tools"), "tool_choice")
    notes.check(inner, ("mode", "tools"), at)
    names = {_chosen_name(entry, f"{at}.tools[{number}]", notes) for number, entry in enumerate(entries)}
    allowed = tuple(_find(checked, name, "tool_choice.allowed_tools") for name in sorted(names))
    shown = [tool for tool in tools if tool["function"]["name"] in names]
    return ToolUse(tuple(shown), allowed, inner["mode"], parallel)


def _check_tools(tools: list[Any], notes: FieldNotes) -> tuple[Tool, ...]:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools has {len(tools)} entries, the limit is {MAX_TOOLS}", param="tools")
    checked: dict[str, Tool] = {}
    for number, entry in enumerate(tools):
        tool = _check_tool(entry, f"tools[{number}]", notes)
        if tool.name in checked:
            raise InvalidRequestError(f"tools: two are called {tool.name}", param=f"tools[{number}].function.name")
        checked[tool.name] = tool
    return tuple(checked.values())


def _without_nulls(tool: Mapping[str, Any]) -> dict[str, Any]:
    """As the chat template gets it: a null member is one that is not given."""
    return {**without_nulls(tool), "function": without_nulls(tool["function"])}


def _check_tool(entry: Any, at: str, notes: FieldNotes) -> Tool:
    """Members beside those checked reach the chat template with the rest of the tool."""
    if not isinstance(entry, dict):
        raise InvalidRequestError(f"{at} must be an object", param=at)
    kind = entry.get("type")
    if kind != "function":
        shown = kind[:64] if isinstance(kind, str) else "none"
        raise UnsupportedError(f"{at}.type: tools of type {shown} are not supported, only function", param=f"{at}.type")
    notes.check(entry, ("type", "function"), at, _TO_TEMPLATE)
    at += ".function"
    function = entry.get("function")
    if not isinstance(function, dict):
        raise InvalidRequestError(f"{at} must be an object", param=at)
    notes.check(function, ("name", "description", "parameters", "strict"), at, _TO_TEMPLATE)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{at}.name must have 1 to 128 letters, digits, underscores, dots or dashes", param=f"{at}.name"
        )
    description, strict = function.get("description"), function.get("strict")
    if description is not None and not isinstance(description, str):
        raise InvalidRequestError(f"{at}.description must be a string", param=f"{at}.description")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequestError(f"{at}.strict must be a boolean", param=f"{at}.strict")
    return Tool(name, _parameters(function, f"{at}.parameters"), strict is True, f"{at}.parameters")


def _parameters(function: Mapping[str, Any], at: str) -> dict[str, Any]:
    """Arguments are an object whatever their schema says of it. None given: there are none."""
    given = function.get("parameters")
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise InvalidRequestError(f"{at} must be an object: a JSON schema", param=at)
    if given.get("type", "object") != "object":
        raise InvalidRequestError(f"{at}.type must be object", param=f"{at}.type")
    if not isinstance(given.get("properties", {}), dict):
        raise InvalidRequestError(f"{at}.properties must be an object", param=f"{at}.properties")
    return given
