"""Every example runs as its docstring says, with the default model."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.e2e.harness import Server

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text()


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_offline() -> None:
    lines = run("offline.py").splitlines()
    assert len(lines) == 3
    assert lines[1] == "'1, 2, 3, 4, 5, 6, 7,' -> ' 8, 9, 10, 11, 12, 13, 1'"


def test_chat() -> None:
    out = run("chat.py")
    assert out.count("user:") == 2
    answers = [line for line in out.splitlines() if line.startswith("  answer ")]
    assert [line.split("(")[0] for line in answers] == ["  answer 0 ", "  answer 0 ", "  answer 1 ", "  answer 2 "]
    assert len(set(answers)) == 4


def test_beams() -> None:
    *beams, saved = run("beams.py").splitlines()
    scores = [float(line.split()[0]) for line in beams]
    assert len(beams) == len(set(beams)) == 4
    assert scores == sorted(scores, reverse=True)
    assert saved.startswith("pages saved: ")
    assert saved != "pages saved: 0%"


def test_client(server: Server) -> None:
    out = run("client.py", server.url, "hi")
    assert out.startswith("Hello")
    assert "'prompt_tokens': 31" in out


def test_agent(server: Server) -> None:
    call, answer = run("agent.py", server.url, "Multiply 12 and 7.").split("\n", 1)
    assert call == 'multiply({"a": 12, "b": 7}) -> 84'
    assert answer.startswith("answer: ")
    assert "84" in answer


def test_one_request() -> None:
    """What it prints is what docs/architecture.md shows, in the same order, but for sizes of messages."""
    printed = iter(re.sub(r"\d\.\d KB", "KB", run("one_request.py")).splitlines())
    text = (ROOT / "docs/architecture.md").read_text()
    shown = re.sub(r"\d\.\d KB", "KB", "".join(re.findall(r"^```\n( \d .*?)^```$", text, re.DOTALL | re.MULTILINE)))
    assert len(shown.splitlines()) > 30
    missing = [line for line in shown.splitlines() if line not in printed]  # `in` goes on from where it was
    assert missing == []


def test_readme_python() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert "Paris" in done.stdout


def test_readme_curl(server: Server) -> None:
    (body,) = re.findall(r"^ +-d '(\{.*\})'$", README, re.MULTILINE)
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", body.encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line]
    assert len(lines) > 8
    assert lines[-1] == "data: [DONE]"


def test_no_example_is_forgotten() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "offline.py",
        "chat.py",
        "client.py",
        "beams.py",
        "agent.py",
        "one_request.py",
    }
