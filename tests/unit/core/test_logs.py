"""Log lines as JSON: one object a line, whatever is logged."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinnate.core.logs import JsonFormatter, log_fault


def line(message: str, *arguments: object, **more: object) -> dict[str, object]:
    record = logging.LogRecord("a.b", logging.WARNING, "f", 1, message, arguments, None)
    vars(record).update(more)
    text = JsonFormatter().format(record)
    assert "\n" not in text
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


@given(st.text() | st.text(st.characters(categories=["Cs"])))
def test_any_text_is_one_line(text: str) -> None:
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")  # two halves are a whole
    assert line("%s", text)["message"] == joined


def test_fields_and_exceptions_are_members() -> None:
    try:
        raise ValueError("x")
    except ValueError:
        found = line("m", fields={"status": 200, "odd": {1, 2}}, exc_info=sys.exc_info())
    assert (found["level"], found["logger"], found["message"], found["status"]) == ("warning", "a.b", "m", 200)
    assert "ValueError: x" in str(found["exception"])
    assert str(found["time"]).endswith("+00:00")


def test_a_faults_text_is_at_no_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    try:
        {}["the prompt"]
    except KeyError as error:
        log_fault(logging.getLogger("x"), "request 1", error)
    assert "request 1: KeyError" in caplog.text
    assert __file__ in caplog.text
    assert "the prompt" not in caplog.text.replace('{}["the prompt"]', "")  # which is this test's own line


PROGRAM = """
import logging, sys, threading, time, warnings
from pinnate.core.logs import setup_logging
setup_logging(sys.argv[1], sys.argv[2], "engine")
setup_logging("debug", "text")  # no effect: the first one counts
for level in ("debug", "info", "warning", "error"):
    getattr(logging.getLogger("a"), level)("%s\\nof two lines", level)
warnings.warn("deprecated")
thread = threading.Thread(target=lambda: 1 / 0, name="worker")
thread.start()
thread.join()
raise ValueError("at the end")
"""


@pytest.mark.parametrize(("level", "count"), [("debug", 4), ("warning", 2), ("error", 1)])
def test_a_whole_program_writes_one_object_a_line_at_its_level(level: str, count: int) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, level, "json"], capture_output=True, text=True)
    lines = [json.loads(each) for each in done.stderr.splitlines()]
    assert done.returncode == 1
    assert {each["process"] for each in lines} == {"engine"}
    assert [each["message"] for each in lines if each["logger"] == "a"] == [
        f"{name}\nof two lines" for name in ("debug", "info", "warning", "error")[-count:]
    ]
    assert ["UserWarning: deprecated" in each["message"] for each in lines if each["logger"] == "py.warnings"] == (
        [] if level == "error" else [True]
    )
    in_thread, at_end = [each for each in lines if each["level"] == "critical"]
    assert in_thread["message"] == "ZeroDivisionError: not caught in worker"
    assert "division by zero" in in_thread["exception"]
    assert at_end["message"] == "ValueError: not caught in the program"
    assert "at the end" in at_end["exception"]


def test_text_names_the_process_and_leaves_tracebacks_as_python_has_them() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, "error", "text"], capture_output=True, text=True)
    assert " ERROR engine a: error\nof two lines" in done.stderr
    assert done.stderr.endswith("ValueError: at the end\n")
