"""Objects that were cut short, against the reader that Anthropic's client has."""

from __future__ import annotations

import json
from typing import Any

import jiter
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinnate.server.anthropic.partial_json import parse_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text('a"\\\n{}[],:é', max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('k"\\,', max_size=3), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text('k"\\,', max_size=3), VALUES, max_size=4)


@settings(max_examples=200, deadline=None)
@given(OBJECTS, st.floats(0, 1), st.booleans(), st.booleans())
def test_any_prefix_reads_as_the_client_reads_it(value: Any, share: float, ascii_only: bool, spaced: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=1 if spaced else None)
    assert parse_object(text) == value
    cut = text[: int(share * len(text))]
    try:
        wanted = jiter.from_json(cut.encode(), partial_mode="trailing-strings") if cut else {}
    except ValueError:
        wanted = {}
    assert parse_object(cut) == wanted


@pytest.mark.parametrize("text", ["", " ", "[1, 2]", "5", '"x', "nonsense", "{]", '{"a": x', "null", "[[[["])
def test_what_is_no_object_is_an_empty_one(text: str) -> None:
    assert parse_object(text) == {}


def test_deep_nesting_is_no_harm() -> None:
    assert parse_object('{"a": ' + "[" * 100_000) == {}
