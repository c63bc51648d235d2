"""SimulatedExecutor: a whole engine over it, and that it keeps the executors' promise."""

from __future__ import annotations

import time
from array import array

import pytest

from pinnate.core.batch import Sample, ScheduledSequence, SchedulerOutput
from pinnate.core.config import EngineConfig
from pinnate.core.errors import ConfigError
from pinnate.core.messages import StepOutputs, TokenOutput
from pinnate.core.request import Request
from pinnate.core.sampling import SamplingParams
from pinnate.engine.engine_core import EngineCore
from pinnate.engine.mailbox import Mailbox
from pinnate.executor.simulated import SimulatedExecutor
from pinnate.kvcache.manager import KVCacheManager
from pinnate.scheduler.scheduler import Scheduler
from tests.fakes import VOCAB_SIZE, make_request
from tests.unit.executor.sampling_helpers import FixedMatcher


def generate(
    *requests: Request, step_seconds: float = 0.0, budget: int = 64
) -> dict[tuple[str, int], list[TokenOutput]]:
    """All outputs by request and choice."""
    mailbox = Mailbox()
    scheduler = Scheduler(KVCacheManager(200, 4), max_num_seqs=16, max_num_batched_tokens=budget, max_model_len=200)
    core = EngineCore(scheduler, SimulatedExecutor(VOCAB_SIZE, step_seconds), mailbox, check_integrity=True)
    mailbox.inbox += requests
    core.step()
    while scheduler.has_work():
        core.step()
    outputs: dict[tuple[str, int], list[TokenOutput]] = {}
    for message in mailbox.collect():
        for output in message.outputs if isinstance(message, StepOutputs) else ():
            outputs.setdefault((output.request_id, output.index), []).append(output)
    return outputs


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_the_same_request_gets_the_same_tokens_in_any_company() -> None:
    one = make_request("a", range(30), max_tokens=20)
    alone = tokens(generate(one, budget=8)["a", 0])
    others = [make_request(str(i), range(i, 9), max_tokens=9) for i in range(6)]
    assert tokens(generate(*others, one)["a", 0]) == alone
    assert len(alone) == 20
    assert len(set(alone)) > 10
    assert all(0 <= token < VOCAB_SIZE for token in alone)


def test_choices_seeds_and_banned_tokens() -> None:
    drawn = generate(make_request("a", range(9), n=3, temperature=1.0, max_tokens=8))
    assert len({tuple(tokens(outputs)) for outputs in drawn.values()}) == 3
    every = tuple(range(VOCAB_SIZE))
    held = generate(make_request("a", [1], max_tokens=9, min_tokens=9, stop_token_ids=every[:-1]))["a", 0]
    assert tokens(held) == [VOCAB_SIZE - 1] * 9


def test_logprobs_scores_and_beams() -> None:
    outputs = generate(make_request("a", range(9), logprobs=3, prompt_logprobs=2, max_tokens=4))["a", 0]
    for output in outputs:
        (logprob,) = output.logprobs
        assert logprob.token_id == output.token_ids[0] == logprob.top[0][0]
        assert len(logprob.top) == 3
    assert [score and score.token_id for score in outputs[0].prompt_logprobs] == [None, *range(1, 9)]
    beams = generate(make_request("a", range(9), n=3, use_beam_search=True, max_tokens=6))
    assert {len(tokens(outputs)) for outputs in beams.values()} == {6}
    assert len({tuple(tokens(outputs)) for outputs in beams.values()}) == 3


def test_a_step_takes_its_time() -> None:
    began = time.monotonic()
    generate(make_request("a", [1], max_tokens=4), step_seconds=0.01)
    assert time.monotonic() - began > 0.025


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"simulated_step_ms": -1.0}, "--simulated-step-ms"), ({"kv_disk": "d", "executor": "simulated"}, "--kv-disk")],
)
def test_settings_that_make_no_sense(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", **settings)


def test_masks_are_kept_to() -> None:
    executor = SimulatedExecutor(VOCAB_SIZE)
    params = SamplingParams(temperature=1.0)
    samples = tuple(Sample(params, seed, 0, 5, matcher=FixedMatcher([7, 250])) for seed in range(40))
    step = SchedulerOutput((ScheduledSequence(1, 4, array("i", [3]), array("i", [1, 2]), samples),))
    assert set(executor.execute(step).token_ids) == {7, 250}
