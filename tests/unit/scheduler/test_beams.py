"""Beam searches in the scheduler, step by step: rows, forks, copies, ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pinnate.core.batch import Sample, SchedulerOutput, StepResult, TokenLogprobs
from pinnate.core.errors import ContextLengthError, InvalidRequestError
from pinnate.core.messages import CacheReport, MatchEnd, TokenOutput
from pinnate.core.request import FinishReason, RequestStatus
from pinnate.kvcache.manager import KVCacheManager
from pinnate.scheduler.scheduler import Scheduler
from tests.unit.scheduler.helpers import EOS, Engine, make_request

VOCAB = 10


class BeamEngine(Engine):
    """`table(position, token before)` gives the log-probabilities of tokens; those it leaves out have -20."""

    def __init__(self, table: Callable[[int, int], dict[int, float]], **sizes: int) -> None:
        super().__init__(**sizes)  # type: ignore[arg-type]
        self.table = table
        self.outputs: list[TokenOutput] = []

    def search(self, name: str, prompt: list[int], **fields: object) -> None:
        self.add(name, prompt, **{"use_beam_search": True, "length_penalty": 0.0, **fields})

    def result(self, output: SchedulerOutput) -> StepResult:
        logprobs: list[TokenLogprobs | None] = []
        for part in output.sequences:
            logprobs += [self.report(sample, part.token_ids[-1]) for sample in part.samples]
        return StepResult([0] * len(logprobs), logprobs, super().result(output).scores)

    def report(self, sample: Sample, before: int) -> TokenLogprobs:
        scored = {token: -20.0 - token for token in range(VOCAB)} | self.table(sample.position, before)
        ranked = sorted(scored.items(), key=lambda pair: -pair[1])
        rank = next(i for i, (token, _) in enumerate(ranked, 1) if token == sample.target)
        return TokenLogprobs(sample.target, scored[sample.target], rank, ranked[: sample.num_top])

    def take(self, outputs: list[TokenOutput]) -> None:
        super().take(outputs)
        self.outputs += outputs

    def tables(self) -> list[list[int]]:
        return [list(seq.page_table) for seq in self.scheduler._queues.running]


def even(_position: int, _before: int) -> dict[int, float]:
    return {1: -1.0, 2: -1.1, 3: -1.2, 4: -1.3}


def test_the_report_of_the_cache_comes_with_the_first_choice() -> None:
    engine = BeamEngine(even, reports=True)
    engine.search("a", list(range(1, 10)), n=2, max_tokens=2)
    engine.run()
    engine.search("b", list(range(1, 10)), n=2, max_tokens=2, cache_report=True)
    engine.run()
    reports = [output.cache_report for output in engine.outputs if output.request_id == "b"]
    assert reports == [CacheReport(9, 8, MatchEnd.LAST_TOKEN), None]


def test_one_row_a_beam_and_nothing_to_see_before_the_end() -> None:
    engine = BeamEngine(even)
    engine.search("a", [7, 8, 9], n=3, max_tokens=3)
    for sequences in (1, 3, 3):
        assert engine.outputs == []
        engine.step()
        assert engine.output is not None
        assert [len(part.samples) for part in engine.output.sequences] == [1] * sequences
    # max_tokens is 3: the search needs no fourth step, and no beam computes its last token.
    assert [(output.index, output.token_ids) for output in engine.outputs] == [
        (0, [1, 1, 1]),
        (1, [1, 1, 2]),
        (2, [1, 2, 1]),
    ]
    assert [output.finish_reason for output in engine.outputs] == [FinishReason.LENGTH] * 3
    assert [output.score for output in engine.outputs] == pytest.approx([-3.0, -3.1, -3.1])
    assert not engine.scheduler.has_work()
    assert engine.scheduler.stats().generation_tokens == 9


def test_beams_share_whole_pages_and_copy_the_last_one_on_write() -> None:
    engine = BeamEngine(even, page_size=4)
    engine.search("a", [5] * 10, n=4, max_tokens=8, ignore_eos=True)
    engine.step()
    tables = engine.tables()
    assert len(tables) == 4
    assert len({tuple(table) for table in tables}) == 1  # nothing is copied yet
    assert engine.scheduler.stats().num_free_pages == 64 - 3
    engine.step()
    assert engine.output is not None
    assert len(engine.output.copies) == 3  # the fourth one writes into the page itself
    assert {source for source, _ in engine.output.copies} == {tables[0][2]}


def test_no_copy_where_a_page_is_full() -> None:
    engine = BeamEngine(even, page_size=4)
    engine.search("a", [5] * 8, n=4, max_tokens=8, ignore_eos=True)
    engine.step()
    engine.step()
    assert engine.output is not None
    assert engine.output.copies == ()
    first = engine.tables()[0][:2]
    assert all(table[:2] == first for table in engine.tables())


def test_beams_die_and_their_pages_are_free_at_once() -> None:
    """All continuations come from one beam: the others' pages go, and each heir begins with the parent's."""

    def one_parent(position: int, before: int) -> dict[int, float]:
        return even(position, before) if position < 10 or before == 1 else {}

    engine = BeamEngine(one_parent, page_size=4, caching=False)
    engine.search("a", [5] * 9, n=4, max_tokens=8, ignore_eos=True)
    engine.step()  # 4 beams on 3 pages
    engine.step()  # each writes position 9 into a page of its own, then all go on from the first
    assert engine.scheduler.stats().num_free_pages == 64 - 3
    assert len({tuple(table) for table in engine.tables()}) == 1
    assert sorted(seq.index for seq in engine.scheduler._queues.running) == [0, 1, 2, 3]
    assert [seq.token_ids[-2:].tolist() for seq in engine.scheduler._queues.running] == [[1, 1], [1, 2], [1, 3], [1, 4]]


def test_the_saving_is_counted() -> None:
    engine = BeamEngine(even, page_size=4, caching=False)
    engine.search("a", [5] * 40, n=4, max_tokens=3, ignore_eos=True)
    engine.run()
    stats = engine.scheduler.stats()
    # Three steps of the search: the prompt's (1 beam, 10 pages), and two of 4 beams on 10 shared pages and one each.
    assert stats.beam_page_steps == 10 + 14 + 14
    assert stats.beam_lone_page_steps == 10 + 44 + 44


def test_the_end_of_a_turn_ends_a_beam_not_the_search() -> None:
    def ends_early(position: int, _before: int) -> dict[int, float]:
        return {EOS: -0.5, 1: -1.0, 2: -2.0} if position == 3 else {1: -0.1, 2: -3.0}

    engine = BeamEngine(ends_early)
    engine.search("a", [5, 6, 7], n=2, max_tokens=4, length_penalty=1.0)
    engine.run()
    first, second = engine.outputs
    assert (first.token_ids, first.finish_reason) == ([1, 1, 1, 1], FinishReason.LENGTH)
    assert (second.token_ids, second.finish_reason, second.stop_token) == ([EOS], FinishReason.STOP, EOS)
    assert first.score == pytest.approx(-1.3 / 4)


def test_bans_and_biases() -> None:
    def likes_eos(_position: int, _before: int) -> dict[int, float]:
        return {EOS: -0.1, 1: -3.0, 2: -4.0}

    engine = BeamEngine(likes_eos)
    engine.search("min", [5], n=2, max_tokens=3, min_tokens=2)
    engine.search("up", [6], n=2, max_tokens=3, logit_bias={9: 40.0, EOS: -5.0}, logprobs=1)
    engine.run()
    assert engine.tokens["min", 0] == [1, 1, EOS]
    # Token 9 has -29 and rank 10: with 40 more it wins. What is shown is the raw log-probability.
    assert engine.tokens["up", 0] == [9, 9, 9]
    (best,) = [output for output in engine.outputs if (output.request_id, output.index) == ("up", 0)]
    assert best.score == pytest.approx(3 * (40.0 - 29.0))
    assert best.logprobs == [TokenLogprobs(9, -29.0, 10, [(EOS, -0.1)])] * 3


def test_what_a_beam_reports() -> None:
    engine = BeamEngine(even)
    fields = {"logit_bias": {4: -1.0, 8: 2.0, 9: 1.0}, "stop_token_ids": (3,), "stop": ("x",), "max_tokens": 2}
    engine.search("a", [5], n=2, beam_width=3, **fields)
    engine.step()
    assert engine.output is not None
    samples = engine.output.sequences[0].samples
    # twice the width where stop strings may end as many, 2 stop tokens, 3 biased ones
    assert [(sample.target, sample.num_top) for sample in samples] == [(8, 6 + 2 + 3), (9, 0)]


def test_logprobs_carry_the_alternatives_asked_for() -> None:
    engine = BeamEngine(even)
    engine.search("a", [5], n=1, max_tokens=2, logprobs=3)
    engine.run()
    (output,) = engine.outputs
    assert output.logprobs == [TokenLogprobs(1, -1.0, 1, [(1, -1.0), (2, -1.1), (3, -1.2)])] * 2


def test_scored_prompts_come_with_the_first_choice() -> None:
    engine = BeamEngine(even, budget=2)
    engine.search("a", [5, 6, 7, 8], n=2, max_tokens=2, prompt_logprobs=0)
    engine.run()
    first, second = engine.outputs
    assert first.prompt_logprobs is not None
    assert [entry and entry.token_id for entry in first.prompt_logprobs] == [None, 6, 7, 8]
    assert second.prompt_logprobs is None


def test_aborting_one_choice_leaves_the_search_to_the_others() -> None:
    engine = BeamEngine(even)
    engine.search("a", [5], n=3, max_tokens=4)
    engine.step()
    engine.take(engine.scheduler.abort(["a"], 0))
    assert engine.ends["a", 0].finish_reason is FinishReason.ABORT
    engine.run()
    assert [engine.tokens["a", i] for i in (1, 2)] == [[1, 1, 1, 2], [1, 1, 2, 1]]
    assert engine.tokens["a", 0] == []


def test_aborting_all_frees_every_page() -> None:
    engine = BeamEngine(even, caching=False)
    engine.search("a", [5] * 9, n=4, max_tokens=9)
    for _ in range(3):
        engine.step()
    outputs = engine.scheduler.abort(["a"])
    assert [(output.index, output.finish_reason) for output in outputs] == [(i, FinishReason.ABORT) for i in range(4)]
    assert engine.scheduler.stats().num_free_pages == 64
    assert not engine.scheduler.has_work()
    engine.scheduler.check_integrity()


def test_a_failed_step_ends_every_choice_once() -> None:
    engine = BeamEngine(even)
    engine.search("a", [5] * 9, n=3, max_tokens=9)
    engine.step()
    output = engine.scheduler.schedule()
    assert output is not None
    outputs = engine.scheduler.fail(output, "boom")
    assert [(o.index, o.finish_reason, o.error) for o in outputs] == [(i, FinishReason.ERROR, "boom") for i in range(3)]
    engine.scheduler.check_integrity()
    assert not engine.scheduler.has_work()


def test_a_preempted_beam_holds_the_search_up_and_changes_nothing() -> None:
    engine, calm = BeamEngine(even), BeamEngine(even)
    for each in (engine, calm):
        each.search("a", [5] * 6, n=3, max_tokens=6, ignore_eos=True)
    calm.run()
    engine.step()
    engine.step()
    victim = engine.scheduler._queues.running[1]
    engine.scheduler._preempt(victim)
    assert victim.status is RequestStatus.PREEMPTED
    engine.step()
    assert engine.sizes() == [1, 1, 1]  # it starts again at once: only its last token was lost
    engine.scheduler._preempt(engine.scheduler._queues.running[0])
    engine.scheduler.flush_cache()
    engine.run()
    assert engine.tokens == calm.tokens


def test_beams_in_several_steps_wait_for_each_other_and_may_be_parked() -> None:
    engine, calm = BeamEngine(even, budget=2, page_size=2), BeamEngine(even)
    for each in (engine, calm):
        each.search("a", [5], n=3, max_tokens=4, ignore_eos=True)
    calm.run()
    engine.step()
    engine.step()  # two of the three
    assert engine.sizes() == [1, 1]
    waiting = engine.scheduler._queues.running[0]
    engine.scheduler._preempt(waiting)
    assert waiting.status is RequestStatus.PARKED
    assert engine.scheduler.stats().num_waiting == 0  # it has nothing to compute
    engine.step()  # the third: the search goes on, and what continues the parked one waits to be computed
    assert engine.sizes() == [1]
    assert engine.scheduler.stats().num_waiting >= 1
    engine.run()
    assert engine.tokens == calm.tokens


def test_admission_of_all_beams_or_none() -> None:
    engine = BeamEngine(even, max_num_seqs=5)
    engine.search("a", [5], n=1, beam_width=4, max_tokens=5, ignore_eos=True)
    engine.search("b", [6], n=2, max_tokens=2)
    engine.step()
    assert engine.sizes() == [1]
    engine.step()
    assert engine.sizes() == [1] * 4
    engine.run()
    assert (len(engine.tokens["a", 0]), len(engine.tokens["b", 1])) == (5, 2)


def test_what_can_never_run_is_refused() -> None:
    scheduler = Scheduler(KVCacheManager(8, 4), max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64)
    with pytest.raises(InvalidRequestError, match="5") as wide:
        scheduler.add(make_request("a", [1], n=1, beam_width=5, use_beam_search=True))
    assert wide.value.param == "n"
    with pytest.raises(ContextLengthError, match="tokens of KV memory"):
        scheduler.add(make_request("a", [1], n=1, beam_width=4, use_beam_search=True, max_tokens=9))
    scheduler.add(make_request("a", [1], n=1, beam_width=4, use_beam_search=True, max_tokens=8))
