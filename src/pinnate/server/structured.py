"""From the fields that constrain an output, whichever API they come from, to one StructuredOutput. Pure.

Knows: OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*`, SGLang's `json_schema`,
`regex`, `ebnf` and `structural_tag`; their shapes. Must not know: what a schema or a pattern means
(text/grammars checks and compiles it), the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from pinnate.core.errors import InvalidRequestError, UnsupportedError
from pinnate.core.structured import StructuredKind, StructuredOutput
from pinnate.server.body import FieldNotes, without_nulls
from pinnate.text.grammars.closed import closed

# Fields of a body, each a constraint alone, and the kind of those that hold one directly.
_DIRECT: Mapping[str, StructuredKind] = MappingProxyType(
    {
        "guided_json": "json_schema",
        "guided_regex": "regex",
        "guided_choice": "choice",
        "guided_grammar": "grammar",
        "json_schema": "json_schema",
        "regex": "regex",
        "ebnf": "grammar",
        "structural_tag": "structural_tag",
    }
)
CONSTRAINTS = ("response_format", "structured_outputs", *_DIRECT)

_MEMBERS: Mapping[str, StructuredKind] = MappingProxyType(
    {
        "json": "json_schema",
        "regex": "regex",
        "choice": "choice",
        "grammar": "grammar",
        "structural_tag": "structural_tag",
    }
)
_FORMAT_MEMBERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "text": ("type",),
        "json_object": ("type", "schema"),
        "json_schema": ("type", "json_schema"),
        "structural_tag": ("type", "structures", "triggers", "format"),
        "grammar": ("type", "grammar"),
        "regex": ("type", "regex"),
    }
)
# Members of `structured_outputs` that choose among ways to do it; here there is one way, and its whitespace is fixed.
_NEUTRAL_MEMBERS = ("disable_fallback", "disable_any_whitespace")


def structured_output(fields: Mapping[str, Any], notes: FieldNotes | None = None) -> StructuredOutput | None:
    """The one constraint among `fields` (names in CONSTRAINTS; others are not looked at; None is: not given). `notes`
    takes members that are not known; without it they are refused.

    Raises:
        InvalidRequestError: two constraints at once, or one of the wrong shape; `param` names the field.
        UnsupportedError: a kind that is known of and not offered.
    """
    notes = notes or FieldNotes()
    found: list[StructuredOutput] = []
    for name in CONSTRAINTS:
        value = fields.get(name)
        if value is None:
            continue
        if name == "response_format":
            one = response_format(value, notes)
        elif name == "structured_outputs":
            one = _structured_outputs(value, notes)
        else:
            one = _of_kind(_DIRECT[name], value, name, notes)
        if one is not None:
            found.append(one)
    if len(found) > 1:
        raise InvalidRequestError(
            f"{found[1].param} and {found[0].param} both constrain the output: only one is allowed",
            param=found[1].param.partition(".")[0],
        )
    return found[0] if found else None


def response_format(value: Any, notes: FieldNotes, at: str = "response_format") -> StructuredOutput | None:
    """OpenAI's object, and what SGLang and vLLM allow in its place. None for plain text. `at` names it in errors.

    Raises:
        InvalidRequestError: another shape, or an unknown type.
    """
    given = _object(value, at)
    kind = given.get("type")
    if isinstance(kind, str) and kind in _FORMAT_MEMBERS:
        notes.check(given, _FORMAT_MEMBERS[kind], at)
    match kind:
        case "text":
            return None
        case "json_object":
            if given.get("schema") is not None:
                return _of_kind("json_schema", given["schema"], f"{at}.schema", notes)
            return StructuredOutput(kind="json_object", param=at)
        case "json_schema":
            here = f"{at}.json_schema"
            inner = _object(_required(given, "json_schema", at), here)
            notes.check(inner, ("name", "description", "schema", "strict"), here)
            if inner.get("strict") is not None and not isinstance(inner["strict"], bool):
                raise InvalidRequestError(f"{here}.strict must be a boolean", param=f"{here}.strict")
            schema = _required(inner, "schema", here)
            return _of_kind("json_schema", schema, f"{here}.schema", notes, closes=inner.get("strict") is True)
        case "structural_tag":
            return _of_kind("structural_tag", given, at, notes)
        case "grammar":
            return _of_kind("grammar", _required(given, "grammar", at), f"{at}.grammar", notes)
        case "regex":
            return _of_kind("regex", _required(given, "regex", at), f"{at}.regex", notes)
    kinds = "text, json_object, json_schema, structural_tag, grammar or regex"
    raise InvalidRequestError(f"{at}.type must be {kinds}, got {_shown(kind)}", param=f"{at}.type")


def _structured_outputs(value: Any, notes: FieldNotes) -> StructuredOutput | None:
    at = "structured_outputs"
    given = without_nulls(_object(value, at))
    for name in _NEUTRAL_MEMBERS:
        if not isinstance(given.pop(name, False), bool):
            raise InvalidRequestError(f"{at}.{name} must be a boolean", param=f"{at}.{name}")
    if given.pop("whitespace_pattern", False):
        raise UnsupportedError(
            f"{at}.whitespace_pattern is not supported by this server", param=f"{at}.whitespace_pattern"
        )
    closes = given.pop("disable_additional_properties", False)
    if not isinstance(closes, bool):
        raise InvalidRequestError(f"{at}.disable_additional_properties must be a boolean", param=at)
    known = (*_MEMBERS, "json_object")
    notes.check(given, known, at)
    given = {name: member for name, member in given.items() if name in known}
    if given.get("json_object") is False:
        del given["json_object"]
    if len(given) != 1:
        many = f"got {', '.join(sorted(given))}" if given else "got none"
        raise InvalidRequestError(f"{at} must have exactly one of {', '.join(_MEMBERS)}, json_object; {many}", param=at)
    name, member = next(iter(given.items()))
    if name != "json_object":
        return _of_kind(_MEMBERS[name], member, f"{at}.{name}", notes, closes=closes)
    if member is not True:
        raise InvalidRequestError(f"{at}.json_object must be a boolean", param=f"{at}.json_object")
    return StructuredOutput(kind="json_object", param=f"{at}.json_object")


def _of_kind(kind: StructuredKind, value: Any, at: str, notes: FieldNotes, *, closes: bool = False) -> StructuredOutput:
    if closes and kind == "json_schema":
        value = closed(_decode(value, at) if isinstance(value, str) else value)
    text = _structural_tag(value, at, notes) if kind == "structural_tag" else _TEXTS[kind](value, at)
    return StructuredOutput(kind=kind, text=text, param=at)


def _schema(value: Any, at: str) -> str:
    """A schema as JSON: an object or a boolean, or its text."""
    if isinstance(value, str):
        value = _decode(value, at)
    if not isinstance(value, dict | bool):
        raise InvalidRequestError(f"{at} must be a JSON schema: an object or a boolean, not {_type(value)}", param=at)
    return msgspec.json.encode(value).decode()


def _text(value: Any, at: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{at} must be a string, not {_type(value)}", param=at)
    return value


def _choice(value: Any, at: str) -> str:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise InvalidRequestError(f"{at} must be a list of one or more strings", param=at)
    return msgspec.json.encode(value).decode()


def _structural_tag(value: Any, at: str, notes: FieldNotes) -> str:
    given = _object(_decode(value, at) if isinstance(value, str) else value, at)
    if "format" in given:
        raise UnsupportedError(f"{at}.format is not supported; use structures and triggers", param=at)
    known = ("type", "structures", "triggers")
    notes.check(given, known, at)
    return msgspec.json.encode({name: member for name, member in given.items() if name in known}).decode()


_TEXTS: Mapping[StructuredKind, Callable[[Any, str], str]] = MappingProxyType(
    {"json_schema": _schema, "regex": _text, "choice": _choice, "grammar": _text}
)


def _decode(text: str, at: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequestError(f"{at} is not valid JSON: {error}", param=at) from None


def _object(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{at} must be an object, not {_type(value)}", param=at)
    return value


def _required(given: Mapping[str, Any], name: str, at: str) -> Any:
    if given.get(name) is None:
        raise InvalidRequestError(f"{at}.{name} is required", param=f"{at}.{name}")
    return given[name]


def _shown(value: Any) -> str:
    return repr(value[:64]) if isinstance(value, str) else _type(value)


def _type(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
