"""From a StructuredOutput to the text of a grammar that llguidance compiles.

Knows: llguidance's dialects (Lark with `%json`, https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md),
how JSON is written here. Must not know: tokens. Refuses what cannot be compiled as check.py does; compiles nothing
itself.

JSON is written as Python's json.dumps writes it, on one line with a blank after `:` and `,`. So a small model cannot
stay in blanks for ever, and nearly everything between two values is forced, so that it need not be computed token by
token."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from pinnate.core.errors import InvalidRequestError
from pinnate.core.structured import StructuredOutput

WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
OPTIONS = "x-guidance"  # the member of a schema that sets options of its compilation
_EMBEDDED = re.compile(r"%json\s*(?=\{)")
_GBNF = re.compile(r"::=")
LARK_HEADER = "%llguidance"  # begins a grammar that is Lark whatever its texts look like


def grammar_of(structured: StructuredOutput) -> str:
    """
    Raises:
        InvalidRequestError: a grammar that cannot be read. What llguidance finds when it compiles comes later.
    """
    text = structured.text
    match structured.kind:
        case "json_object":
            return _from_schema('{"type": "object"}')
        case "json_schema":
            return _from_schema(text)
        case "regex":
            return str(LLMatcher.grammar_from_regex(text))
        case "choice":
            return _from_lark("start: " + " | ".join(quoted(choice) for choice in json.loads(text)))
        case "grammar":
            return _from_lark(_lark(text, structured.param))
        case "structural_tag":
            return _from_tags(json.loads(text))


def embedded_schemas(grammar: str) -> list[tuple[int, int, Any]]:
    """(start, end, schema) of each `%json {...}` that can be read."""
    found = []
    for match in _EMBEDDED.finditer(grammar):
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, match.end())
        except (ValueError, RecursionError):
            continue  # llguidance says what is wrong
        found.append((match.end(), end, schema))
    return found


def quoted(text: str) -> str:
    """A text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def _from_schema(schema: str) -> str:
    return str(LLMatcher.grammar_from_json_schema(schema, overrides=WHITESPACE))  # type: ignore[arg-type]


def _from_lark(lark: str) -> str:
    return str(LLMatcher.grammar_from_lark(lark))


def _lark(text: str, param: str) -> str:
    if _GBNF.search(text) and not text.startswith(LARK_HEADER):
        try:
            text = any_to_lark(text)
        except Exception as error:  # of the converter's own kind, or an IndexError where the text ends too soon
            raise InvalidRequestError(
                f"{param} is not a GBNF grammar: {' '.join(str(error).split())}", param=param
            ) from None
    parts, end = [], 0
    for start, after, schema in embedded_schemas(text):
        parts += [text[end:start], json.dumps(_with_whitespace(schema), ensure_ascii=False)]
        end = after
    return "".join([*parts, text[end:]])


def _with_whitespace(schema: Any) -> Any:
    return {**schema, OPTIONS: WHITESPACE} if isinstance(schema, dict) else schema


def _from_tags(given: Any) -> str:
    """Free text in which each trigger begins a structure: `begin`, a value of its schema, `end`."""
    triggers = given["triggers"]
    tags = [
        StructTag(
            trigger=next(trigger for trigger in triggers if structure["begin"].startswith(trigger)),
            begin=structure["begin"],
            grammar=_with_whitespace(structure["schema"]),
            end=structure["end"],
        )
        for structure in given["structures"]
    ]
    return StructTag.to_grammar(tags, assume_special=False)
