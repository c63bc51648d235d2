"""Structured outputs of the default model: they fit, and the same request gives the same bytes however it runs.

benchmarks/structured.py has the long version: 500 outputs.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pinnate import LLM, SamplingParams
from pinnate.core.batch import SchedulerOutput
from pinnate.core.request import FinishReason
from pinnate.core.structured import StructuredOutput

SCHEMAS = json.loads((Path(__file__).parent.parent / "data" / "schemas.json").read_text(encoding="utf-8"))
MAX_TOKENS = 160
SEEDS = (1, 2)
NAMES = (
    "nested_three_deep",
    "unicode_names",
    "recursive_expression",
    "pattern_date",
    "one_of_tagged",
    "string_lengths",
)
Outputs = dict[str, tuple[str, list[int], FinishReason | None]]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=1024, max_num_seqs=48, check_integrity=True) as made:
        yield made


def params(name: str, **fields: Any) -> SamplingParams:
    structured = StructuredOutput(kind="json_schema", text=json.dumps(SCHEMAS[name], ensure_ascii=False))
    return SamplingParams(**{"max_tokens": MAX_TOKENS, "seed": 1, "structured_output": structured, **fields})


def prompt(name: str) -> str:
    return f"An example of {name.replace('_', ' ')} in JSON:\n"


def run(llm: LLM, names: tuple[str, ...], **fields: Any) -> Outputs:
    """All at once."""
    results = llm.generate([prompt(name) for name in names], [params(name, **fields) for name in names], use_tqdm=False)
    found = [(name, result.outputs[0]) for name, result in zip(names, results, strict=True)]
    return {name: (output.text, output.token_ids, output.finish_reason) for name, output in found}


def exact(text: str) -> Any:
    return json.loads(text, parse_float=Decimal)  # 1.12 is a multiple of 0.01


@pytest.fixture(scope="module")
def alone(llm: LLM) -> Outputs:
    return {name: run(llm, (name,))[name] for name in NAMES}


def test_outputs_fit_their_schemas(llm: LLM) -> None:
    finished = 0
    for seed in SEEDS:
        for name, (text, _, reason) in run(llm, tuple(SCHEMAS), seed=seed).items():
            assert reason in (FinishReason.STOP, FinishReason.LENGTH)
            if reason is FinishReason.STOP:
                finished += 1
                schema = exact(json.dumps(SCHEMAS[name]))
                kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
                kind(schema, format_checker=kind.FORMAT_CHECKER).validate(exact(text))
    assert finished >= 60


def test_in_a_batch_as_alone(llm: LLM, alone: Outputs) -> None:
    assert (
        run(llm, (*NAMES, *[name for name in SCHEMAS if name not in NAMES][:12]))["pattern_date"]
        == alone["pattern_date"]
    )
    assert run(llm, NAMES) == alone


def test_forced_tokens_drawn_one_by_one_are_the_same(llm: LLM, alone: Outputs) -> None:
    before = llm.stats().forced_tokens
    assert run(llm, NAMES, logprobs=0) == alone
    assert llm.stats().forced_tokens == before > 0


def test_each_choice_is_what_its_seed_gives_alone(llm: LLM) -> None:
    [result] = llm.generate(prompt(NAMES[0]), params(NAMES[0], n=3, seed=7), use_tqdm=False)
    for index, output in enumerate(result.outputs):
        assert run(llm, NAMES[:1], seed=7 + index)[NAMES[0]] == (output.text, output.token_ids, output.finish_reason)


def test_preempted_again_and_again_it_is_the_same(llm: LLM, alone: Outputs, monkeypatch: pytest.MonkeyPatch) -> None:
    core, steps = llm._client.core, itertools.count()
    schedule = core.scheduler.schedule

    def preempt_first() -> SchedulerOutput | None:
        if next(steps) % 4 == 3:
            for seq in list(core.scheduler._queues.running):
                core.scheduler._preempt(seq)
        return schedule()

    monkeypatch.setattr(core.scheduler, "schedule", preempt_first)
    before = llm.stats().preemptions
    assert run(llm, NAMES) == alone
    assert llm.stats().preemptions > before + len(NAMES)


def test_cut_into_small_chunks_it_is_the_same(alone: Outputs) -> None:
    with LLM(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=8) as small:
        assert run(small, NAMES) == alone


def test_plain_neighbours_are_left_alone(llm: LLM) -> None:
    plain = SamplingParams(max_tokens=24, temperature=0.0)
    text = "1, 2, 3, 4, 5, 6, 7,"
    [expected] = llm.generate(text, plain, use_tqdm=False)
    mixed = llm.generate([prompt(NAMES[0]), text, prompt(NAMES[1])], [params(NAMES[0]), plain, params(NAMES[1])])
    assert mixed[1].outputs[0].token_ids == expected.outputs[0].token_ids


ENDS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "abc", "stop"),
    ({"ignore_eos": True}, "abc", "stop"),
    ({"min_tokens": 10}, "abc", "stop"),
    ({"logit_bias": dict.fromkeys(range(0, 49152, 3), -100.0)}, "abc", "stop"),
    ({"stop": ("b",)}, "a", "stop"),
    ({"stop": ("b",), "include_stop_str_in_output": True}, "ab", "stop"),
    ({"presence_penalty": 2.0, "repetition_penalty": 5.0, "top_k": 1, "temperature": 0.0}, "abc", "stop"),
]


@pytest.mark.parametrize(("fields", "text", "reason"), ENDS, ids=str)
def test_the_language_goes_before_other_wishes(llm: LLM, fields: dict[str, Any], text: str, reason: str) -> None:
    structured = StructuredOutput(kind="regex", text="abc")
    wanted = SamplingParams(**{"max_tokens": 20, "structured_output": structured, **fields})
    [output] = llm.generate("The", wanted, use_tqdm=False)[0].outputs
    assert (output.text, output.finish_reason) == (text, reason)


def test_it_goes_on_while_the_language_allows_it_where_the_end_is_put_off(llm: LLM) -> None:
    structured = StructuredOutput(kind="regex", text="[0-9]{1,30}")
    for fields, least in (({"min_tokens": 9}, 9), ({"ignore_eos": True}, 30)):
        wanted = SamplingParams(max_tokens=40, seed=1, structured_output=structured, **fields)
        [output] = llm.generate("No digits here.", wanted, use_tqdm=False)[0].outputs
        assert least <= len(output.token_ids) <= 31
        assert output.finish_reason is FinishReason.STOP


def test_logprobs_are_of_the_raw_distribution(llm: LLM) -> None:
    structured = StructuredOutput(kind="choice", text='["zebra", "quartz"]')
    [masked] = llm.generate("1, 2, 3,", SamplingParams(max_tokens=1, logprobs=3, structured_output=structured))
    [free] = llm.generate("1, 2, 3,", SamplingParams(max_tokens=1, logprobs=3, temperature=0.0))
    ours, theirs = masked.outputs[0].logprobs, free.outputs[0].logprobs
    assert ours is not None
    assert theirs is not None
    assert ours[0].top == theirs[0].top
    assert ours[0].rank > 100
