"""From outcomes to figures. Pure.

The terms are those that everyone uses: TTFT time to first token, TPOT time per output token after the first (one
figure for each request), ITL gap between two chunks of output (one figure for each gap), E2EL end-to-end latency.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pinnate.bench.client import Outcome
from pinnate.bench.load import LoadResult

METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True)
class Stats:
    """Of one metric, in milliseconds; None where nothing was measured."""

    mean: float | None
    median: float | None
    std: float | None
    percentiles: Mapping[float, float | None]


@dataclass(frozen=True, slots=True)
class Summary:
    """A load in figures. Only completed requests count in all but `failed`; throughputs are per second of the load."""

    duration: float
    completed: int
    failed: int
    total_input: int
    total_output: int
    max_concurrent: int
    goodput: float | None  # requests a second that kept every limit; None where there were no limits
    stats: Mapping[str, Stats]
    errors: Mapping[str, int]  # message -> times

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration

    @property
    def output_throughput(self) -> float:
        return self.total_output / self.duration

    @property
    def total_throughput(self) -> float:
        return (self.total_input + self.total_output) / self.duration


def summarise(result: LoadResult, percentiles: Sequence[float], goodput: Mapping[str, float]) -> Summary:
    """`goodput`: limits in milliseconds by metric."""
    good = [outcome for outcome in result.outcomes if outcome.error is None]
    values = {
        "ttft": [o.ttft for o in good],
        "tpot": [o.tpot for o in good if o.tpot is not None],
        "itl": [gap for o in good for gap in o.itl],
        "e2el": [o.latency for o in good],
    }
    return Summary(
        duration=result.duration,
        completed=len(good),
        failed=len(result.outcomes) - len(good),
        total_input=sum(o.prompt_len for o in good),
        total_output=sum(o.output_len for o in good),
        max_concurrent=most_at_once([(o.start, o.start + o.latency) for o in good]),
        goodput=sum(kept(o, goodput) for o in good) / result.duration if goodput else None,
        stats={name: stats_of(values[name], percentiles) for name in METRICS},
        errors=Counter(o.error for o in result.outcomes if o.error is not None),
    )


def stats_of(seconds: Sequence[float], percentiles: Sequence[float]) -> Stats:
    """Percentiles are interpolated between neighbours; the deviation is that of the population."""
    if not seconds:
        return Stats(None, None, None, dict.fromkeys(percentiles))
    ms = np.asarray(seconds) * 1e3
    found = {p: float(np.percentile(ms, p)) for p in percentiles}
    return Stats(float(ms.mean()), float(np.median(ms)), float(ms.std()), found)


def kept(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    """Whether a completed request kept every limit. One that has no TPOT keeps any limit on it."""
    took = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.latency}
    return all(took[name] * 1e3 <= limit for name, limit in limits.items())


def most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    """The most (start, end) spans that overlap; one that ends as another starts does not overlap it."""
    steps = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    now = most = 0
    for _, change in steps:
        now += change
        most = max(most, now)
    return most
