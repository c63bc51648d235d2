"""Load or recompute: the choice follows what was measured."""

from __future__ import annotations

import pytest

from pinnate.kvcache.tiers.cost import LOAD_SECONDS, MEMORY_SECONDS, STALE_SECONDS, CostModel, Rate


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def model(load_pages: float, prefill_tokens: float, clock: Clock | None = None) -> CostModel:
    """Rates per second."""
    cost = CostModel(clock or Clock())
    cost.load.add(load_pages, 1.0)
    cost.prefill.add(prefill_tokens, 1.0)
    return cost


def test_what_was_never_measured_counts_as_fast() -> None:
    cost = CostModel()
    assert cost.prefers_load(16, 1)
    assert cost.prefers_swap(16, 1)
    assert cost.goes_on(16, 1)
    cost.load.add(1, 10.0)
    assert cost.prefers_load(16, 1)  # the speed of prompts is unknown still


@pytest.mark.parametrize(("pages_per_second", "expected"), [(1000, True), (101, True), (99, False), (1, False)])
def test_loading_wins_where_it_is_faster(pages_per_second: float, expected: bool) -> None:
    cost = model(pages_per_second, 1600)  # 100 pages of 16 tokens a second
    assert cost.goes_on(16_000, 1000) == expected
    assert cost.prefers_load(1_000_000, 62_500) == expected


def test_a_short_load_does_not_pay_for_its_delay() -> None:
    cost = model(10_000, 16_000)  # a page: 0.1 ms against 1 ms
    assert not cost.prefers_load(16, 1)
    assert cost.goes_on(16, 1)  # once it has begun, the delay is paid
    assert cost.prefers_load(64, 4)
    assert LOAD_SECONDS < 4 / 16_000 * 16


def test_pages_that_wait_before_it_count() -> None:
    cost = model(1000, 1600)
    assert cost.prefers_load(160, 10)
    assert not cost.prefers_load(160, 10, queued_pages=100)


def test_a_swap_also_pays_for_the_copy() -> None:
    cost = model(1000, 1600)
    assert cost.prefers_swap(160, 10)
    cost.copy.add(10, 1.0)
    assert not cost.prefers_swap(160, 10)


def test_a_rate_follows_the_latest_work() -> None:
    rate = Rate(Clock())
    assert rate.seconds_for(5) is None
    assert rate.per_second == 0
    for _ in range(100):
        rate.add(10, 1.0)
    assert rate.seconds_for(5) == pytest.approx(0.5)
    for _ in range(10):
        rate.add(100, 1.0)
    assert rate.per_second == pytest.approx(100, rel=0.05)
    assert rate._seen[1] <= MEMORY_SECONDS + 1


def test_an_old_measurement_gets_another_chance() -> None:
    clock = Clock()
    cost = model(1, 1600, clock)
    assert not cost.prefers_load(160, 10)
    clock.now += STALE_SECONDS + 1
    assert cost.prefers_load(160, 10)
    cost.load.add(1, 1.0)
    assert not cost.prefers_load(160, 10)
