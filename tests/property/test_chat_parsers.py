"""Every parser gives the same for every split of the text, and loses nothing that is not markup."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinnate.text.parsers.events import ChatParser, PlainParser
from pinnate.text.parsers.reasoning import ReasoningParser
from pinnate.text.parsers.registry import TOOL_FORMATS
from tests.unit.text.parsers.helpers import TOOLS, Joined, joined

UNTIMED = settings(deadline=None, max_examples=60)
FORMATS = sorted(TOOL_FORMATS)

PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<tool_",
        "</",
        "<|python_tag|>",
        "<|python_start|>",
        "<|python_end|>",
        "[TOOL_CALLS]",
        "[CALL_ID]",
        "[ARGS]",
        "[TOOL_",
        "```",
        "json",
        '{"name": "add", "arguments": ',
        '"parameters": ',
        '{"name": "ping", "parameters": {}}',
        '"name": "add"',
        '{"',
        '"}',
        '"',
        "\\",
        "'",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        ",",
        ";",
        ":",
        "=",
        "add",
        "ping(",
        "add(a=",
        "null",
        "-1.5",
        " ",
        "\n",
        "\t",
        "<think>",
        "</think>",
        "ď",
        "😀",
        "text",
        "\x1c",
        "\u2028",
    ]
)
ADVERSARIAL = st.lists(st.one_of(PIECES, st.text(max_size=4)), max_size=30).map("".join)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(max_size=12),
    PIECES,
    st.floats(allow_nan=False, allow_infinity=False),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.text("abcdefgh_", min_size=1, max_size=5)
CALLS = st.lists(st.tuples(st.sampled_from(TOOLS), st.dictionaries(KEYS, VALUES, max_size=3)), min_size=1, max_size=3)


def parsers() -> dict[str, Callable[[], ChatParser]]:
    found: dict[str, Callable[[], ChatParser]] = {}
    for name in FORMATS:
        found[name] = lambda name=name: TOOL_FORMATS[name].new_parser(TOOLS)  # type: ignore[misc]
    found["think"] = lambda: ReasoningParser(PlainParser(), is_open=False)
    found["open"] = lambda: ReasoningParser(TOOL_FORMATS["hermes"].new_parser(TOOLS), is_open=True)
    return found


PARSERS = parsers()


def cut(data: st.DataObject, text: str) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("name", PARSERS)
@UNTIMED
@given(text=ADVERSARIAL, data=st.data())
def test_the_split_does_not_matter(name: str, text: str, data: st.DataObject) -> None:
    whole = joined(PARSERS[name](), [text])
    assert joined(PARSERS[name](), list(text)) == whole
    assert joined(PARSERS[name](), cut(data, text)) == whole
    if all(part[0] == "content" for part in whole) and name in FORMATS:
        assert "".join(part[1] for part in whole) == text


def written(name: str, calls: list[tuple[str, dict[str, object]]]) -> str:
    """As the format has it, by the table that we ask models with."""
    form = TOOL_FORMATS[name]
    texts = []
    for tool, arguments in calls:
        if name == "pythonic":
            shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        else:
            shown = json.dumps(arguments, ensure_ascii=False)
        texts.append(form.call[0] + tool + form.call[1] + shown + form.call[2])
    return form.begin + form.separator.join(texts) + form.end


@pytest.mark.parametrize("name", FORMATS)
@UNTIMED
@given(calls=CALLS, data=st.data())
def test_calls_are_read_back(name: str, calls: list[tuple[str, dict[str, object]]], data: st.DataObject) -> None:
    text = written(name, calls)
    found: Joined = joined(TOOL_FORMATS[name].new_parser(TOOLS), cut(data, text))
    assert [part[0] for part in found] == ["call"] * len(calls)
    assert [(part[1], json.loads(part[2])) for part in found] == calls


@UNTIMED
@given(thought=ADVERSARIAL, answer=ADVERSARIAL, data=st.data())
def test_thinking_and_answer(thought: str, answer: str, data: st.DataObject) -> None:
    thought = thought.replace("</think>", "").replace("</think>", "")
    answer = answer.strip()
    if "</think>" in thought:
        return
    found = joined(ReasoningParser(PlainParser(), is_open=False), cut(data, f"<think>{thought}</think>{answer}"))
    expected = [["reasoning", thought.strip()], ["content", answer]]
    assert found == [part for part in expected if part[1]]
