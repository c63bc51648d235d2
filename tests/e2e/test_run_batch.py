"""`pinnate run-batch` as a process of its own: killed in the middle, disturbed, without room on the disk."""

from __future__ import annotations

import contextlib
import json
import random
import re
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import alive, counting

FLAGS = ("--num-pages", "256", "--max-model-len", "512", "--max-num-seqs", "4")


def requests(count: int, **body: Any) -> list[dict[str, Any]]:
    """Chats and completions, every tenth of them one that its route refuses."""
    made = []
    for i in range(count):
        text = counting(5 + i % 7, 1 + i % 3)
        chat = i % 2 == 0
        fields = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        fields |= {"temperature": 0, "max_tokens": 8, **body} | ({"n": 0} if i % 10 == 7 else {})
        url = "/v1/chat/completions" if chat else "/v1/completions"
        made.append({"custom_id": f"r{i}", "method": "POST", "url": url, "body": fields})
    return made


class Run:
    """One process. `stored` are the answers that are committed so far, by line."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder, self.log = folder, folder / "log"
        arguments = [sys.executable, "-m", "pinnate.cli.main", "run-batch", "in.jsonl", "out.jsonl", *FLAGS, *flags]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def stored(self) -> dict[int, bytes]:
        database = self.folder / "out.jsonl.partial" / "batches.sqlite"
        with contextlib.suppress(sqlite3.OperationalError):  # not there yet
            connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
            try:
                return dict(connection.execute("SELECT line, output FROM results"))
            finally:
                connection.close()
        return {}

    def wait_for(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < end, self.text()
            time.sleep(0.005)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        children = [
            int(pid)
            for path in Path(f"/proc/{self.process.pid}/task").glob("*/children")
            for pid in path.read_text().split()
        ]
        self.process.send_signal(number)
        self.process.wait(timeout=20)
        end = time.monotonic() + 10
        while any(map(alive, children)):
            assert time.monotonic() < end, "the engine's process outlives its parent"
            time.sleep(0.01)

    def exit_code(self) -> int:
        return self.process.wait(timeout=90)

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "out.jsonl").read_text().splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(*flags: str) -> Run:
        runs.append(Run(tmp_path, *flags))
        return runs[-1]

    yield start
    for each in runs:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


def write(folder: Path, lines: list[dict[str, Any]]) -> None:
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def left_to_run(run: Run) -> int:
    """What the run said that it has to do."""
    said = re.search(r"(\d+) requests to run", run.text())
    assert said, run.text()
    return int(said[1])


def test_killed_again_and_again_each_line_is_answered_once(run: Callable[..., Run], tmp_path: Path) -> None:
    """By SIGKILL at random moments: what is answered stays as it is, byte for byte, and only the rest is run."""
    asked = requests(60, ignore_eos=True)
    write(tmp_path, asked)
    stored: dict[int, bytes] = {}
    for _ in range(3):
        one, target = run(), len(stored) + random.randrange(4, 12)
        one.wait_for(lambda: len(one.stored()) >= target)  # noqa: B023
        one.kill()
        assert left_to_run(one) == 60 - len(stored)
        now = one.stored()
        assert now.items() >= stored.items()
        assert not (tmp_path / "out.jsonl").exists()
        stored = now
    assert len(stored) < 60
    last = run()
    assert last.exit_code() == 0, last.text()
    assert left_to_run(last) == 60 - len(stored)
    assert "54 of 60 requests answered, 6 failed" in last.text()
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    assert [json.loads(line)["custom_id"] for line in lines] == [each["custom_id"] for each in asked]
    assert {number: lines[number - 1] for number in stored} == stored
    statuses = [each["response"]["status_code"] for each in last.answers()]
    assert statuses == [400 if i % 10 == 7 else 200 for i in range(60)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "log", "out.jsonl"]


@pytest.mark.parametrize("moment", ["before the first answer", "after the output"])
def test_killed_at_its_begin_or_its_end(moment: str, run: Callable[..., Run], tmp_path: Path) -> None:
    asked = requests(6)
    write(tmp_path, asked)
    work, target = tmp_path / "out.jsonl.partial", tmp_path / "out.jsonl"
    one = run("--executor", "simulated", "--simulated-step-ms", "5")
    if moment == "after the output":  # and before the folder is removed
        one.wait_for(target.exists)
    else:
        one.wait_for((work / "batches.sqlite").exists)
    one.process.kill()
    one.process.wait()
    again = run("--executor", "simulated", "--simulated-step-ms", "5")
    assert again.exit_code() == 0, again.text()
    assert [each["custom_id"] for each in again.answers()] == [f"r{i}" for i in range(6)]
    assert not work.exists()


def test_interrupted_it_ends_at_once_and_says_nothing_of_its_inside(run: Callable[..., Run], tmp_path: Path) -> None:
    write(tmp_path, requests(20, max_tokens=400, ignore_eos=True))
    one = run()
    one.wait_for(lambda: "requests to run" in one.text())
    began = time.monotonic()
    one.kill(signal.SIGINT)
    assert time.monotonic() - began < 10
    assert one.process.returncode == 130
    assert "Traceback" not in one.text()


@pytest.mark.parametrize("flag", ["--quantization", None])
def test_an_unfinished_run_is_gone_on_with_by_its_like_alone(
    flag: str | None, run: Callable[..., Run], tmp_path: Path
) -> None:
    """Another input, or weights that answer otherwise, would mix two runs in one output."""
    write(tmp_path, requests(20, ignore_eos=True))
    one = run()
    one.wait_for(lambda: len(one.stored()) >= 2)
    one.kill()
    if flag is None:
        write(tmp_path, requests(21, ignore_eos=True))
    other = run(*([flag, "int8"] if flag else []))
    assert other.exit_code() == 2
    (line,) = other.text().splitlines()
    assert f"is an unfinished run with another {'quantization' if flag else 'input'}" in line
    assert other.stored().items() >= one.stored().items()


def test_two_at_once_and_an_input_that_changes_meanwhile(run: Callable[..., Run], tmp_path: Path) -> None:
    write(tmp_path, requests(12, max_tokens=20, ignore_eos=True))
    one = run()
    one.wait_for(lambda: len(one.stored()) >= 2)
    other = Run(tmp_path)
    other.log = one.log
    assert other.exit_code() == 2
    write(tmp_path, [])  # what was read at the start is what is answered
    assert one.exit_code() == 0
    assert [each["custom_id"] for each in one.answers()] == [f"r{i}" for i in range(12)]


def test_a_full_disk_is_waited_for(run: Callable[..., Run], tmp_path: Path) -> None:
    write(tmp_path, requests(40, max_tokens=8, ignore_eos=True, logprobs=True, top_logprobs=5))
    lines = [json.loads(line) for line in (tmp_path / "in.jsonl").read_text().splitlines()]
    for line in lines:
        if line["url"] == "/v1/completions":
            del line["body"]["top_logprobs"]
            line["body"]["logprobs"] = 5
    write(tmp_path, lines)
    one = run()
    one.wait_for(lambda: len(one.stored()) >= 4)
    limit = (tmp_path / "out.jsonl.partial" / "batches.sqlite-wal").stat().st_size + 10_000
    resource.prlimit(one.process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    one.wait_for(lambda: "no room in the data directory" in one.text())
    resource.prlimit(one.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert one.exit_code() == 0, one.text()
    assert [each["custom_id"] for each in one.answers()] == [f"r{i}" for i in range(40)]


def test_no_room_for_the_input_is_said_in_one_line_and_the_next_run_begins_anew(tmp_path: Path) -> None:
    """The copy of the input does not fit; nothing was answered, so nothing is lost."""
    write(tmp_path, requests(200, user="x" * 2000))
    size = (tmp_path / "in.jsonl").stat().st_size
    limited = f"ulimit -f {size // 1024 // 2} && exec {sys.executable} -m pinnate.cli.main run-batch in.jsonl out.jsonl"
    done = subprocess.run(
        ["bash", "-c", f"{limited} {' '.join(FLAGS)} --executor simulated 2>log.txt"], cwd=tmp_path, timeout=90
    )
    text = (tmp_path / "log.txt").read_text()
    assert done.returncode == 1, text
    assert "no room in the data directory" in text.splitlines()[-1]
    assert "Traceback" not in text
    again = Run(tmp_path, "--executor", "simulated")
    assert again.exit_code() == 0, again.text()
    assert len(again.answers()) == 200
