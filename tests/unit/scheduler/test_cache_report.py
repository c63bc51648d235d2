"""The report of a request: once, with its first output, and true."""

from __future__ import annotations

from pinnate.core.messages import CacheReport, MatchEnd
from tests.unit.scheduler.helpers import Engine

PROMPT = list(range(1, 31))


def report(engine: Engine, name: str, prompt: list[int], **fields: object) -> CacheReport:
    engine.add(name, prompt, cache_report=True, **fields)
    engine.run()
    return engine.reports[name]


def test_every_reason_that_a_request_can_get() -> None:
    engine = Engine(reports=True)
    assert report(engine, "first", PROMPT) == CacheReport(30, 0, MatchEnd.NEW_TEXT)
    assert report(engine, "again", PROMPT) == CacheReport(30, 29, MatchEnd.LAST_TOKEN)
    assert report(engine, "other", [*PROMPT[:17], 99, 98]) == CacheReport(19, 17, MatchEnd.NEW_TEXT)
    assert report(engine, "salted", PROMPT, cache_salt="s") == CacheReport(30, 0, MatchEnd.OTHER_SALT, 29)
    assert report(engine, "scored", [*PROMPT, 7], prompt_logprobs=0, cache_salt="s").reason is MatchEnd.SCORED
    engine.scheduler.flush_cache()
    assert report(engine, "flushed", PROMPT) == CacheReport(30, 0, MatchEnd.EVICTED, 28)  # seven whole pages


def test_a_tail_that_no_page_could_be_copied_to_is_told() -> None:
    engine = Engine(reports=True, num_pages=2, page_size=4)
    engine.add("first", [1, 2, 3, 4, 5, 6], max_tokens=1)
    engine.run()
    assert report(engine, "tail", [1, 2, 3, 4, 5, 6, 7], max_tokens=1) == CacheReport(7, 4, MatchEnd.NO_ROOM, 2)
    assert engine.ends["tail", 0].num_cached_tokens == 4


def test_one_report_for_all_choices_and_none_that_was_not_asked_for() -> None:
    engine = Engine(reports=True)
    engine.add("plain", PROMPT)
    engine.run()
    assert engine.reports == {}
    assert report(engine, "three", PROMPT, n=3).num_cached_tokens == 29  # the helper asserts that there is but one


def test_a_preempted_request_reports_its_first_match() -> None:
    engine = Engine(reports=True, num_pages=5, page_size=4)
    engine.scheduler._admission.new_token_ratio = 0.0
    engine.token = lambda sample: 100 + sample.position
    engine.add("a", [1, 2, 3, 4, 5, 6, 7], max_tokens=8)
    assert report(engine, "b", [11, 12, 13, 14, 15, 16, 17], max_tokens=8) == CacheReport(7, 0, MatchEnd.NEW_TEXT)
    assert engine.scheduler.stats().preemptions


def test_without_an_explainer_there_is_no_report() -> None:
    engine = Engine()
    engine.add("asks", PROMPT, cache_report=True)
    engine.run()
    assert engine.reports == {}
