"""Checks a JSON schema before it is compiled, so that a fault has a path and nothing is ignored in silence.

Knows: the keywords of drafts 4 to 2020-12, which of them llguidance follows
(https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md), sizes. Must not know: grammars, tokens.
Keywords that say nothing about validity (title, default, x-...) and those that no draft knows are left alone, as JSON
Schema asks; a known one that cannot be followed is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from pinnate.text.grammars.faults import Fault
from pinnate.text.grammars.formats import with_exact_format
from pinnate.text.grammars.limits import MAX_DEPTH, MAX_NODES
from pinnate.text.grammars.regex_cost import check_regex

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
MAX_REFS = 500  # of a schema in which endless recursion is looked for

_ONE = ("additionalProperties", "additionalItems", "items")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_UNSUPPORTED = frozenset(
    {
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames"),
        *("dependentSchemas", "dependentRequired", "dependencies", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$recursiveRef", "x-guidance"),
    }
)
# Values with which an unsupported keyword allows everything.
_NEUTRAL: Mapping[str, Any] = MappingProxyType(
    {"uniqueItems": False, "unevaluatedItems": True, "unevaluatedProperties": True, "propertyNames": True}
)


def check_schema(schema: Any, *, lenient: bool = False) -> Any:
    """The schema as it can be compiled: with exact formats (formats.py), without keywords that allow everything. With
    `lenient`, also without those that are not supported: whoever asks for that takes values that they would forbid.

    Raises:
        Fault: with the path of what is wrong, too large or unsupported.
    """
    checked = _Walk(lenient).clean(schema, "#", 0)
    _check_finite(checked)
    return checked


class _Walk:
    def __init__(self, lenient: bool) -> None:
        self._lenient = lenient
        self._nodes = 0

    def clean(self, schema: Any, path: str, depth: int) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise Fault(f"there are more than {MAX_NODES} schemas within the schema")
        if depth > MAX_DEPTH:
            raise Fault(f"schemas are nested more than {MAX_DEPTH} deep", path)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise Fault(f"a schema must be an object or a boolean, not {_kind(schema)}", path)
        found = {}
        for name, value in schema.items():
            here = f"{path}/{_escape(name)}"
            if name == "$id" and depth > 0:
                raise Fault("$id is supported at the root only", here, unsupported=True)
            if name in _UNSUPPORTED:
                if self._lenient or (name in _NEUTRAL and _NEUTRAL[name] is value):
                    continue
                raise Fault(f"{name} is not supported", here, unsupported=True)
            found[name] = self._keyword(name, value, here, depth)
        if not self._lenient:
            _check_counts(found, path)
        return with_exact_format(found)

    def _keyword(self, name: str, value: Any, here: str, depth: int) -> Any:
        if name in _MAPS:
            _need(isinstance(value, dict), f"{name} must be an object", here)
            if name == "patternProperties":
                for pattern in value:
                    _at(f"{here}/{_escape(pattern)}", check_regex, pattern)
            return {key: self.clean(sub, f"{here}/{_escape(key)}", depth + 1) for key, sub in value.items()}
        if name in _LISTS or (name == "items" and isinstance(value, list)):
            _need(isinstance(value, list) and len(value) > 0, f"{name} must be a list of schemas, not empty", here)
            return [self.clean(sub, f"{here}/{i}", depth + 1) for i, sub in enumerate(value)]
        if name in _ONE:
            return self.clean(value, here, depth + 1)
        check = _CHECKS.get(name)
        if check is not None:
            _at(here, check, value)
        return value


def _check_type(value: Any) -> None:
    given = value if isinstance(value, list) else [value]
    for one in given:
        if one not in TYPES or not isinstance(one, str):
            shown = repr(one)[:64] if isinstance(one, str) else _kind(one)
            raise Fault(f"type must be one of {', '.join(TYPES)}, or a list of them; got {shown}")
    if not given:
        raise Fault("type must not be an empty list")


def _check_count(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise Fault("must be a number without fraction, 0 or more")


def _check_number(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Fault(f"must be a number, not {_kind(value)}")


def _check_divisor(value: Any) -> None:
    _check_number(value)
    if value <= 0:
        raise Fault("must be above 0")


def _check_pattern(value: Any) -> None:
    if not isinstance(value, str):
        raise Fault(f"pattern must be a string, not {_kind(value)}")
    check_regex(value)


def _check_format(value: Any) -> None:
    if not isinstance(value, str):
        raise Fault(f"format must be a string, not {_kind(value)}")


def _check_enum(value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise Fault("enum must be a list, not empty")


def _check_required(value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise Fault("required must be a list of strings")


def _check_ref(value: Any) -> None:
    if not isinstance(value, str):
        raise Fault(f"$ref must be a string, not {_kind(value)}")
    if not value.startswith("#"):
        raise Fault(f"$ref {value[:128]!r}: only references within the schema (#...) are followed", unsupported=True)


_CHECKS: Mapping[str, Callable[[Any], None]] = MappingProxyType(
    {
        "type": _check_type,
        "enum": _check_enum,
        "required": _check_required,
        "pattern": _check_pattern,
        "format": _check_format,
        "$ref": _check_ref,
        "multipleOf": _check_divisor,
        **dict.fromkeys(
            ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _check_count
        ),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _check_number),
    }
)


def _check_counts(schema: Mapping[str, Any], path: str) -> None:
    """A name may come twice where names are free, and two of a name are one property."""
    if schema.get("minProperties", 0) > max(1, len(set(schema.get("required", ())))):
        message = "minProperties is supported up to the number of required properties (or 1)"
        raise Fault(message, f"{path}/minProperties", unsupported=True)


def _check_finite(root: Any) -> None:
    """
    Raises:
        Fault: no finite value fits, since a schema needs itself.
    """
    targets = {ref: _resolve(root, ref) for ref in _refs(root)}
    if len(targets) > MAX_REFS:
        return
    ends: set[str] = set()
    while True:
        more = {ref for ref, target in targets.items() if ref not in ends and _has_end(target, ends)}
        if not more:
            break
        ends |= more
    if not _has_end(root, ends):
        endless = next((ref for ref in targets if ref not in ends), "#")
        raise Fault("no finite value fits: the schema needs itself", endless if endless.startswith("#") else "#")


def _has_end(schema: Any, ends: set[str]) -> bool:
    """Whether a finite value fits, given the references known to have one. True where it is not obvious."""
    if not isinstance(schema, dict):
        return True
    if "$ref" in schema and schema["$ref"] not in ends:
        return False
    if not all(_has_end(sub, ends) for sub in schema.get("allOf", ())):
        return False
    for name in ("anyOf", "oneOf"):
        if name in schema and not any(_has_end(sub, ends) for sub in schema[name]):
            return False
    kind = schema.get("type")
    properties = schema.get("properties", {})
    needed = [properties[name] for name in schema.get("required", ()) if name in properties]
    if kind == "object" and not all(_has_end(sub, ends) for sub in needed):
        return False
    return not (kind == "array" and schema.get("minItems", 0) > 0 and not _has_end(schema.get("items"), ends))


def subschemas(schema: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The schemas directly within a checked one, with their paths."""
    if not isinstance(schema, dict):
        return
    for name, value in schema.items():
        here = f"{path}/{_escape(name)}"
        if name in _MAPS:
            yield from ((f"{here}/{_escape(key)}", sub) for key, sub in value.items())
        elif name in _LISTS or (name == "items" and isinstance(value, list)):
            yield from ((f"{here}/{i}", sub) for i, sub in enumerate(value))
        elif name in _ONE:
            yield here, value


def _refs(root: Any) -> set[str]:
    found: set[str] = set()
    waiting = [root]
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, dict) and "$ref" in schema:
            found.add(schema["$ref"])
        waiting += [sub for _, sub in subschemas(schema, "")]
    return found


def _resolve(root: Any, ref: str) -> Any:
    """What a local pointer points to; True (anything) for every other kind of reference."""
    if not ref.startswith("#") or (len(ref) > 1 and ref[1] != "/"):
        return True
    at = root
    for part in ref[2:].split("/") if len(ref) > 1 else ():
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(at, dict) and name in at:
            at = at[name]
        elif isinstance(at, list) and name.isdecimal() and int(name) < len(at):
            at = at[int(name)]
        else:
            raise Fault(f"$ref {ref[:128]!r} points to nothing", "#")
    return at


def _at(path: str, check: Callable[[Any], None], value: Any) -> None:
    try:
        check(value)
    except Fault as fault:
        raise fault.at(path) from None


def _need(holds: bool, message: str, path: str) -> None:
    if not holds:
        raise Fault(message, path)


def _escape(name: str) -> str:
    return name[:64].replace("~", "~0").replace("/", "~1")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
