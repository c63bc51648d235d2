"""`pinnate run-batch`: flags, and a whole run with the real engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pinnate.cli import main as cli

FLAGS = ("--num-pages", "64", "--max-model-len", "512")


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def requests(count: int) -> list[dict[str, Any]]:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
    completion = {"prompt": "1, 2, 3, 4,", "max_tokens": 4, "temperature": 0}
    kinds = (("/v1/chat/completions", chat), ("/v1/completions", completion))
    return [
        {"custom_id": f"r{i}", "method": "POST", "url": url, "body": body}
        for i in range(count)
        for url, body in [kinds[i % 2]]
    ]


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = requests(6)
    lines[3]["body"] = {"prompt": "x", "n": 0}
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert cli.main(["run-batch", str(source), str(target), *FLAGS]) == 0
    assert "5 of 6 requests answered, 1 failed" in capsys.readouterr().out
    answered = [json.loads(line) for line in target.read_text().splitlines()]
    assert [each["custom_id"] for each in answered] == [f"r{i}" for i in range(6)]
    assert [each["response"]["status_code"] for each in answered] == [200, 200, 200, 400, 200, 200]
    assert answered[1]["response"]["body"]["choices"][0]["text"] == " 5, "
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_faulty_input_is_told_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = write(tmp_path / "in.jsonl", [*requests(1), "{", "["]), tmp_path / "out.jsonl"
    assert cli.main(["run-batch", "-i", str(source), "-o", str(target), *FLAGS]) == 2  # vLLM's spelling
    error = capsys.readouterr().err
    assert f"{source} line 2: the line is not valid JSON" in error
    assert "1 more fault" in error
    assert not target.exists()
    assert not target.with_name("out.jsonl.partial").exists()


@pytest.mark.parametrize(
    ("faulty", "what"),
    [
        (b"not json", "line 2: the line is not valid JSON"),
        (b'{"custom_id": "\xff"}', "line 2: the line is not valid JSON: Invalid UTF-8"),
        (b'["r9"]', "line 2: the line must be a JSON object"),
        (b'{"custom_id": "r9", "url": "/v1/completions"}', "line 2: body is required"),
        (
            b'{"custom_id": "r0", "url": "/v1/completions", "body": {}}',
            'line 2: custom_id "r0" is that of an earlier line',
        ),
        (b'{"custom_id": "r9", "url": "/v1/models", "body": {}}', "line 2: url must be one of /v1/chat/completions"),
        (b'{"custom_id": "' + b"x" * 513 + b'", "url": "/v1/completions", "body": {}}', "1 to 512 characters, not 513"),
    ],
)
def test_faults_of_a_line(faulty: bytes, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first one is told, nothing is run, and nothing is left, so that the mended file can be run at once."""
    source, target = write(tmp_path / "in.jsonl", requests(1)), tmp_path / "out.jsonl"
    source.write_bytes(source.read_bytes() + faulty + b"\n")
    flags = (*FLAGS, "--executor", "simulated")
    assert cli.main(["run-batch", str(source), str(target), *flags]) == 2
    assert what in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "one input file is needed"),
        (["{in}"], "one output file is needed"),
        (["{in}", "{out}", "-i", "other"], "one input file is needed"),
        (["/no/such/file", "{out}"], "no such file"),
        (["{in}", "/no/such/folder/out"], "no such folder"),
        (["{in}", "/tmp"], "/tmp is a folder"),
    ],
)
def test_wrong_usage(arguments: list[str], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"in": write(tmp_path / "in.jsonl", requests(1)), "out": tmp_path / "out.jsonl"}
    assert cli.main(["run-batch", *(argument.format(**names) for argument in arguments)]) == 2
    assert what in capsys.readouterr().err
