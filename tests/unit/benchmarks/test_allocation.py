"""The benchmark's passes: right tokens under every allocator, what is counted, that skipped steps change nothing."""

from __future__ import annotations

import itertools
import random
import statistics
from array import array

import allocation
import allocation_pass
import chat_trace
import pytest
import sharing

from pinnate.core.batch import ScheduledSequence, SchedulerOutput, StepResult, TokenLogprobs
from pinnate.core.messages import TokenOutput
from pinnate.core.request import FinishReason, RequestStatus, Sequence
from pinnate.engine.engine_core import EngineCore
from pinnate.engine.mailbox import Mailbox
from tests.fakes import FakeExecutor, expected_tokens, make_request

PAGES = 160  # the longest sequence takes 128


@pytest.mark.parametrize("name", allocation_pass.SCHEMES)
def test_every_scheme_computes_the_right_tokens(name: str) -> None:
    rng = random.Random(1)
    scheduler = allocation_pass.SCHEMES[name].scheduler(PAGES)
    mailbox = Mailbox()
    core = EngineCore(scheduler, FakeExecutor(allocation_pass.PAGE_SIZE), mailbox, check_integrity=True)
    requests = {}
    for i in range(12):
        prompt = [rng.randrange(200) for _ in range(rng.randrange(1, 900))]
        requests[str(i)] = make_request(str(i), prompt, max_tokens=rng.randrange(1, 60), ignore_eos=True)
    mailbox.inbox.extend(requests.values())
    got: dict[str, list[int]] = {request_id: [] for request_id in requests}
    core.step()
    while scheduler.has_work():
        for message in mailbox.collect():
            for output in message.outputs:  # type: ignore[union-attr]
                got[output.request_id] += output.token_ids
        core.step()
    for message in mailbox.collect():
        for output in message.outputs:  # type: ignore[union-attr]
            got[output.request_id] += output.token_ids
    assert got == {request_id: expected_tokens(request) for request_id, request in requests.items()}
    assert scheduler.stats().num_free_pages + scheduler.stats().num_cached_pages == PAGES


@pytest.mark.parametrize("name", allocation_pass.SCHEMES)
def test_what_is_counted_does_not_depend_on_which_steps_are_run(name: str) -> None:
    trace = chat_trace.draw_trace(3, 8)
    scheme = allocation_pass.SCHEMES[name]
    executor = FakeExecutor(allocation_pass.PAGE_SIZE)
    dry = allocation_pass.run_trace(scheme, executor, trace, num_pages=PAGES, users=6)
    assert not executor.batches
    run = allocation_pass.run_trace(scheme, executor, trace, windows=lambda _: True, num_pages=PAGES, users=6)
    assert len(executor.batches) >= dry.memory["steps"] > 0
    assert (run.memory, run.counters) == (dry.memory, dry.counters)
    assert dry.seconds == {False: [], True: []}
    assert all(0 < len(run.seconds[kind]) >= run.kinds[kind] - 1 for kind in (False, True))
    assert (run.kinds, run.outputs, run.prompts) == (dry.kinds, dry.outputs, dry.prompts)
    assert sum(dry.kinds.values()) == dry.memory["steps"]
    assert dry.requests == sum(map(len, trace))
    assert dry.counters["generation_tokens"] == sum(wanted for chat in trace for _, wanted in chat)
    parts = ("stored_of_pool", "reserved_for_later", "reserved_for_nothing", "cached", "free")
    assert sum(dry.memory[part] for part in parts) == pytest.approx(1)
    assert min(dry.memory[part] for part in parts) >= 0
    summary = allocation.summarise(scheme, dry, [run])
    assert summary["output_tokens_per_s"] == run.outputs / run.estimated_seconds
    run.counters["preemptions"] += 1
    with pytest.raises(RuntimeError, match="depends on the values"):
        allocation.summarise(scheme, dry, [run])


def test_schemes_rank_as_they_must() -> None:
    trace = chat_trace.draw_trace(4, 60, goes_on=0.0)
    executor = FakeExecutor(allocation_pass.PAGE_SIZE)
    passes = {
        name: allocation_pass.run_trace(allocation_pass.SCHEMES[name], executor, trace, num_pages=512, users=32)
        for name in ("max", "pow2", "oracle", "paged")
    }
    stored = [p.memory["stored_of_reserved"] for p in passes.values()]
    assert stored == sorted(stored)
    assert stored[-1] > 0.96
    assert passes["max"].memory["max_batch"] == 512 // 128
    assert passes["oracle"].memory["reserved_for_nothing"] < 0.02
    assert all(passes[name].counters["preemptions"] == 0 for name in ("max", "pow2", "oracle"))


def test_slots_are_counted_once_however_many_share_them() -> None:
    scheduler = allocation_pass.SCHEMES["shared"].scheduler(8)
    request = make_request("r", [1] * 40, max_tokens=20)
    tables = ([1, 2, 3], [1, 2, 4, 5])  # two whole pages in common; 40 and 50 tokens
    for number, table in enumerate(tables):
        seq = Sequence(number, request, number, page_table=array("i", table), status=RequestStatus.RUNNING)
        seq.num_computed_tokens = (40, 49)[number]
        seq.token_ids.extend([1] * 50)
        scheduler._queues.running.append(seq)
    step = SchedulerOutput((ScheduledSequence(1, 49, array("i", [1]), array("i", tables[1])),))
    occupancy = allocation_pass.Occupancy(8 * 16)
    occupancy.sample(scheduler, step)
    stored = 32 + 8 + 16 + 2
    # Both end with 59 tokens stored, in 64 slots; the second has all four pages, of which 5 slots are for nothing.
    assert occupancy.slots == {"stored": stored, "later": 5 * 16 - stored - 5, "never": 5, "cached": 0, "free": 48}
    assert occupancy.shares()["mean_batch"] == occupancy.max_batch == 2


def test_time_is_weighted_by_the_kinds_of_steps_in_the_whole_trace() -> None:
    done = allocation_pass.Pass()
    done.kinds.update({False: 90, True: 10})
    done.seconds[False] = [1.0, 3.0]
    done.seconds[True] = [8.0]
    assert done.estimated_seconds == 90 * 2.0 + 10 * 8.0
    done.seconds[True] = []  # no window met one: the mean of all stands in
    assert done.estimated_seconds == 100 * 2.0


def test_windows_are_spread_over_the_trace_and_differ_between_repeats() -> None:
    chosen = []
    for repeat in range(3):
        starts = [step for step in range(4800) if allocation.evenly(4800, repeat, 3)(step)]
        assert len(starts) == allocation.WINDOWS
        assert {b - a for a, b in itertools.pairwise(starts)} == {4800 // allocation.WINDOWS}
        chosen += starts
    assert len(set(chosen)) == 3 * allocation.WINDOWS


def test_the_trace_has_the_lengths_it_claims() -> None:
    rng = random.Random(0)
    raw = [chat_trace._log_normal(rng, chat_trace.MEAN_OUTPUT, chat_trace.SIGMA_OUTPUT) for _ in range(40_000)]
    assert statistics.fmean(raw) == pytest.approx(chat_trace.MEAN_OUTPUT, rel=0.03)
    trace = chat_trace.draw_trace(5, 500)
    assert trace == chat_trace.draw_trace(5, 500)
    assert trace != chat_trace.draw_trace(6, 500)
    for chat in trace:
        assert sum(map(sum, chat)) <= chat_trace.MAX_TOTAL
        assert all(4 <= asked <= 1024 and wanted >= 4 for asked, wanted in chat)
    described = allocation.describe_trace([[(10, 5), (3, 2)], [(7, 1)]])
    assert described["mean_prompt"] == pytest.approx((10 + 18 + 7) / 3)


def test_users_send_the_history_and_start_the_next_conversation() -> None:
    people = chat_trace.Users([[(5, 2), (3, 1)], [(4, 1)], [(6, 1)]], users=2)
    first, second = people.first()
    assert [len(first.prompt_token_ids), len(second.prompt_token_ids)] == [5, 4]
    assert people.hear(TokenOutput(first.request_id, 0, [11])) is None
    again = people.hear(TokenOutput(first.request_id, 0, [12], finish_reason=FinishReason.LENGTH))
    assert again is not None
    assert again.prompt_token_ids[:7] == [*first.prompt_token_ids, 11, 12]
    assert len(again.prompt_token_ids) == 10
    third = people.hear(TokenOutput(second.request_id, 0, [9], finish_reason=FinishReason.LENGTH))
    assert third is not None
    assert len(third.prompt_token_ids) == 6
    assert people.hear(TokenOutput(again.request_id, 0, [1], finish_reason=FinishReason.LENGTH)) is None
    assert not people.is_done
    assert people.hear(TokenOutput(third.request_id, 0, [1], finish_reason=FinishReason.LENGTH)) is None
    assert people.is_done
    with pytest.raises(RuntimeError, match="no pages"):
        chat_trace.Users([[(5, 2)]], 1).hear(
            TokenOutput("1", 0, [], finish_reason=FinishReason.ERROR, error="no pages")
        )


class RankingExecutor(FakeExecutor):
    """Knows candidates for beams: the drawn token is the likeliest, those after it less and less so."""

    def execute(self, output: SchedulerOutput) -> StepResult:
        result = super().execute(output)
        samples = [sample for part in output.sequences for sample in part.samples]
        for i, sample in enumerate(samples):
            if sample.num_top is None:
                continue
            ranked = [((result.token_ids[i] + k) % self.vocab_size, -1.0 - k / 8) for k in range(self.vocab_size)]
            logprob = dict(ranked)[sample.target]
            result.token_ids[i] = sample.target
            result.logprobs[i] = TokenLogprobs(sample.target, logprob, 1, ranked[: sample.num_top])
        return result


def test_sharing_counts_pages_of_all_choices() -> None:
    result = sharing.measure_sharing(RankingExecutor(16), 64, 16, 128, lambda _: (64, 33))
    assert all(row["prompt_tokens_computed"] == 1 for row in result.values())
    # 4 pages of prompt shared by all; the computed tokens of each choice are in pages of its own. After the step that
    # forks the choices nothing of theirs is computed yet; after the last step they are gone.
    row = result["n = 8"]
    held = 4 + sum(4 + 8 * -(-k // 16) for k in range(1, 32))
    lone = 8 * 4 + sum(8 * -(-(64 + k) // 16) for k in range(1, 32))
    assert (row["page_steps"], row["page_steps_unshared"]) == (4 * held, 4 * lone)
    assert row["saved"] == pytest.approx(1 - held / lone)
    row = result["beam width 4"]
    assert 0 < row["page_steps"] < row["page_steps_unshared"]
    assert row["saved"] > 0.4
