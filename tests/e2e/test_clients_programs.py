"""lm-eval and SGLang's frontend, each a program in a process of its own: both set up much at their import."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import MODEL
from tests.e2e.harness import Server

PROGRAMS = Path(__file__).parent / "programs"


def run(program: str, *arguments: str, needs: str, folder: Path) -> Any:
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is installed by `make test`")
    environment = {**os.environ, "HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / program), *arguments],
        capture_output=True, text=True, timeout=100, env=environment, cwd=folder, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_lm_eval_scores_choices_and_generates(server: Server, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    results = run("evaluate.py", server.url, MODEL, str(tasks), needs="lm_eval", folder=tmp_path)
    assert results["choose"]["acc,none"] == 1.0
    assert results["continue"]["exact_match,none"] == pytest.approx(2 / 3)
    assert results["choose"]["sample_len"] == 3


def test_sglang_programs(server: Server, tmp_path: Path) -> None:
    got = run("structured_frontend.py", server.url, needs="sglang", folder=tmp_path)
    assert got["rest"] == " 8, 9, 1"
    assert (got["meta"]["prompt_tokens"], got["meta"]["completion_tokens"]) == (20, 8)
    assert got["meta"]["finish_reason"] == {"type": "length", "length": 8}
    assert got["batch"] == [" 8, 9, 1", " 70, 80,"]
    assert "".join(got["stream"]) == "1, 2, 3, 4, 5, 6, 7, 8, 9, 1"
    assert len(got["stream"]) > 4
    assert got["next"] == " 8"
    assert got["branches"] == [" 8, ", " 8, 9"]
    assert len(got["number"]) == 3
    assert got["number"].isdecimal()
    assert "\n" not in got["stopped"]
