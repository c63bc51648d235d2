"""Grammars of calls: compiled by llguidance over a vocabulary of bytes, and what they let through."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from pinnate.core.errors import PinnateError, UnsupportedError
from pinnate.core.structured import StructuredOutput
from pinnate.text.grammars.backend import LLGuidanceBackend, VocabularyBytes
from pinnate.text.parsers.registry import TOOL_FORMATS
from pinnate.text.tool_grammar import Tool, calls_grammar, closed, content_rule, strict_grammar
from tests.unit.text.parsers.helpers import joined

EOS, MARK = 0, 257  # bytes are 1 to 256
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"$ref": "#/$defs/word"}, "o": {"type": "boolean"}},
    "required": ["s"],
    "$defs": {"word": {"enum": ["a::=b", "</tool_call>"]}},
}
TOOLS = (Tool("store", SCHEMA, is_strict=True), Tool("ping", {}), Tool("free", {"type": "object"}))
NAMES = [tool.name for tool in TOOLS]
FORMATS = sorted(TOOL_FORMATS)


@pytest.fixture(scope="module")
def backend() -> LLGuidanceBackend:
    tokens = [b"</s>", *(bytes([byte]) for byte in range(256)), b"<mark>"]
    return LLGuidanceBackend(VocabularyBytes(tokens, [EOS, MARK], [EOS]))


def plain(_: str) -> None:
    """No special tokens."""


def fits(backend: LLGuidanceBackend, grammar: str, text: str | Sequence[int]) -> bool:
    """Whether `text` is a whole output of the grammar."""
    matcher = backend.compile(StructuredOutput(kind="grammar", text=grammar)).start()
    for token in [byte + 1 for byte in text.encode()] if isinstance(text, str) else text:
        mask = bytearray(36)
        matcher.fill(memoryview(mask).cast("I"))
        if not mask[token // 8] >> token % 8 & 1:
            return False
        matcher.advance(token)
    mask = bytearray(36)
    if matcher.is_terminated:
        return True
    matcher.fill(memoryview(mask).cast("I"))
    return bool(mask[0] & 1)


def write(name: str, *calls: tuple[str, dict[str, object]]) -> str:
    form, texts = TOOL_FORMATS[name], []
    for tool, arguments in calls:
        if name == "pythonic":
            shown = ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())
        else:
            shown = json.dumps(arguments)
        texts.append(form.call[0] + tool + form.call[1] + shown + form.call[2])
    return form.begin + form.separator.join(texts) + form.end


GOOD = ("store", {"n": 5, "s": "</tool_call>", "o": True}), ("ping", {}), ("store", {"s": "a::=b"})
BAD = [
    ("store", {"s": "c"}),
    ("store", {"n": 1}),
    ("store", {"s": "a::=b", "x": 1}),
    ("ping", {"x": 1}),
    ("other", {}),
]


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_grammar_lets_through_its_parser_reads(name: str, backend: LLGuidanceBackend) -> None:
    form = TOOL_FORMATS[name]
    tools = TOOLS[:2]
    many = calls_grammar(form, tools, many=True, special=plain)
    one = calls_grammar(form, tools, many=False, special=plain)
    text = write(name, *GOOD)
    assert fits(backend, many, text)
    assert not fits(backend, one, text)
    assert fits(backend, one, write(name, GOOD[0]))
    found = joined(form.new_parser(NAMES), [text])
    assert [(part[1], json.loads(part[2])) for part in found] == list(GOOD)
    for call in BAD:
        assert not fits(backend, many, write(name, call)), call
    assert not fits(backend, many, "")
    assert not fits(backend, many, "Sure. " + write(name, GOOD[1]))


@pytest.mark.parametrize("name", FORMATS)
def test_thinking_first_and_an_answer_instead(name: str, backend: LLGuidanceBackend) -> None:
    form = TOOL_FORMATS[name]
    marks, text = ("<think>", "</think>"), write(name, GOOD[1])
    rule = content_rule(StructuredOutput(kind="json_schema", text='{"type": "integer"}'))
    grammar = calls_grammar(form, TOOLS[:2], many=True, thinking=marks, content=rule, special=plain)
    for good in (text, "7", f"<think>\n1 < 2 </thi\n</think>\n\n{text}", "<think></think>7"):
        assert fits(backend, grammar, good)
    for bad in ("Yes", "<think>7", "<think></think>", "Hm</think>7"):
        assert not fits(backend, grammar, bad)
    is_open = calls_grammar(form, TOOLS[:2], many=True, thinking=marks, is_open=True, special=plain)
    assert fits(backend, is_open, f"Hm <b>\n</think>\n{text}")
    assert not fits(backend, is_open, text)


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_strict_holds_once_a_call_has_begun(name: str, backend: LLGuidanceBackend) -> None:
    grammar = strict_grammar(TOOL_FORMATS[name], TOOLS, special=plain)
    for good in (
        "",
        "Hello <tool [TOOL",
        write(name, GOOD[0]),
        f"See: {write(name, GOOD[0])} and {write(name, GOOD[2])}.",
    ):
        assert fits(backend, grammar, good), good
    assert fits(backend, grammar, write(name, ("free", {"any": [1]})))
    for call in (*BAD[:3], BAD[4]):
        assert not fits(backend, grammar, "Look " + write(name, call)), call


def test_a_special_mark_is_the_token_not_its_spelling(backend: LLGuidanceBackend) -> None:
    def special(text: str) -> int | None:
        return MARK if text in ("[TOOL_CALLS]", "<tool_call>", "</think>") else None

    for name in ("mistral", "hermes"):
        form = TOOL_FORMATS[name]
        text = write(name, GOOD[1])
        ids = [MARK, *(byte + 1 for byte in text[len(form.marks[0]) :].encode())]
        hello = [byte + 1 for byte in b"hi "]
        for grammar in (
            calls_grammar(form, TOOLS[:2], many=True, special=special),
            strict_grammar(form, TOOLS, special=special),
        ):
            assert fits(backend, grammar, ids)
        assert not fits(backend, calls_grammar(form, TOOLS[:2], many=True, special=special), text)
        assert fits(backend, strict_grammar(form, TOOLS, special=special), hello + ids)
    thinking = calls_grammar(form, TOOLS, many=True, thinking=("<think>", "</think>"), is_open=True, special=special)
    assert fits(backend, thinking, [*hello, MARK, 11, *ids])


def test_pythonic_refuses_what_keyword_arguments_cannot_say() -> None:
    for parameters in ({"properties": {"a-b": {}}}, {"properties": {"a": {}}, "anyOf": [{}]}):
        with pytest.raises(UnsupportedError) as caught:
            calls_grammar(TOOL_FORMATS["pythonic"], [Tool("f", parameters, at="here")], many=True, special=plain)
        assert caught.value.param == "here"


def test_arguments_are_closed_where_nothing_says_otherwise() -> None:
    properties = {"a": {}}
    assert closed({"properties": properties}) == {
        "type": "object", "properties": properties, "additionalProperties": False,
    }  # fmt: skip
    inner = {"type": "array", "items": {"properties": {"c": True}}}
    assert closed({"properties": {"b": inner}})["properties"]["b"]["items"]["additionalProperties"] is False
    assert "additionalProperties" not in inner["items"]
    assert closed({}) == {"type": "object", "properties": {}, "additionalProperties": False}
    for open_ended in (
        {"type": "object"},
        {"properties": properties, "additionalProperties": True},
        {"properties": properties, "allOf": [{"properties": {"b": {}}}]},
        {"properties": properties, "$ref": "#/$defs/x"},
    ):
        assert closed(open_ended) == {"type": "object", **open_ended}


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_object", "", '{"a": 1}', "[]"),
        ("choice", '["yes", "a\\"b"]', 'a"b', "no"),
        ("regex", r"a/b\/c\\/[0-9]", "a/b/c\\/7", "a/b/c/7"),
        ("regex", "a\nb", "a\nb", "anb"),
        ("regex", "", "", "x"),
    ],
)
def test_other_constraints_as_rules(kind: str, text: str, good: str, bad: str, backend: LLGuidanceBackend) -> None:
    rule = content_rule(StructuredOutput(kind=kind, text=text))  # type: ignore[arg-type]
    grammar = calls_grammar(TOOL_FORMATS["json"], (), many=False, content=rule, special=plain)
    assert fits(backend, grammar, good)
    assert not fits(backend, grammar, bad)


def test_keywords_that_cannot_be_compiled_are_left_out_unless_strict(backend: LLGuidanceBackend) -> None:
    schema = {"type": "object", "properties": {"x": {"not": {"const": 5}}}, "required": ["x"]}
    for name in ("hermes", "pythonic"):
        form = TOOL_FORMATS[name]
        assert fits(
            backend, calls_grammar(form, [Tool("f", schema)], many=True, special=plain), write(name, ("f", {"x": 6}))
        )
        with pytest.raises(PinnateError):
            backend.compile(
                StructuredOutput(
                    kind="grammar", text=calls_grammar(form, [Tool("f", schema, True)], many=True, special=plain)
                )
            )


def test_whole_grammars_are_no_rules() -> None:
    assert content_rule(StructuredOutput(kind="grammar", text="start: /a/")) is None
