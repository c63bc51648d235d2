"""What is wrong with a schema is told with its path; what cannot be followed is refused by name, not ignored."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinnate.core.errors import InvalidRequestError, UnsupportedError
from pinnate.text.grammars.faults import Fault
from pinnate.text.grammars.formats import PATTERNS
from pinnate.text.grammars.limits import MAX_DEPTH, MAX_NODES
from pinnate.text.grammars.schema import check_schema, subschemas

SCHEMAS = json.loads((Path(__file__).parents[3] / "data" / "schemas.json").read_text(encoding="utf-8"))


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


INVALID: list[tuple[Any, str]] = [
    ("text", "#"),
    (5, "#"),
    ({"type": "foo"}, "#/type"),
    ({"type": []}, "#/type"),
    ({"type": ["string", 5]}, "#/type"),
    ({"properties": 5}, "#/properties"),
    ({"properties": {"a/b": {"type": "x"}}}, "#/properties/a~1b/type"),
    ({"items": {"items": {"pattern": 5}}}, "#/items/items/pattern"),
    ({"items": [{"minimum": "1"}]}, "#/items/0/minimum"),
    ({"anyOf": []}, "#/anyOf"),
    ({"anyOf": [True, {"enum": []}]}, "#/anyOf/1/enum"),
    ({"required": "a"}, "#/required"),
    ({"$defs": {"d": {"minLength": -1}}}, "#/$defs/d/minLength"),
    ({"maxItems": 1.5}, "#/maxItems"),
    ({"multipleOf": 0}, "#/multipleOf"),
    ({"exclusiveMinimum": True}, "#/exclusiveMinimum"),  # of draft 4
    ({"pattern": "a**"}, "#/pattern"),
    ({"patternProperties": {"a{99999}": {}}}, "#/patternProperties/a{99999}"),
    ({"format": 5}, "#/format"),
    ({"$ref": 5}, "#/$ref"),
    ({"$ref": "#/$defs/none"}, "#"),
    ({"additionalProperties": {"additionalItems": 7}}, "#/additionalProperties/additionalItems"),
    (nested(MAX_DEPTH + 1), "#" + "/properties/a" * (MAX_DEPTH + 1)),
]


@pytest.mark.parametrize(("schema", "path"), INVALID, ids=lambda v: str(v)[:40])
def test_a_fault_has_a_path(schema: Any, path: str) -> None:
    with pytest.raises(Fault) as caught:
        check_schema(schema)
    assert caught.value.path == path
    error = caught.value.error("guided_json")
    assert type(error) is InvalidRequestError
    assert error.param == "guided_json"
    assert error.message.startswith(f"guided_json at {path[:250]}")


UNSUPPORTED = [
    *({name: {}} for name in ("not", "if", "contains", "propertyNames", "dependentSchemas", "unevaluatedProperties")),
    {"uniqueItems": True},
    {"dependencies": {"a": ["b"]}},
    {"$dynamicRef": "#a"},
    {"x-guidance": {"lenient": True}},
    {"$ref": "http://127.0.0.1:1/x"},
    {"$ref": "other.json#/a"},
    {"properties": {"a": {"$id": "http://a/b"}}},
    {"minProperties": 2},
]


@pytest.mark.parametrize("schema", UNSUPPORTED, ids=str)
def test_what_cannot_be_followed_is_refused_by_name(schema: Any) -> None:
    with pytest.raises(Fault) as caught:
        check_schema({"items": schema} if "$id" not in str(schema) else schema)
    assert caught.value.unsupported
    assert type(caught.value.error("x")) is UnsupportedError
    name = next(name for name in ("$id", *schema) if name in str(schema))
    assert caught.value.path.endswith(f"/{name}")


def test_lenient_leaves_out_what_is_not_supported() -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"not": {"const": 1}, "type": "integer"}}
    assert check_schema(schema, lenient=True) == {"type": "array", "items": {"type": "integer"}}
    with pytest.raises(Fault):
        check_schema({"$ref": "http://a/b"}, lenient=True)


def test_keywords_that_allow_everything_are_left_out_and_unknown_ones_kept() -> None:
    schema = {"uniqueItems": False, "unevaluatedProperties": True, "x-mine": 1, "title": "t", "propertyNames": True}
    assert check_schema(schema) == {"x-mine": 1, "title": "t"}
    assert check_schema({"properties": {"uniqueItems": {"type": "null"}}}) == {
        "properties": {"uniqueItems": {"type": "null"}}
    }


ENDLESS: list[tuple[Any, str]] = [
    ({"$ref": "#"}, "#"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "#/$defs/"),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#"),
    ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "#"),
    ({"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}, {"type": "null"}]}]}, "#"),
]


@pytest.mark.parametrize(("schema", "path"), ENDLESS)
def test_a_schema_that_needs_itself_has_no_finite_value(schema: Any, path: str) -> None:
    with pytest.raises(Fault, match="no finite value") as caught:
        check_schema(schema)
    assert caught.value.path.startswith(path)


@pytest.mark.parametrize("name", SCHEMAS)
def test_sound_schemas_are_taken_and_checked_again_they_are_the_same(name: str) -> None:
    once = check_schema(SCHEMAS[name])
    assert check_schema(once) == once
    assert list(once.get("properties", {})) == list(SCHEMAS[name].get("properties", {}))  # the order of an output


def test_recursion_that_can_end_is_taken() -> None:
    tree = {"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#"}}}, "required": ["a"]}
    assert check_schema(tree) == tree


def test_too_many_schemas() -> None:
    with pytest.raises(Fault, match=f"{MAX_NODES}"):
        check_schema({"properties": {f"p{i}": {} for i in range(MAX_NODES)}})


def test_subschemas_have_the_paths_of_faults() -> None:
    schema = {"properties": {"a/b": {}}, "items": [True, {}], "anyOf": [{}], "additionalProperties": {}, "enum": [{}]}
    paths = [path for path, _ in subschemas(schema, "#")]
    assert paths == ["#/properties/a~1b", "#/items/0", "#/items/1", "#/anyOf/0", "#/additionalProperties"]


@given(st.dates())
def test_every_date_has_the_format(date: datetime.date) -> None:
    assert re.search(PATTERNS["date"], date.isoformat())


@given(st.integers(1, 9999), st.integers(0, 13), st.integers(0, 32))
def test_nothing_else_has_it(year: int, month: int, day: int) -> None:
    text = f"{year:04d}-{month:02d}-{day:02d}"
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        assert not re.search(PATTERNS["date"], text)


@pytest.mark.parametrize("text", ["23:59:60Z", "24:00:00Z", "1:00:00Z", "12:00:00", "12:00:00.Z", "12:00:00+24:00"])
def test_times_that_are_none(text: str) -> None:
    assert not re.search(PATTERNS["time"], text)
    assert not re.search(PATTERNS["date-time"], f"2024-02-29T{text}")
    assert re.search(PATTERNS["date-time"], "2024-02-29T23:59:59.25-01:30")


def test_a_format_beside_a_pattern_keeps_both() -> None:
    found = check_schema({"format": "date", "pattern": "^2"})
    assert found == {"pattern": "^2", "allOf": [{"pattern": PATTERNS["date"]}]}
