"""The Scheduler, step by step."""

import pytest

from pinnate.core.errors import ContextLengthError, InvalidRequestError, QueueFullError
from pinnate.core.request import FinishReason
from pinnate.kvcache.pins import Pins
from tests.unit.scheduler.helpers import EOS, Engine, make_request


def test_decodes_come_first_and_prompts_share_the_rest_of_the_budget() -> None:
    engine = Engine(budget=8, caching=False)
    engine.add("a", [1, 2, 3])
    engine.add("b", list(range(10, 30)))
    engine.step()
    assert engine.sizes() == [3, 5]
    engine.add("c", [7, 8])
    engine.step()
    assert engine.sizes() == [1, 7]
    engine.step()
    assert engine.sizes() == [1, 7]
    engine.step()
    assert engine.sizes() == [1, 1, 2]  # b's last token counts as a decode
    engine.run()
    assert engine.tokens == {("a", 0): [100] * 4, ("b", 0): [100] * 4, ("c", 0): [100] * 4}


def test_beside_decodes_a_step_takes_little_of_the_prompts() -> None:
    engine = Engine(budget=512, caching=False, max_model_len=1024, num_pages=256)
    engine.add("long", list(range(10, 410)), max_tokens=20)
    engine.step()
    assert engine.sizes() == [400]  # nobody waits for a token
    engine.add("late", list(range(10, 160)))
    engine.add("later", list(range(10, 80)))
    for sizes in ([1, 64], [1, 64], [1, 22, 42], [1, 1, 28], [1, 1, 1]):
        engine.step()
        assert engine.sizes() == sizes


def test_only_the_last_chunk_of_a_prompt_samples() -> None:
    engine = Engine(budget=3)
    engine.add("a", [1, 2, 3, 4, 5], max_tokens=1)
    assert engine.step() == []
    assert engine.output is not None
    assert engine.output.sequences[0].samples == ()
    (output,) = engine.step()
    sample = engine.output.sequences[0].samples[0]
    assert (sample.position, sample.seed, sample.index) == (5, 0, 0)
    assert (output.token_ids, output.finish_reason) == ([100], FinishReason.LENGTH)
    assert not engine.scheduler.has_work()


def test_stop_conditions() -> None:
    engine = Engine(max_model_len=8)
    engine.token = lambda sample: {"eos": EOS, "stop": 9, "ignore": EOS}.get(names[sample.seed], 100)
    names = ["eos", "stop", "ignore", "length", "context"]
    engine.add("eos", [1], seed=0)
    engine.add("stop", [1], seed=1, stop_token_ids=(9,))
    engine.add("ignore", [1], seed=2, ignore_eos=True)
    engine.add("length", [1], seed=3, max_tokens=2)
    engine.add("context", [1, 2, 3, 4], seed=4, max_tokens=4)
    engine.run()
    ends = {name: (engine.ends[name, 0].finish_reason, engine.ends[name, 0].stop_token) for name in names}
    assert ends == {
        "eos": (FinishReason.STOP, EOS),
        "stop": (FinishReason.STOP, 9),
        "ignore": (FinishReason.LENGTH, None),
        "length": (FinishReason.LENGTH, None),
        "context": (FinishReason.LENGTH, None),
    }
    assert [len(engine.tokens[name, 0]) for name in names] == [1, 1, 4, 2, 4]


def test_until_min_tokens_the_ends_are_banned() -> None:
    engine = Engine()
    banned = []
    engine.token = lambda sample: banned.append(sample.banned) or EOS  # type: ignore[func-returns-value]
    engine.add("a", [1], max_tokens=4, min_tokens=2, stop_token_ids=(9,))
    engine.run()
    assert banned == [(EOS, 9), (EOS, 9), ()]
    assert engine.tokens["a", 0] == [EOS] * 3
    assert engine.ends["a", 0].finish_reason is FinishReason.STOP


def test_history_goes_along_only_for_penalties() -> None:
    engine = Engine()
    engine.add("plain", [1, 2])
    engine.add("penalty", [3, 4], repetition_penalty=1.1)
    engine.step()
    assert engine.output is not None
    plain, penalty = (part.samples[0] for part in engine.output.sequences)
    assert plain.token_ids is None
    assert penalty.token_ids is not None
    assert penalty.num_prompt_tokens == 2


def test_max_tokens_zero_computes_the_prompt_and_ends() -> None:
    engine = Engine(budget=3)
    engine.add("a", [1, 2, 3, 4, 5], max_tokens=0, n=2, prompt_logprobs=0)
    engine.step()
    first, second = engine.step()
    assert (first.token_ids, first.finish_reason, first.index) == ([], FinishReason.LENGTH, 0)
    assert (second.token_ids, second.finish_reason, second.index) == ([], FinishReason.LENGTH, 1)
    assert first.prompt_logprobs is not None
    assert [s and (s.token_id, s.logprob) for s in first.prompt_logprobs] == [None, (2, -1), (3, -2), (4, -3), (5, -4)]
    assert second.prompt_logprobs is None


def test_a_scored_prompt_does_not_use_the_cache_but_feeds_it() -> None:
    engine = Engine()
    engine.add("a", [1, 2, 3, 4, 5], prompt_logprobs=1)
    engine.run()
    engine.add("b", [1, 2, 3, 4, 5], prompt_logprobs=2)
    engine.step()
    assert engine.output is not None
    part = engine.output.sequences[0]
    assert (part.start, part.score, part.score_top) == (0, part.token_ids[1:], 2)
    engine.add("c", [1, 2, 3, 4, 5])
    engine.step()
    assert engine.sizes()[-1] == 1


@pytest.mark.parametrize(("start", "cached"), [(0, 0), (1, 0), (4, 3), (9, 8), (99, 8)])
def test_scores_from_a_token_on_leave_what_is_before_to_the_cache(start: int, cached: int) -> None:
    prompt = list(range(1, 10))
    engine = Engine(page_size=1)
    engine.add("a", prompt)
    engine.run()
    engine.add("b", prompt, prompt_logprobs=0, prompt_logprobs_start=start)
    outputs = engine.step()
    assert engine.output is not None
    assert engine.output.sequences[0].start == cached
    scores = outputs[0].prompt_logprobs
    assert scores is not None
    assert len(scores) == 9
    assert [s and s.token_id for s in scores[max(start, 1) :]] == prompt[max(start, 1) :]
    assert all(score is None for score in scores[: max(start, 1)])


def test_scores_survive_preemption() -> None:
    engine = Engine(budget=3, num_pages=4)
    engine.add("a", list(range(1, 10)), prompt_logprobs=0, max_tokens=1)
    engine.step()
    engine.step()
    victim = engine.scheduler._queues.running[0]
    engine.scheduler._preempt(victim)
    engine.scheduler.flush_cache()
    (starts, outputs) = ([], [])
    while engine.scheduler.has_work():
        outputs += engine.step()
        assert engine.output is not None
        part = engine.output.sequences[0]
        starts.append((part.start, part.score is not None))
    assert starts == [(0, False), (3, False), (6, True)]  # what is scored is not scored again
    assert outputs[0].prompt_logprobs is not None
    assert [s and s.token_id for s in outputs[0].prompt_logprobs] == [None, *range(2, 10)]


def test_cached_prompt_tokens_are_reported_once_for_all_choices() -> None:
    engine = Engine()
    engine.add("a", [1, 2, 3, 4, 5, 6])
    engine.run()
    engine.add("b", [1, 2, 3, 4, 5, 6, 7], n=2)
    outputs = engine.step()
    assert [output.num_cached_tokens for output in outputs] == [6, 0]
    stats = engine.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits, stats.prompt_tokens) == (13, 6, 13)


def test_choices_share_the_prompt_and_draw_apart() -> None:
    engine = Engine()
    engine.token = lambda sample: 100 + sample.index
    engine.add("a", [1, 2, 3, 4, 5, 6], n=3, max_tokens=3)
    engine.step()
    assert engine.sizes() == [6]
    assert engine.scheduler.stats().num_running == 3
    assert 64 - engine.cache.num_available_pages == 2
    engine.step()
    assert engine.output is not None
    assert len(engine.output.copies) == 2
    engine.run()
    assert engine.tokens == {("a", i): [100 + i] * 3 for i in range(3)}


def test_n_counts_as_n_sequences_from_admission_on() -> None:
    engine = Engine(max_num_seqs=3, budget=4)
    engine.add("a", [1, 2, 3, 4, 5, 6], n=2)
    engine.add("b", [7], n=2)
    engine.add("c", [8])
    engine.step()
    engine.step()
    assert engine.sizes() == [2]  # b does not fit beside a, and c does not pass it
    engine.run()
    assert len(engine.ends) == 5


def test_a_shared_prefix_under_way_is_waited_for_while_others_pass() -> None:
    engine = Engine(budget=32)
    shared = list(range(1, 21))
    engine.add("first", [*shared, 30])
    engine.add("second", [*shared, 40])
    engine.add("other", [50, 51])
    engine.step()
    assert engine.sizes() == [21, 2]
    engine.step()
    assert engine.sizes() == [1, 1, 1]  # second: one token of its own
    assert engine.scheduler.stats().prefix_cache_hits == 20
    engine.run()
    assert len(engine.ends) == 3


def test_without_caching_or_with_another_salt_nobody_waits() -> None:
    for fields in ({"caching": False}, {}):
        engine = Engine(**fields)  # type: ignore[arg-type]
        engine.add("first", list(range(1, 21)), cache_salt="a")
        engine.add("second", list(range(1, 21)), cache_salt="a" if fields else "b")
        engine.step()
        assert engine.sizes() == [20, 20]


@pytest.mark.parametrize("other", [{"cache_salt": "b"}, {"cache_salt": ""}, {"cache_salt": "a", "adapter": "x"}])
@pytest.mark.parametrize("underway", [False, True])
def test_a_foreign_salt_shows_no_hit_in_any_work_done(other: dict[str, str], underway: bool) -> None:
    """Whoever guesses another tenant's prompt sees the steps, tokens and pages of one that nobody has sent before."""
    prompt = list(range(1, 31))

    def work(victim: list[int]) -> list[tuple[int, ...]]:
        engine = Engine(budget=16)
        engine.add("victim", victim, cache_salt="a", max_tokens=3)
        if underway:
            engine.step()
        else:
            engine.run()
        engine.add("guess", prompt, max_tokens=3, **other)
        seen = []
        while ("guess", 0) not in engine.ends:
            engine.step()
            assert engine.output is not None
            mine = [part for part in engine.output.sequences if tuple(part.token_ids[:1]) != (90,)]
            seen.append((*engine.sizes(), len(mine), len(engine.output.copies), engine.cache.num_free_pages))
        assert engine.ends["guess", 0].num_cached_tokens == 0
        return seen

    assert work(prompt) == work([t + 50 for t in prompt])


def test_all_that_may_be_pinned_is_pinned_and_the_largest_request_still_runs() -> None:
    engine = Engine(num_pages=9, page_size=4, pinnable_pages=4)
    engine.add("prefix", list(range(1, 17)), max_tokens=1)
    engine.run()
    pins = Pins(engine.cache)
    assert pins.pin(list(range(1, 17))) is not None
    engine.add("largest", list(range(50, 67)), max_tokens=4)  # the last token is never computed: 20, five pages
    engine.run(max_steps=10)
    assert len(engine.tokens["largest", 0]) == 4
    with pytest.raises(ContextLengthError, match="there are 20"):
        engine.add("larger", list(range(50, 67)), max_tokens=5)
    engine.add("hit", [*range(1, 17), 70], max_tokens=1)
    engine.run(max_steps=10)
    assert engine.ends["hit", 0].num_cached_tokens == 16


def test_preemption_takes_the_last_and_its_work_is_found_again() -> None:
    engine = Engine(num_pages=5, page_size=4)
    engine.scheduler._admission.new_token_ratio = 0.0
    engine.token = lambda sample: 100 + sample.position
    engine.add("a", [1, 2, 3, 4, 5, 6, 7], max_tokens=8)
    engine.add("b", [11, 12, 13, 14, 15, 16, 17], max_tokens=8)
    engine.step()
    while not engine.scheduler.stats().preemptions:
        assert len(engine.sizes()) == 2
        engine.step()
    (kept,) = engine.scheduler._queues.running
    assert kept.request.request_id == "a"
    assert engine.scheduler.stats().new_token_ratio > 0.0
    engine.run()
    assert engine.tokens["a", 0] == engine.tokens["b", 0] == [107 + i for i in range(8)]
    assert engine.ends["b", 0].num_cached_tokens == 0  # found again is not found at admission


def test_a_scheduled_sequence_is_never_preempted_in_its_step() -> None:
    engine = Engine(num_pages=5, page_size=4, budget=3, caching=False)
    engine.add("decoding", [20], max_tokens=12, priority=1)
    engine.step()
    engine.add("prompt", list(range(1, 17)), max_tokens=1)  # ranks before the decoding one, but runs after it
    engine.scheduler._admission.new_token_ratio = 0.0
    while not engine.scheduler.stats().preemptions:
        engine.step()
        assert engine.sizes()[0] == 1
    assert [seq.request.request_id for seq in engine.scheduler._queues.waiting] == ["prompt"]
    assert engine.sizes() == [1]
    engine.run()
    assert engine.tokens == {("decoding", 0): [100] * 12, ("prompt", 0): [100]}


def test_preempted_sequences_start_again_before_new_ones() -> None:
    engine = Engine(max_num_seqs=2)
    engine.add("a", [1, 2])
    engine.add("b", [3, 4])
    engine.step()
    engine.add("c", [5, 6])
    engine.scheduler._preempt(engine.scheduler._queues.running[1])
    assert [seq.request.request_id for seq in engine.scheduler._queues.waiting] == ["b", "c"]
    engine.step()
    assert [seq.request.request_id for seq in engine.scheduler._queues.running] == ["a", "b"]


def test_lower_priority_values_go_first() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("late", [1], priority=1, max_tokens=1)
    engine.add("normal", [1], max_tokens=1)
    engine.add("urgent", [1], priority=-1, max_tokens=1)
    order = [output.request_id for _ in range(3) for output in engine.step()]
    assert order == ["urgent", "normal", "late"]


def test_abort_while_waiting_running_and_between_schedule_and_update() -> None:
    engine = Engine(max_num_seqs=2)
    for name in ("a", "b", "c"):
        engine.add(name, [1, 2, 3])
    output = engine.scheduler.schedule()
    assert output is not None
    (ended,) = engine.scheduler.abort(["a"])
    assert (ended.request_id, ended.finish_reason, ended.token_ids) == ("a", FinishReason.ABORT, [])
    engine.take(engine.scheduler.update(output, engine.result(output)))
    assert ("a", 0) not in engine.tokens
    assert [o.request_id for o in engine.scheduler.abort(["c", "b", "nobody"])] == ["c", "b"]
    assert not engine.scheduler.has_work()
    engine.scheduler.check_integrity()
    engine.scheduler.flush_cache()
    assert engine.cache.num_free_pages == 64


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_abort_of_one_choice_before_and_after_the_fork(steps: int) -> None:
    engine = Engine(budget=3)
    engine.token = lambda sample: 100 + sample.index
    engine.add("a", [1, 2, 3, 4, 5], n=3, max_tokens=4)
    for _ in range(steps):
        engine.step()
    (ended,) = engine.scheduler.abort(["a"], 0)
    assert (ended.index, ended.finish_reason) == (0, FinishReason.ABORT)
    assert engine.scheduler.abort(["a"], 0) == []
    engine.run()
    assert engine.tokens["a", 1] == [101] * 4
    assert engine.tokens["a", 2] == [102] * 4


def test_a_failed_step_ends_its_requests_and_no_others() -> None:
    engine = Engine(max_num_seqs=2)
    engine.add("a", [1, 2, 3], n=2)
    engine.add("b", [4])
    output = engine.scheduler.schedule()
    assert output is not None
    ended = engine.scheduler.fail(output, "boom")
    assert [(o.request_id, o.index, o.finish_reason, o.error) for o in ended] == [
        ("a", 0, FinishReason.ERROR, "boom"),
        ("a", 1, FinishReason.ERROR, "boom"),
    ]
    assert engine.cache.num_free_pages == 64  # nothing of the failed step is kept
    engine.run()
    assert engine.ends["b", 0].finish_reason is FinishReason.LENGTH


def test_refusals_name_the_numbers() -> None:
    engine = Engine(num_pages=10, page_size=4, max_model_len=64, max_num_seqs=4, max_num_queued_reqs=1)
    with pytest.raises(ContextLengthError, match=r"60 tokens and max_tokens is 5: together 65.*64") as context:
        engine.add("a", [1] * 60, max_tokens=5)
    assert context.value.param == "max_tokens"
    with pytest.raises(ContextLengthError, match=r"need 44 tokens of KV memory, but there are 40"):
        engine.add("a", [1] * 40, max_tokens=2)
    with pytest.raises(ContextLengthError, match=r"n is 4.*need 56"):
        engine.add("a", [1] * 8, max_tokens=10, n=4)
    with pytest.raises(InvalidRequestError, match="at most 4 sequences"):
        engine.add("a", [1], n=5)
    with pytest.raises(InvalidRequestError, match="no tokens"):
        engine.add("a", [])
    engine.add("a", [1] * 40, max_tokens=1)  # the last token needs no memory
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.scheduler.add(make_request("a", [1]))
    with pytest.raises(QueueFullError, match="1 requests are waiting"):
        engine.add("b", [1])
    engine.scheduler._admission.new_token_ratio = 1.0  # expects more than can be, yet what fits alone starts
    engine.step()
    assert engine.sizes() == [40]
    engine.run()
    assert len(engine.ends) == 1


def test_stats_follow_the_work() -> None:
    engine = Engine()
    assert engine.scheduler.schedule() is None
    engine.add("a", [1, 2, 3, 4, 5], max_tokens=3)
    engine.add("b", [9], max_tokens=1)
    assert engine.scheduler.stats().num_waiting == 2
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pages) == (1, 0, 64)
    assert (stats.num_free_pages, stats.num_cached_pages) == (61, 1)
    engine.run()
    stats = engine.scheduler.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.steps) == (6, 4, 3)
    assert stats.num_free_pages + stats.num_cached_pages == 64
    assert engine.scheduler.flush_cache() == stats.num_cached_pages > 0
