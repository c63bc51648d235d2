"""Log lines as JSON: one object a line, whatever is logged."""

from __future__ import annotations

import json
import logging
import sys

from hypothesis import given
from hypothesis import strategies as st

from pinnate.core.logs import JsonFormatter


def line(message: str, *arguments: object, **more: object) -> dict[str, object]:
    record = logging.LogRecord("a.b", logging.WARNING, "f", 1, message, arguments, None)
    vars(record).update(more)
    text = JsonFormatter().format(record)
    assert "\n" not in text
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


@given(st.text())
def test_any_text_is_one_line(text: str) -> None:
    assert line("%s", text)["message"] == text


def test_fields_and_exceptions_are_members() -> None:
    try:
        raise ValueError("x")
    except ValueError:
        found = line("m", fields={"status": 200, "odd": {1, 2}}, exc_info=sys.exc_info())
    assert (found["level"], found["logger"], found["message"], found["status"]) == ("warning", "a.b", "m", 200)
    assert "ValueError: x" in str(found["exception"])
    assert str(found["time"]).endswith("+00:00")
