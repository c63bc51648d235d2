"""Fields that constrain an output become one StructuredOutput; what is wrong with them is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pinnate.core.errors import InvalidRequestError, RequestError
from pinnate.core.structured import StructuredOutput
from pinnate.server.structured import CONSTRAINTS, structured_output

SCHEMA = {"type": "object", "properties": {"ď": {"type": "integer"}}}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}

GOOD: list[tuple[dict[str, Any], str, Any, str]] = [
    ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": False}}},
        "json_schema",
        SCHEMA,
        "response_format.json_schema.schema",
    ),
    (  # strict: objects have the properties that they name
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}},
        "json_schema",
        {**SCHEMA, "additionalProperties": False},
        "response_format.json_schema.schema",
    ),
    (
        {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_additional_properties": True}},
        "json_schema",
        {**SCHEMA, "additionalProperties": False},
        "structured_outputs.json",
    ),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA, "response_format.schema"),
    ({"response_format": {"type": "structural_tag", **TAG}}, "structural_tag", TAG, "response_format"),
    ({"response_format": {"type": "grammar", "grammar": "r ::= x"}}, "grammar", "r ::= x", "response_format.grammar"),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA, "structured_outputs.json"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a+", "choice": None}}, "regex", "a+", "structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"], "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "start: x"}}, "grammar", "start: x", "structured_outputs.grammar"),
    ({"structured_outputs": {"json_object": True}}, "json_object", "", "structured_outputs.json_object"),
    (
        {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
        "structural_tag",
        TAG,
        "structured_outputs.structural_tag",
    ),
    ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "regex", "a", "structured_outputs.regex"),
    ({"guided_json": SCHEMA}, "json_schema", SCHEMA, "guided_json"),
    ({"guided_json": True}, "json_schema", True, "guided_json"),
    ({"guided_regex": "a"}, "regex", "a", "guided_regex"),
    ({"guided_choice": ["a"]}, "choice", ["a"], "guided_choice"),
    ({"guided_grammar": "root ::= x"}, "grammar", "root ::= x", "guided_grammar"),
    ({"json_schema": json.dumps(SCHEMA)}, "json_schema", SCHEMA, "json_schema"),
    ({"regex": ""}, "regex", "", "regex"),
    ({"ebnf": "root ::= x"}, "grammar", "root ::= x", "ebnf"),
    ({"structural_tag": TAG}, "structural_tag", TAG, "structural_tag"),
]


@pytest.mark.parametrize(("fields", "kind", "text", "param"), GOOD)
def test_each_name_gives_its_kind(fields: dict[str, Any], kind: str, text: Any, param: str) -> None:
    found = structured_output(fields)
    assert found is not None
    assert (found.kind, found.param) == (kind, param)
    if isinstance(text, str):
        assert found.text == text
    else:
        got = json.loads(found.text)
        got = {name: value for name, value in got.items() if name != "type"} if kind == "structural_tag" else got
        assert got == text


def test_nothing_given_is_no_constraint() -> None:
    assert structured_output(dict.fromkeys(CONSTRAINTS)) is None
    assert structured_output({"response_format": {"type": "text"}, "temperature": 1}) is None


BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xyz"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": "json_object"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": "notaschema"}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
        "response_format.json_schema.strict",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "zz": 1}}},
        "response_format.json_schema.zz",
    ),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"lark": "x"}}, "structured_outputs.lark"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"regex": "a", "disable_fallback": 3}}, "structured_outputs.disable_fallback"),
    ({"structural_tag": {"format": {}}}, "structural_tag"),
    ({"structural_tag": "{"}, "structural_tag"),
    ({"json_schema": "{" * 5000}, "json_schema"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_a_fault_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        structured_output(fields)
    assert caught.value.param == param


def test_plain_text_beside_another_constraint_is_no_conflict() -> None:
    found = structured_output({"response_format": {"type": "text"}, "regex": "a"})
    assert found == StructuredOutput(kind="regex", text="a", param="regex")


def test_beam_search_with_a_constraint_is_refused() -> None:
    from pinnate.core.sampling import SamplingParams

    with pytest.raises(RequestError) as caught:
        SamplingParams(n=2, use_beam_search=True, structured_output=StructuredOutput(kind="regex", param="regex"))
    assert caught.value.param == "regex"
    assert not isinstance(caught.value, InvalidRequestError)
