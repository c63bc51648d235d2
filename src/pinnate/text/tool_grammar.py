"""Grammars that make a model call tools: Lark in llguidance's dialect, in the format that the model's parser reads.

Knows: formats, JSON schemas of arguments as far as they must be objects. Must not know: how a grammar is compiled,
requests. Syntax: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md

JSON is written with one blank after commas and colons and no others, so that no model can stay in blanks for ever.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pinnate.core.errors import UnsupportedError
from pinnate.core.structured import StructuredOutput
from pinnate.text.parsers.registry import ToolFormat

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
HEADER = "%llguidance {}"
_ANY_TEXT = r"/(.|\n)*/"
# Members of a schema besides which a closed list of properties might forbid what it allows.
_OPEN_ENDED = (
    "additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "not", "if",
    "$ref", "$dynamicRef", "dependentSchemas", "propertyNames",
)  # fmt: skip

SpecialToken = Callable[[str], int | None]


@dataclass(frozen=True, slots=True)
class Tool:
    """`parameters`: the JSON schema of the arguments; `at`: where it is in the request, for errors."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False
    at: str = "tools"


def calls_grammar(
    form: ToolFormat,
    tools: Sequence[Tool],
    *,
    many: bool,
    thinking: tuple[str, str] | None = None,
    is_open: bool = False,
    content: str | None = None,
    special: SpecialToken,
) -> str:
    """One call of one of `tools`, or several with `many`; before it, what the model thinks between the marks `thinking`
    (`is_open`: it is in there already). `content`: a rule of content_rule that an answer without calls may follow
    instead; all of them do if there are no tools.

    `special` gives the id of a token that the tokenizer keeps apart from text, None for any other text.

    Raises:
        UnsupportedError: the arguments of a tool cannot be written in this format.
    """
    lines = []
    for number, tool in enumerate(tools):
        head, middle, tail = form.call
        rules, arguments = _arguments(form, tool, number)
        lines.append(f"call_{number}: {_text(head + tool.name + middle, special)} {arguments} {_text(tail, special)}")
        lines += rules
    starts = []
    if tools:
        more = f" ({_text(form.separator, special)} call)*" if many else ""
        lines.append(f"calls: {_text(form.begin, special)} call{more} {_text(form.end, special)}")
        lines.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
        starts.append("calls")
    if content is not None:
        starts.append("content")
        lines.append(f"content: {content}")
    start = f"({' | '.join(starts)})"
    if thinking is not None:
        opened = "thought" if is_open else f"({_text(thinking[0], special)} thought)?"
        start = f"{opened} {start}"
        lines.append(_thought(thinking[1], special))
    return "\n".join([HEADER, f"start: {start}", *lines])


def content_rule(given: StructuredOutput) -> str | None:
    """What constrains an answer, as the right side of a rule; None for the kinds that are whole grammars already."""
    match given.kind:
        case "json_schema":
            return _json(json.loads(given.text))
        case "json_object":
            return _json({"type": "object"})
        case "choice":
            return " | ".join(json.dumps(text) for text in json.loads(given.text))
        case "regex":
            return f"/{_regex(given.text)}/" if given.text else '""'
    return None


def _regex(pattern: str) -> str:
    """With slashes and line ends escaped, as they end a pattern in a grammar."""
    out = []
    escaped = False
    for char in pattern:
        out.append(("" if escaped else "\\") + {"\n": "n"}.get(char, char) if char in "/\n" else char)
        escaped = char == "\\" and not escaped
    return "".join(out)


def strict_grammar(form: ToolFormat, tools: Sequence[Tool], *, special: SpecialToken) -> str:
    """Any text; but what follows a mark that begins a call is a call, with arguments that fit where its tool is strict.

    For formats with a mark; without one, text and call cannot be told apart before the call is over.
    """
    mark = form.marks[0]
    head, middle, tail = form.call
    first = (form.begin + head)[len(mark) :]
    lines = []
    for number, tool in enumerate(tools):
        schema = tool if tool.is_strict else Tool(tool.name, {"type": "object"}, at=tool.at)
        rules, arguments = _arguments(form, schema, number)
        lines.append(f"call_{number}: {_text(tool.name + middle, special)} {arguments} {_text(tail, special)}")
        lines += rules
    one = " | ".join(f"call_{number}" for number in range(len(tools)))
    inner = f"{_text(first, special)} call"
    if form.end:
        inner += f" ({_text(form.separator + head, special)} call)* {_text(form.end, special)}"
    token = special(mark)
    if token is None:
        lines.append(f"opening[lazy]: {_ANY_TEXT} {json.dumps(mark)}")
    else:
        lines += [f"opening: TEXT <[{token}]>", f"TEXT: {_ANY_TEXT}"]
    return "\n".join([HEADER, f"start: (opening {inner})* rest", f"rest: {_ANY_TEXT}", f"call: {one}", *lines])


def _thought(close: str, special: SpecialToken) -> str:
    """With the mark that ends it, and line ends after it."""
    token = special(close)
    if token is None:
        return f"thought: thinking /\\n{{0,2}}/\nthinking[suffix={json.dumps(close)}]: {_ANY_TEXT}"
    return f"thought: THINKING <[{token}]> /\\n{{0,2}}/\nTHINKING: {_ANY_TEXT}"


def _text(text: str, special: SpecialToken) -> str:
    """A literal; a special token at its beginning, which no text can spell, by its id."""
    if not text:
        return '""'
    for end in range(len(text), 0, -1):
        token = special(text[:end]) if text[end - 1] in ">]" else None
        if token is not None:
            rest = f" {_text(text[end:], special)}" if text[end:] else ""
            return f"<[{token}]>{rest}"
    for begin in range(1, len(text)):
        if text[begin] in "<[" and special(_mark_at(text, begin)) is not None:
            return f"{json.dumps(text[:begin])} {_text(text[begin:], special)}"
    return json.dumps(text)


def _mark_at(text: str, begin: int) -> str:
    end = text.find(">" if text[begin] == "<" else "]", begin)
    return text[begin : end + 1]


def _json(schema: Any, *, lenient: bool = False) -> str:
    """`lenient`: keywords that cannot be compiled are left out, where a constraint without them is better than none."""
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {**_SPACING, "lenient": lenient}}
    return f"%json {json.dumps(schema)}"


def _arguments(form: ToolFormat, tool: Tool, number: int) -> tuple[list[str], str]:
    """(rules, the expression that uses them)."""
    schema = closed(tool.parameters)
    if form.name == "pythonic":
        return _keywords(schema, tool, number)
    return [f"arguments_{number}: {_json(schema, lenient=not tool.is_strict)}"], f"arguments_{number}"


def closed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an object with no more than the properties it names, where it says nothing of others: a small
    model would go on inventing some. So are the objects inside it. No parameters at all: no arguments."""
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema: dict[str, Any] = _closed({"type": "object", **parameters})
    return schema


def _closed(schema: Any) -> Any:
    """Looks into properties and items alone: what other keywords join may need more properties than it names."""
    if not isinstance(schema, dict):
        return schema
    schema = dict(schema)
    if isinstance(schema.get("items"), dict):
        schema["items"] = _closed(schema["items"])
    properties = schema.get("properties")
    if isinstance(properties, dict):
        schema["properties"] = {name: _closed(of) for name, of in properties.items()}
        if not any(name in schema for name in _OPEN_ENDED):
            schema["additionalProperties"] = False
    return schema


def _keywords(schema: Mapping[str, Any], tool: Tool, number: int) -> tuple[list[str], str]:
    """Keyword arguments in the order of the properties; values in JSON, which Python's parser of ours reads too.

    `first_i`: the arguments from the i-th on, none being written yet; `more_i`: some are.
    """
    properties, required = schema.get("properties", {}), schema.get("required", ())
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    writable = isinstance(properties, dict) and all(
        key.isascii() and key.isidentifier() and isinstance(of, dict | bool) for key, of in properties.items()
    )
    if not writable or any(name in schema for name in _OPEN_ENDED[1:]):
        raise UnsupportedError(
            f"{tool.at}: arguments of {tool.name} cannot be demanded in the pythonic format: it has keyword arguments "
            "for properties whose names are identifiers, and no others",
            param=tool.at,
        )
    rules = []
    for place, (key, of) in enumerate(properties.items()):
        item = f"item_{number}_{place}"
        skip = ("", "") if key in required else (f" | first_{number}_{place + 1}", f" | more_{number}_{place + 1}")
        value = {**of, **definitions} if isinstance(of, dict) else of
        rules += [
            f"{item}: {json.dumps(key + '=')} {_json(value, lenient=not tool.is_strict)}",
            f"first_{number}_{place}: {item} more_{number}_{place + 1}{skip[0]}",
            f'more_{number}_{place}: ", " {item} more_{number}_{place + 1}{skip[1]}',
        ]
    count = len(properties)
    rules += [f'first_{number}_{count}: ""', f'more_{number}_{count}: ""']
    return rules, f"first_{number}_0"
