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
# Members of `structured_outputs` that choose among ways to do it; here there is one way, and its whitespace is fixed.
_NEUTRAL_MEMBERS = ("disable_fallback", "disable_any_whitespace")


def structured_output(fields: Mapping[str, Any]) -> StructuredOutput | None:
    """The one constraint among `fields` (names in CONSTRAINTS; others are not looked at; None is: not given).

    Raises:
        InvalidRequestError: two constraints at once, or one of the wrong shape; `param` names the field.
        UnsupportedError: a kind that is known of and not offered.
    """
    found: list[StructuredOutput] = []
    for name in CONSTRAINTS:
        value = fields.get(name)
        if value is None:
            continue
        if name == "response_format":
            one = response_format(value)
        elif name == "structured_outputs":
            one = _structured_outputs(value)
        else:
            one = _of_kind(_DIRECT[name], value, name)
        if one is not None:
            found.append(one)
    if len(found) > 1:
        raise InvalidRequestError(
            f"{found[1].param} and {found[0].param} both constrain the output: only one is allowed",
            param=found[1].param.partition(".")[0],
        )
    return found[0] if found else None


def response_format(value: Any, at: str = "response_format") -> StructuredOutput | None:
    """OpenAI's object, and what SGLang and vLLM allow in its place. None for plain text. `at` names it in errors.

    Raises:
        InvalidRequestError: another shape, or an unknown type.
    """
    given = _object(value, at)
    kind = given.get("type")
    match kind:
        case "text":
            return None
        case "json_object":
            if given.get("schema") is not None:
                return _of_kind("json_schema", given["schema"], f"{at}.schema")
            return StructuredOutput(kind="json_object", param=at)
        case "json_schema":
            here = f"{at}.json_schema"
            inner = _object(_required(given, "json_schema", at), here)
            _known(inner, ("name", "description", "schema", "strict"), here)
            if inner.get("strict") is not None and not isinstance(inner["strict"], bool):
                raise InvalidRequestError(f"{here}.strict must be a boolean", param=f"{here}.strict")
            schema = _required(inner, "schema", here)
            return _of_kind("json_schema", schema, f"{here}.schema", closes=inner.get("strict") is True)
        case "structural_tag":
            return _of_kind("structural_tag", given, at)
        case "grammar":
            return _of_kind("grammar", _required(given, "grammar", at), f"{at}.grammar")
        case "regex":
            return _of_kind("regex", _required(given, "regex", at), f"{at}.regex")
    kinds = "text, json_object, json_schema, structural_tag, grammar or regex"
    raise InvalidRequestError(f"{at}.type must be {kinds}, got {_shown(kind)}", param=f"{at}.type")


def _structured_outputs(value: Any) -> StructuredOutput | None:
    at = "structured_outputs"
    given = {name: member for name, member in _object(value, at).items() if member is not None}
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
    _known(given, (*_MEMBERS, "json_object"), at)
    if given.get("json_object") is False:
        del given["json_object"]
    if len(given) != 1:
        many = f"got {', '.join(sorted(given))}" if given else "got none"
        raise InvalidRequestError(f"{at} must have exactly one of {', '.join(_MEMBERS)}, json_object; {many}", param=at)
    name, member = next(iter(given.items()))
    if name != "json_object":
        return _of_kind(_MEMBERS[name], member, f"{at}.{name}", closes=closes)
    if member is not True:
        raise InvalidRequestError(f"{at}.json_object must be a boolean", param=f"{at}.json_object")
    return StructuredOutput(kind="json_object", param=f"{at}.json_object")


def _of_kind(kind: StructuredKind, value: Any, at: str, *, closes: bool = False) -> StructuredOutput:
    if closes and kind == "json_schema":
        value = closed(_decode(value, at) if isinstance(value, str) else value)
    return StructuredOutput(kind=kind, text=_TEXTS[kind](value, at), param=at)


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


def _structural_tag(value: Any, at: str) -> str:
    given = _object(_decode(value, at) if isinstance(value, str) else value, at)
    if "format" in given:
        raise UnsupportedError(f"{at}.format is not supported; use structures and triggers", param=at)
    _known(given, ("type", "structures", "triggers"), at)
    return msgspec.json.encode(given).decode()


_TEXTS: Mapping[StructuredKind, Callable[[Any, str], str]] = MappingProxyType(
    {"json_schema": _schema, "regex": _text, "choice": _choice, "grammar": _text, "structural_tag": _structural_tag}
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


def _known(given: Mapping[str, Any], names: tuple[str, ...], at: str) -> None:
    for name in given:
        if name not in names:
            raise InvalidRequestError(f"unknown field: {at}.{name[:64]}", param=f"{at}.{name[:64]}")


def _shown(value: Any) -> str:
    return repr(value[:64]) if isinstance(value, str) else _type(value)


def _type(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
