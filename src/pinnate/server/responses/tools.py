"""The tools of a Responses request, as this API and as a chat has them.

Knows: both shapes of a function and of the choice among them. Must not know: how a call is made.
"""

from __future__ import annotations

from typing import Any

from pinnate.core.errors import InvalidRequestError, UnsupportedError
from pinnate.server.body import FieldNotes, convert, without_nulls
from pinnate.server.protocol.common import is_one_of
from pinnate.server.protocol.responses import AllowedTools, FunctionChoice, FunctionTool, ResponsesRequest

_NEUTRAL = {"defer_loading": is_one_of(False), "async": is_one_of(False), "allowed_callers": is_one_of([], ["direct"])}


def check_tool(given: dict[str, Any], at: str, notes: FieldNotes) -> FunctionTool:
    kind = given.get("type")
    if kind != "function":
        shown = kind[:64] if isinstance(kind, str) else "none"
        raise UnsupportedError(f"{at}: tools of type {shown} are not supported, only function", param=f"{at}.type")
    return convert(given, FunctionTool, at=at, unsupported=_NEUTRAL, notes=notes)


def tool_fields(request: ResponsesRequest, tools: list[FunctionTool], notes: FieldNotes) -> dict[str, Any]:
    choice = request.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools, choice = _allowed(choice, tools, notes)
    elif isinstance(choice, dict):
        if choice.get("type") != "function":
            shown = str(choice.get("type"))[:64]
            raise UnsupportedError(
                f"tool_choice: type {shown} is not supported, only function and allowed_tools", param="tool_choice.type"
            )
        chosen = convert(choice, FunctionChoice, at="tool_choice", notes=notes)
        choice = {"type": "function", "function": {"name": chosen.name}}
    if not tools and choice == "auto":
        return {}
    shown_tools = [{"type": "function", "function": _function(tool)} for tool in tools]
    return {"tools": shown_tools, "tool_choice": choice, "parallel_tool_calls": request.parallel_tool_calls}


def _allowed(choice: dict[str, Any], tools: list[FunctionTool], notes: FieldNotes) -> tuple[list[FunctionTool], str]:
    """`allowed_tools`: the model sees these alone."""
    allowed = convert(choice, AllowedTools, at="tool_choice", notes=notes)
    if allowed.mode not in ("auto", "required"):
        raise InvalidRequestError("tool_choice.mode must be auto or required", param="tool_choice.mode")
    names = [
        convert(tool, FunctionChoice, at=f"tool_choice.tools[{number}]", notes=notes).name
        for number, tool in enumerate(allowed.tools)
    ]
    known = {tool.name for tool in tools}
    for name in names:
        if name not in known:
            raise InvalidRequestError(f"tool_choice.tools: no tool is called {name!r}", param="tool_choice.tools")
    return [tool for tool in tools if tool.name in names], allowed.mode


def _function(tool: FunctionTool) -> dict[str, Any]:
    given = {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return without_nulls(given)
