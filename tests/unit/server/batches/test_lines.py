"""Lines of an input file: places, rules, error codes."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinnate.server.batches.lines import MAX_CUSTOM_ID, MAX_ERRORS, MAX_REQUESTS, LineChecker, Place, split
from tests.unit.server.batches.conftest import jsonl, line

URLS = ("/v1/completions",)


def check(lines: list[Any], limit: int = 1000) -> LineChecker:
    checker = LineChecker(URLS, limit)
    for place, raw in split(io.BytesIO(jsonl(lines)), limit):
        checker.check(place, raw)
    checker.finish()
    return checker


PIECES = st.sampled_from([b"a", b" ", b"{}", b"\xff", b"\t"])


@given(
    st.lists(st.lists(PIECES, max_size=8).map(b"".join)),
    st.sampled_from([b"\n", b"\r\n"]),
    st.booleans(),
    st.integers(1, 12),
)
def test_places_lead_back_to_the_lines(lines: list[bytes], end: bytes, ended: bool, limit: int) -> None:
    data = end.join(lines) + (end if ended else b"")
    got = list(split(io.BytesIO(data), limit))
    expected = [(n, each if len(each) <= limit else None) for n, each in enumerate(lines, 1)]
    assert [(place.number, raw) for place, raw in got] == [
        (n, raw) for n, raw in expected if raw is None or raw.strip()
    ]
    for place, raw in got:
        if raw is not None:
            assert data[place.offset : place.offset + place.size] == raw


def test_a_byte_order_mark_and_blank_lines_are_no_fault() -> None:
    data = b"\xef\xbb\xbf" + jsonl([line("a"), b"\n", b"  \r\n", line("b")])
    places = [place for place, _ in split(io.BytesIO(data), 1000)]
    assert [place.number for place in places] == [1, 4]
    assert places[0].offset == 3
    assert check([line("a"), b"\n", line("b")]).errors == []


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        (b"{oops\n", "invalid_json_line", None),
        (b"[1]\n", "invalid_json_line", None),
        (b'{"a": NaN}\n', "invalid_json_line", None),
        (b"\xff\xfe\n", "invalid_json_line", None),
        (b"[" * 900 + b"\n", "invalid_json_line", None),
        ({"method": "POST", "url": "/v1/completions", "body": {}}, "invalid_request", "custom_id"),
        ({**line("x"), "custom_id": 5}, "invalid_request", "custom_id"),
        ({**line("x"), "custom_id": ""}, "invalid_custom_id", "custom_id"),
        ({**line("x"), "custom_id": "x" * (MAX_CUSTOM_ID + 1)}, "invalid_custom_id", "custom_id"),
        ({**line("x"), "body": []}, "invalid_request", "body"),
        ({**line("x"), "method": "GET"}, "invalid_method", "method"),
        ({**line("x"), "url": "/v1/chat/completions"}, "invalid_url", "url"),
        ({**line("x"), "more": 1}, "invalid_request", "more"),
        (line("x", "y" * 1000), "line_too_long", None),
        (line("first"), "duplicate_custom_id", "custom_id"),
    ],
)
def test_each_fault_is_told_with_its_line(raw: Any, code: str, param: str | None) -> None:
    errors = check([line("first"), b"\n", raw, line("last")]).errors
    assert [(error.code, error.line, error.param) for error in errors] == [(code, 3, param)]
    assert errors[0].message


def test_all_faults_are_counted_and_some_shown() -> None:
    checker = check([b"{\n"] * (MAX_ERRORS + 50))
    assert (len(checker.errors), checker.num_errors) == (MAX_ERRORS, MAX_ERRORS + 50)


def test_an_empty_file_and_one_with_too_many_requests() -> None:
    assert [error.code for error in check([b"\n", b"   \n"]).errors] == ["empty_file"]
    checker = LineChecker(URLS, 1000)
    for number in range(1, MAX_REQUESTS + 10):
        checker.check(Place(number, 0, 0), json.dumps(line(str(number))).encode())
    assert [(error.code, error.line) for error in checker.errors] == [("too_many_tasks", MAX_REQUESTS + 1)]


def test_null_members_are_left_out() -> None:
    checker = LineChecker(URLS, 1000)
    good = checker.check(Place(1, 0, 0), json.dumps(line("a", stop=None, n=1)).encode())
    assert good is not None
    assert good.body == {"prompt": "hi", "n": 1}
