"""The engine process before it is told anything: whose it is; it never outlives a parent that has no use for it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pinnate.cli import main as cli
from pinnate.core.config import EngineConfig
from pinnate.engine.child import EngineChild
from pinnate.engine.launch import Launched


def engine_processes() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "pinnate.engine.process" in p.cmdline()]


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_an_abandoned_process_ends_and_leaves_nothing_open() -> None:
    before = open_descriptors()
    launched = Launched()
    (process,) = engine_processes()
    launched.abandon()
    assert not process.is_running()
    assert open_descriptors() == before
    launched.abandon()  # and again does nothing


def test_only_one_takes_it() -> None:
    launched = Launched()
    with launched.take() as process:
        launched.abandon()  # not this one's any more
        assert process.poll() is None
        with pytest.raises(RuntimeError, match="taken before"):
            launched.take()
        process.kill()
    os.close(launched.heartbeat)


def test_a_child_adopts_a_process_that_runs_already(tmp_path: Path) -> None:
    launched = Launched()
    (process,) = engine_processes()
    child = EngineChild(EngineConfig(model=str(tmp_path / "none.gguf")), launched=launched)
    assert child.pid == process.pid
    assert engine_processes() == [process]
    child.close()
    assert not process.is_running()


def test_a_failed_start_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    before = open_descriptors()
    with pytest.raises(FileNotFoundError):
        EngineChild(EngineConfig(model="none.gguf"))
    assert list(tmp_path.iterdir()) == []
    assert open_descriptors() == before


@pytest.mark.parametrize(
    "arguments", [["--no-such-flag"], ["--threads", "-1"], ["none.gguf", "--port", "0", "--ssl-certfile", "/no/such"]]
)
def test_a_server_that_does_not_start_leaves_no_process(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", *arguments]) == 2
    assert engine_processes() == []
    assert capsys.readouterr().err.count("\n") == 1  # the process it had started says nothing


def test_help_starts_no_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("pinnate.engine.launch.Launched", None)
    assert cli.main(["serve", "--help"]) == 0
    assert "usage: pinnate serve" in capsys.readouterr().out


KILLED = """
import os, signal
from pinnate.engine.launch import Launched
launched = Launched()
print(launched.take().pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_ends_when_its_parent_is_killed_before_it_has_said_anything() -> None:
    out = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, check=False)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(out.stdout)).wait(20)
