"""From what a client sent to what is compiled: checked, in one of few forms, then as a grammar of llguidance.

Knows: the kinds of StructuredOutput, llguidance's dialects (Lark with `%json`,
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md), GBNF, how JSON is written here. Must not know:
tokens.

JSON is written as Python's json.dumps writes it: on one line, with a blank after `:` and `,`. So a small model cannot
stay in blanks for ever, and what lies between two values is forced, so that it need not be drawn token by token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from pinnate.core.structured import StructuredKind, StructuredOutput
from pinnate.text.grammars.faults import Fault
from pinnate.text.grammars.limits import MAX_CHOICES, MAX_REGEX_SIZE, MAX_TAGS
from pinnate.text.grammars.regex_cost import check_regex
from pinnate.text.grammars.schema import check_schema

WHITESPACE = MappingProxyType({"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "})
LARK_HEADER = "%llguidance"  # begins a grammar that is Lark whatever its texts look like
_OPTIONS = "x-guidance"  # the member of a schema that sets options of its compilation
_EMBEDDED = re.compile(r"%json\s*(?=\{)")
_REPEATS = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}|~\s*(\d+)(?:\s*\.\.\s*(\d+))?")
_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_PATTERN = re.compile(r"/((?:[^/\\\n]|\\.)+)/")


def checked(structured: StructuredOutput) -> StructuredOutput:
    """The same language with every fault found that can be found without compiling; GBNF as Lark, structural tags as
    Lark, schemas without keywords that allow everything. `grammar_of` takes these alone. Checking it again changes
    nothing.

    Raises:
        Fault: with the path of what is wrong, too large or unsupported.
    """
    kind, text = _CHECKS[structured.kind](structured.text)
    return StructuredOutput(kind=kind, text=text, param=structured.param)


def grammar_of(structured: StructuredOutput) -> str:
    """The grammar of a checked language, as llguidance takes it. Quick: the engine's process does it."""
    text = structured.text
    match structured.kind:
        case "json_object":
            return _of_schema('{"type": "object"}')
        case "json_schema":
            return _of_schema(text)
        case "regex":
            return str(LLMatcher.grammar_from_regex(text))
        case "choice":
            return _of_lark("start: " + " | ".join(_quoted(choice) for choice in json.loads(text)))
        case "grammar" | "structural_tag":
            return _of_lark(text)


def _of_schema(schema: str) -> str:
    return str(LLMatcher.grammar_from_json_schema(schema, overrides=dict(WHITESPACE)))  # type: ignore[arg-type]


def _of_lark(lark: str) -> str:
    return str(LLMatcher.grammar_from_lark(lark))


def _quoted(text: str) -> str:
    """A text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def _check_object(_: str) -> tuple[StructuredKind, str]:
    return "json_object", ""


def _check_json_schema(text: str) -> tuple[StructuredKind, str]:
    schema = check_schema(_decode(text))
    if schema is False:
        raise Fault("no value fits the schema false", "#")
    return "json_schema", json.dumps({} if schema is True else schema, ensure_ascii=False)


def _check_regex(text: str) -> tuple[StructuredKind, str]:
    check_regex(text)
    return "regex", text


def _check_choice(text: str) -> tuple[StructuredKind, str]:
    choices = _decode(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise Fault("must be a list of one or more strings")
    if len(choices) > MAX_CHOICES:
        raise Fault(f"there are {len(choices)} choices, at most {MAX_CHOICES} are allowed")
    return "choice", text


def _check_grammar(text: str) -> tuple[StructuredKind, str]:
    if "::=" in text and not text.startswith(LARK_HEADER):
        try:
            text = any_to_lark(text)
        except Exception as error:  # of the converter's own kind, or an IndexError where the text ends too soon
            raise Fault(f"not a grammar in GBNF: {' '.join(str(error).split())[:300]}") from None
    parts, end = [], 0
    for match in _EMBEDDED.finditer(text):
        if match.start() < end:
            continue  # inside the schema before
        try:
            schema, after = json.JSONDecoder().raw_decode(text, match.end())
        except ValueError as error:
            raise Fault(f"%json at position {match.start()} is not JSON: {error}") from None
        except RecursionError:
            raise Fault(f"%json at position {match.start()} is nested too deep") from None
        parts += [text[end : match.end()], json.dumps(_embedded(schema), ensure_ascii=False)]
        _check_repetitions(text[end : match.start()])
        end = after
    _check_repetitions(text[end:])
    return "grammar", "".join([*parts, text[end:]])


def _embedded(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema within a grammar: checked, with its whitespace set."""
    plain = {name: value for name, value in schema.items() if name != _OPTIONS}
    options = schema.get(_OPTIONS, {})
    if not isinstance(options, dict) or any(
        WHITESPACE.get(name, value) != value or name not in (*WHITESPACE, "lenient") for name, value in options.items()
    ):
        raise Fault(f"{_OPTIONS} may set lenient alone", f"#/{_OPTIONS}", unsupported=True)
    lenient = options.get("lenient") is True
    return {**check_schema(plain, lenient=lenient), _OPTIONS: {**WHITESPACE, "lenient": lenient}}


def _check_repetitions(lark: str) -> None:
    for pattern in _PATTERN.finditer(_LITERAL.sub('""', lark)):
        check_regex(pattern[1])
    rest = _PATTERN.sub("//", _LITERAL.sub('""', lark))
    for repeat in _REPEATS.finditer(rest):
        if any(len(number) > 9 or int(number) > MAX_REGEX_SIZE for number in repeat.groups() if number):
            raise Fault(f"{repeat[0][:32]} repeats more than {MAX_REGEX_SIZE} times")


def _check_tags(text: str) -> tuple[StructuredKind, str]:
    """Free text in which each trigger begins a structure: `begin`, a value of its schema, `end`."""
    given = _decode(text) if text.lstrip().startswith("{") else None
    if given is None:
        return _check_grammar(text)  # as this function made it
    triggers, structures = given.get("triggers"), given.get("structures")
    if not isinstance(triggers, list) or not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise Fault("triggers must be a list of strings, none of them empty", "#/triggers")
    if not isinstance(structures, list) or not 0 < len(structures) <= MAX_TAGS:
        raise Fault(f"structures must be a list of 1 to {MAX_TAGS} objects", "#/structures")
    tags = [_tag(structure, triggers, f"#/structures/{number}") for number, structure in enumerate(structures)]
    return "grammar", StructTag.to_grammar(tags, assume_special=False)


def _tag(structure: Any, triggers: list[str], path: str) -> StructTag:
    if not isinstance(structure, dict) or structure.keys() - {"begin", "schema", "end"}:
        raise Fault("must be an object with begin, schema and end", path)
    begin, end, schema = structure.get("begin"), structure.get("end", ""), structure.get("schema", {})
    if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict):
        raise Fault("begin and end must be strings, schema an object", path)
    trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
    if trigger is None:
        raise Fault(f"begin {begin[:64]!r} starts with none of the triggers", f"{path}/begin")
    try:
        return StructTag(trigger=trigger, begin=begin, grammar=_embedded(schema), end=end)
    except Fault as fault:
        raise fault.at(f"{path}/schema") from None


_CHECKS: Mapping[StructuredKind, Callable[[str], tuple[StructuredKind, str]]] = MappingProxyType(
    {
        "json_object": _check_object,
        "json_schema": _check_json_schema,
        "regex": _check_regex,
        "choice": _check_choice,
        "grammar": _check_grammar,
        "structural_tag": _check_tags,
    }
)


def _decode(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise Fault(f"not valid JSON: {error}") from None
    except RecursionError:
        raise Fault("not valid JSON: nested too deep") from None
