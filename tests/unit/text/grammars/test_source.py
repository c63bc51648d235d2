"""From what a client sent to the form that is compiled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pinnate.core.structured import StructuredKind, StructuredOutput
from pinnate.text.grammars.check import check
from pinnate.text.grammars.faults import Fault
from pinnate.text.grammars.limits import MAX_BYTES, MAX_CHOICES
from pinnate.text.grammars.source import WHITESPACE, checked

TAG = {"structures": [{"begin": "<f=a>", "schema": {"const": 1}, "end": "</f>"}], "triggers": ["<f="]}


def of(kind: StructuredKind, value: Any = "") -> StructuredOutput:
    return StructuredOutput(kind=kind, text=value if isinstance(value, str) else json.dumps(value), param="field")


SOUND: list[StructuredOutput] = [
    of("json_object"),
    of("json_schema", {"type": "object", "uniqueItems": False}),
    of("json_schema", True),
    of("regex", "a+"),
    of("regex", ""),
    of("choice", ["yes", "", 'q"\n', "ď😀"]),
    of("grammar", 'root ::= "a" [0-9]+ x\nx ::= "b" | "c"'),
    of("grammar", 'start: "a::=" | /b+/'.replace("::=", "=")),
    of("grammar", '%llguidance {}\nstart: "a::=b"'),
    of("grammar", 'start: "{9999999}" %json {"type": "integer"} "x"'),
    of("structural_tag", TAG),
]


@pytest.mark.parametrize("structured", SOUND, ids=lambda s: f"{s.kind} {s.text[:20]}")
def test_checking_again_changes_nothing(structured: StructuredOutput) -> None:
    once = check(structured)
    assert check(once) == once
    assert once.param == "field"


def test_gbnf_and_tags_become_lark_and_json_in_lark_gets_its_whitespace() -> None:
    assert "start:" in checked(of("grammar", 'root ::= "a"')).text
    tag = checked(of("structural_tag", TAG))
    assert tag.kind == "grammar"
    assert json.dumps(dict(WHITESPACE))[1:-1] in tag.text
    lark = checked(of("grammar", 'start: %json {"type": "array", "items": {"const": "%json {"}} "z"')).text
    schema, end = json.JSONDecoder().raw_decode(lark, lark.index("{"))
    assert schema["x-guidance"] == {**WHITESPACE, "lenient": False}
    assert lark[end:] == ' "z"'


FAULTY: list[tuple[StructuredOutput, str, str]] = [
    (of("json_schema", "{"), "", "not valid JSON"),
    (of("json_schema", "[" * 100_000), "", "nested too deep"),
    (of("json_schema", False), "#", "false"),
    (of("json_schema", '"notaschema"'), "#", "an object or a boolean"),
    (of("json_schema", {"properties": {"a": {"items": {"format": "wat"}}}}), "#/properties/a/items", "wat"),
    (of("json_schema", {"oneOf": [{"type": "string"}, {"maxLength": 3}]}), "#", "oneOf is supported where"),
    (of("json_schema", {"anyOf": [{"const": 1}, {"type": "string", "pattern": "(?=a)b"}]}), "#/anyOf/1", "look-around"),
    (of("regex", "("), "", "unclosed group"),
    (of("regex", "(?<=a)b"), "", "look-around"),
    (of("regex", "x" * (MAX_BYTES + 1)), "", f"{MAX_BYTES}"),
    (of("choice", "5"), "", "list of one or more strings"),
    (of("choice", [str(i) for i in range(MAX_CHOICES + 1)]), "", f"{MAX_CHOICES}"),
    (of("grammar", 'root ::= "a'), "", "GBNF"),
    (of("grammar", "start: foo"), "", "unknown name"),
    (of("grammar", 'start: "a"{1000000}'), "", "repeats more than"),
    (of("grammar", 'start: "a"~1..99999999999'), "", "repeats more than"),
    (of("grammar", "start: /a{1000000}/"), "", "longer than"),
    (of("grammar", 'start: %json {"type": "foo"}'), "#/type", "type must be one of"),
    (of("grammar", 'start: %json {"type": '), "", "not JSON"),
    (of("grammar", 'start: %json {"x-guidance": {"coerce_one_of": true}}'), "#/x-guidance", "lenient alone"),
    (of("structural_tag", {**TAG, "triggers": []}), "#/structures/0/begin", "none of the triggers"),
    (of("structural_tag", {**TAG, "structures": []}), "#/structures", "1 to"),
    (of("structural_tag", {"triggers": [5]}), "#/triggers", "strings"),
    (
        of("structural_tag", {"structures": [{"begin": "<f", "schema": {"type": "x"}}], "triggers": ["<"]}),
        "#/structures/0/schema/type",
        "type must be one of",
    ),
]


@pytest.mark.parametrize(("structured", "path", "words"), FAULTY, ids=lambda v: str(v)[:40])
def test_a_fault_has_its_path_and_reason(structured: StructuredOutput, path: str, words: str) -> None:
    with pytest.raises(Fault) as caught:
        check(structured)
    assert caught.value.path == path
    assert words in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.error("field").message) < 1000
