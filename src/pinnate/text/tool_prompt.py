"""Tools and calls written into messages, for chat templates that do not know of them.

Knows: messages as templates take them, how a format writes calls. Must not know: what a request may hold. Most chat
templates describe the tools to the model and write calls and results themselves; for one that does not, the tools go
into the system message, calls into the assistant's text, and results into a user's message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pinnate.text.parsers.registry import ToolFormat, knows_tools

Message = dict[str, Any]

_PREAMBLE = """You may call functions to help the user. These are the functions, one JSON object a line:
<tools>
{tools}
</tools>

To call functions, answer with nothing but
{example}"""


def messages_for(
    template: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], form: ToolFormat
) -> list[Message]:
    """The messages as `template` (its source) can show them. None of those given is changed."""
    shown = list(messages)
    if "tool_calls" not in template:
        shown = _as_text(shown, form)
    if tools and not knows_tools(template):
        shown = _described(shown, tools, form)
    return shown


def write_calls(calls: Sequence[Mapping[str, Any]], form: ToolFormat) -> str:
    """`calls` as the API's messages hold them, as a model of this format writes them."""
    texts = []
    for call in calls:
        function = call["function"]
        arguments = function["arguments"]
        if form.name == "pythonic" and isinstance(arguments, dict):
            shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        else:
            shown = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        texts.append(form.call[0] + function["name"] + form.call[1] + shown + form.call[2])
    return form.begin + form.separator.join(texts) + form.end


def _described(messages: list[Message], tools: Sequence[Mapping[str, Any]], form: ToolFormat) -> list[Message]:
    example = "argument=value" if form.name == "pythonic" else '{"argument": value}'
    written = form.begin + form.call[0] + "function_name" + form.call[1] + example + form.call[2] + form.end
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    preamble = _PREAMBLE.format(tools=lines, example=written)
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{preamble}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": preamble}, *messages]


def _as_text(messages: list[Message], form: ToolFormat) -> list[Message]:
    out: list[Message] = []
    in_results = False
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if in_results:
                out[-1] = {**out[-1], "content": f"{out[-1]['content']}\n{result}"}
            else:
                out.append({"role": "user", "content": result})
            in_results = True
            continue
        in_results = False
        calls = message.get("tool_calls")
        if calls:
            parts = [part for part in (message["content"], write_calls(calls, form)) if part]
            message = {"role": message["role"], "content": "\n".join(parts)}
        out.append(message)
    return out
