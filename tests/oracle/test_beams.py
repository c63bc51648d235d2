"""Beam searches against those of transformers: tests/data/beams.json (tiny checkpoints, made by record_beams.py), and
one of the default model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pinnate import LLM
from pinnate.core.messages import StepOutputs, TokenOutput
from pinnate.core.request import Request
from pinnate.engine.engine_core import EngineCore
from pinnate.engine.mailbox import Mailbox
from pinnate.executor.base import Executor, ExecutorSpec
from pinnate.executor.native import NativeExecutor
from pinnate.executor.reference import ReferenceExecutor
from pinnate.kvcache.manager import KVCacheManager
from pinnate.models.load import load_model
from pinnate.scheduler.scheduler import Scheduler
from tests.checkpoints import TINY
from tests.fakes import make_request

CASES = json.loads((Path(__file__).parent.parent / "data/beams.json").read_text())
SPEC = ExecutorSpec(num_pages=100, page_size=16, max_num_batched_tokens=512, max_num_seqs=64, max_model_len=64)
SMOLLM2_BEAMS = [(" 2022-01", -9.2688), (" 2023-01", -9.6350), (" 2022-02", -9.7096), (" 2022-12", -9.8217)]


def search(executor: Executor, requests: Sequence[Request]) -> dict[str, list[TokenOutput]]:
    """The choices of each request, in order; all run together."""
    mailbox = Mailbox()
    scheduler = Scheduler(KVCacheManager(100, 16), max_num_seqs=64, max_num_batched_tokens=512, max_model_len=64)
    core = EngineCore(scheduler, executor, mailbox, check_integrity=True)
    mailbox.inbox += requests
    core.step()
    while not core.is_idle:
        core.step()
    found: dict[str, list[TokenOutput]] = {}
    for message in mailbox.collect():
        assert isinstance(message, StepOutputs)
        for output in sorted(message.outputs, key=lambda output: output.index):
            found.setdefault(output.request_id, []).append(output)
    return found


def as_request(name: str, case: dict[str, Any]) -> Request:
    return make_request(
        name,
        case["prompt"],
        n=case["beam_width"],
        use_beam_search=True,
        max_tokens=case["max_tokens"],
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
        eos_token_ids=tuple(case["eos"]),
    )


def check(case: dict[str, Any], outputs: list[TokenOutput]) -> None:
    assert [output.token_ids for output in outputs] == case["outputs"], case
    if case["beam_width"] > 1:
        assert [output.score for output in outputs] == pytest.approx(case["scores"], rel=2e-5, abs=2e-5)


def test_the_recorded_searches_are_worth_comparing() -> None:
    lengths = {len(output) for case in CASES for output in case["outputs"]}
    assert lengths >= set(range(1, 10)) | {12}
    # Which hypotheses are found depends on every parameter.
    for parameter in ("length_penalty", "early_stopping", "eos"):
        others: dict[str, set[str]] = {}
        for case in CASES:
            rest = {k: v for k, v in case.items() if k not in (parameter, "outputs", "scores")}
            others.setdefault(json.dumps(rest), set()).add(json.dumps(case["outputs"]))
        assert any(len(found) > 1 for found in others.values()), parameter


@pytest.mark.parametrize("name", ["llama2", "qwen3"])
def test_native_fp32_finds_what_transformers_finds(name: str) -> None:
    """Twelve searches at a time."""
    executor = NativeExecutor(load_model(TINY / name).graph, SPEC, dtype="float32", threads=2)
    cases = [case for case in CASES if case["model"] == name]
    assert len(cases) > 200
    for at in range(0, len(cases), 12):
        part = cases[at : at + 12]
        found = search(executor, [as_request(str(i), case) for i, case in enumerate(part)])
        for i, case in enumerate(part):
            check(case, found[str(i)])


def test_the_reference_executor_too() -> None:
    executor = ReferenceExecutor(load_model(TINY / "llama2").graph, SPEC)
    for case in [case for case in CASES if case["model"] == "llama2"][5::40]:
        check(case, search(executor, [as_request("r", case)])["r"])


def test_the_default_model() -> None:
    with LLM(dtype="float32", max_model_len=128, check_integrity=True) as llm:
        (result,) = llm.beam_search(
            "The weather today is", beam_width=4, max_tokens=8, length_penalty=0.0, logprobs=0, use_tqdm=False
        )
    assert [output.text for output in result.outputs] == [text for text, _ in SMOLLM2_BEAMS]
    scores = [output.score for output in result.outputs]
    assert scores == pytest.approx([score for _, score in SMOLLM2_BEAMS], abs=5e-4)
    for output in result.outputs:
        assert output.score == pytest.approx(sum(entry.logprob for entry in output.logprobs or []))
