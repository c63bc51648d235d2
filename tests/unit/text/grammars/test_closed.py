"""closed: objects that name their properties have no others."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinnate.text.grammars.closed import closed

NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {**NAMED, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (NAMED, CLOSED),
        (CLOSED, CLOSED),
        ({**NAMED, "additionalProperties": True}, {**NAMED, "additionalProperties": True}),
        ({**NAMED, "patternProperties": {"^x": {}}}, {**NAMED, "patternProperties": {"^x": {}}}),
        ({"type": "object"}, {"type": "object"}),
        ({"type": "array", "items": NAMED}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [NAMED, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$ref": "#/$defs/P", "$defs": {"P": NAMED}}, {"$ref": "#/$defs/P", "$defs": {"P": CLOSED}}),
        ({"additionalProperties": NAMED}, {"additionalProperties": CLOSED}),
        # a property that is called like a keyword is a property
        ({"properties": {"allOf": NAMED}}, {"properties": {"allOf": CLOSED}, "additionalProperties": False}),
        ({"const": NAMED}, {"const": NAMED}),
        (True, True),
        ({"properties": 5}, {"properties": 5, "additionalProperties": False}),
    ],
)
def test_which_objects_are_closed(schema: Any, expected: Any) -> None:
    before = copy.deepcopy(schema)
    assert closed(schema) == expected
    assert schema == before


@pytest.mark.parametrize("keyword", ["allOf", "if", "not", "dependentSchemas"])
def test_what_composes_objects_stays_as_it_is(keyword: str) -> None:
    value: Any = [NAMED, {"properties": {"b": {}}}] if keyword == "allOf" else {"required": ["b"]}
    for schema in ({**NAMED, keyword: value}, {"items": {**NAMED, keyword: value}}):
        assert closed(schema) == schema


def test_too_deep_is_left_to_others() -> None:
    schema: Any = NAMED
    for _ in range(5000):
        schema = {"items": schema}
    assert closed(schema) is schema


LEAVES = st.sampled_from([{"type": "integer"}, {"type": "null"}, {"enum": ["x", "y"]}])
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda p: {"type": "object", "properties": p}, st.dictionaries(st.sampled_from("abc"), inner)),
        st.builds(lambda i: {"type": "array", "items": i}, inner),
        st.builds(lambda a: {"anyOf": a}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=8,
)
VALUES = st.recursive(
    st.sampled_from([None, 1, "x"]),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)),
    max_leaves=6,
)


@given(SCHEMAS, VALUES)
def test_whatever_fits_the_closed_one_fits_the_open_one(schema: Any, value: Any) -> None:
    narrow = closed(schema)
    assert closed(narrow) == narrow
    if jsonschema.Draft202012Validator(narrow).is_valid(value):
        assert jsonschema.Draft202012Validator(schema).is_valid(value)
