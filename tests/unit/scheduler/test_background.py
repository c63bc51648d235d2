"""Background requests take what live ones leave."""

from __future__ import annotations

import pytest

from pinnate.core.request import BACKGROUND_PRIORITY, Sequence
from pinnate.scheduler.policy import BACKGROUND_TOKENS_BESIDE_LIVE
from pinnate.scheduler.queues import split_background
from tests.unit.scheduler.helpers import Engine, make_request

POLICIES = pytest.mark.parametrize("policy", ["fcfs", "lpm"])


def prompt(first: int, size: int) -> list[int]:
    return list(range(first, first + size))


def add_background(engine: Engine, count: int, size: int = 9, max_tokens: int = 20, **fields: object) -> None:
    for i in range(count):
        engine.add(f"b{i}", prompt(1000 * (i + 1), size), priority=BACKGROUND_PRIORITY, max_tokens=max_tokens, **fields)


def scheduled(engine: Engine) -> dict[str, int]:
    """Tokens of each request in the latest step."""
    assert engine.output is not None
    names = {seq.seq_id: seq.request.request_id for seq in engine.scheduler._queues.running}
    return {names[part.seq_id]: len(part.token_ids) for part in engine.output.sequences if part.seq_id in names}


@POLICIES
def test_a_live_request_overtakes_all_that_waits(policy: str) -> None:
    engine = Engine(policy=policy, max_num_seqs=2)
    engine.add("l0", prompt(1, 5), max_tokens=20)
    engine.add("l1", prompt(50, 5), max_tokens=5)
    engine.step()
    add_background(engine, 40, size=9)
    engine.add("late", prompt(90, 9), priority=2**31 - 1, max_tokens=20)  # the least urgent that is live
    while "late" not in scheduled(engine):
        engine.step()
        assert not any(name.startswith("b") for name in scheduled(engine))


@POLICIES
def test_it_takes_the_place_of_the_latest_background_sequence(policy: str) -> None:
    engine = Engine(policy=policy, max_num_seqs=4)
    add_background(engine, 4)
    for _ in range(4):
        engine.step()
    assert set(scheduled(engine)) == {"b0", "b1", "b2", "b3"}
    engine.add("live", prompt(1, 9), n=2)
    engine.step()
    assert set(scheduled(engine)) == {"live", "b0", "b1"}
    ratio = engine.scheduler.stats().new_token_ratio
    assert ratio < 0.5  # giving way says nothing about the memory that requests need
    engine.run()
    assert all(len(engine.tokens[f"b{i}", 0]) == 20 for i in range(4))


def test_it_takes_their_pages() -> None:
    engine = Engine(num_pages=20, max_num_seqs=8)  # of 4 tokens
    add_background(engine, 2, size=32, max_tokens=8)
    for _ in range(3):
        engine.step()
    assert len(scheduled(engine)) == 2
    engine.add("live", prompt(1, 40), max_tokens=8)
    engine.step()
    assert scheduled(engine)["live"] == 40
    engine.run()
    assert [len(engine.tokens[name, 0]) for name in ("live", "b0", "b1")] == [8, 8, 8]


def test_a_live_request_grows_at_the_cost_of_background_ones() -> None:
    engine = Engine(num_pages=14, max_num_seqs=8)
    engine.add("live", prompt(1, 4), max_tokens=40)
    engine.step()
    add_background(engine, 1, size=12, max_tokens=30)
    preempted = False
    while ("live", 0) not in engine.ends:
        engine.step()
        preempted = preempted or engine.scheduler.stats().preemptions > 0
        assert "live" in scheduled(engine) or ("live", 0) in engine.ends
    assert preempted
    engine.run()
    assert len(engine.tokens["b0", 0]) == 30


def test_few_background_tokens_beside_live_ones() -> None:
    engine = Engine(max_num_seqs=32, num_pages=400, budget=64)
    add_background(engine, 16, size=5)
    for _ in range(3):
        engine.step()
    assert sum(scheduled(engine).values()) == 16  # alone they have the engine
    engine.add("live", prompt(1, 5), max_tokens=6)
    engine.step()
    while ("live", 0) not in engine.ends:
        got = scheduled(engine)
        assert sum(size for name, size in got.items() if name != "live") == BACKGROUND_TOKENS_BESIDE_LIVE
        engine.step()
    engine.add("more", prompt(70, 5), max_tokens=40)
    engine.add("bp", prompt(9000, 30), priority=BACKGROUND_PRIORITY)
    engine.run()
    assert {len(engine.tokens[f"b{i}", 0]) for i in range(16)} == {20}


def test_a_live_prompt_does_not_wait_for_the_same_one_in_the_background() -> None:
    engine = Engine(max_num_seqs=8, budget=8, num_pages=200)
    engine.add("b0", prompt(1, 100), priority=BACKGROUND_PRIORITY)
    engine.step()
    engine.add("live", prompt(1, 100))
    engine.step()
    assert "live" in scheduled(engine)


def test_the_queue_limit_is_for_live_requests() -> None:
    engine = Engine(max_num_seqs=1, max_num_queued_reqs=2)
    add_background(engine, 10)
    engine.step()
    engine.add("l0", prompt(1, 5))
    engine.add("l1", prompt(1, 5))
    with pytest.raises(Exception, match="2 requests are waiting"):
        engine.add("l2", prompt(1, 5))
    engine.add("b10", prompt(1, 5), priority=BACKGROUND_PRIORITY)
    engine.run()


@pytest.mark.parametrize("live", range(4))
@pytest.mark.parametrize("background", range(4))
def test_split(live: int, background: int) -> None:
    priorities = [*range(-live, 0), *range(BACKGROUND_PRIORITY - 2**31, BACKGROUND_PRIORITY - 2**31 + background)]
    sequences = [Sequence(i, make_request(str(i), [1], priority=p), 0) for i, p in enumerate(priorities)]
    assert split_background(sequences) == (sequences[:live], sequences[live:])
