"""The arrival process, by its statistics. Seeds are fixed: no test here depends on luck."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from pinnate.bench.arrivals import arrival_times


def gaps(rate: float, burstiness: float, count: int = 20_000) -> list[float]:
    times = arrival_times(count, rate, burstiness, random.Random(5))
    return [b - a for a, b in itertools.pairwise(times)]


def test_an_infinite_rate_sends_everything_at_once() -> None:
    assert arrival_times(4, float("inf"), 1.0, random.Random(0)) == [0.0] * 4


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_spread_of_the_gamma_distribution(burstiness: float) -> None:
    found = gaps(rate=8.0, burstiness=burstiness)
    assert statistics.fmean(found) == pytest.approx(1 / 8, rel=0.03)
    # The coefficient of variation of a gamma distribution is 1 / sqrt(shape).
    assert statistics.pstdev(found) / statistics.fmean(found) == pytest.approx(burstiness**-0.5, rel=0.04)


def test_burstiness_1_is_a_poisson_process() -> None:
    times = arrival_times(20_000, 10.0, 1.0, random.Random(3))
    counts = [0] * int(times[-1])
    for t in times:
        if int(t) < len(counts):
            counts[int(t)] += 1
    # Arrivals in a second: mean and variance are the same.
    assert statistics.fmean(counts) == pytest.approx(10.0, rel=0.03)
    assert statistics.pvariance(counts) == pytest.approx(10.0, rel=0.08)


def test_times_ascend_from_0_and_repeat_with_the_seed() -> None:
    times = arrival_times(50, 2.0, 0.5, random.Random(1))
    assert times[0] == 0.0
    assert times == sorted(times)
    assert len(set(times)) == 50
    assert times == arrival_times(50, 2.0, 0.5, random.Random(1))
    assert times != arrival_times(50, 2.0, 0.5, random.Random(2))


@pytest.mark.parametrize("count", [0, 1])
def test_few_requests(count: int) -> None:
    assert arrival_times(count, 2.0, 1.0, random.Random(1)) == [0.0] * count
