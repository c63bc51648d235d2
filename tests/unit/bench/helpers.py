"""Outcomes and summaries made by hand."""

from __future__ import annotations

from pinnate.bench.client import Outcome
from pinnate.bench.load import LoadResult
from pinnate.bench.metrics import Summary, summarise


def outcome(start: float, ttft: float, gaps: list[float], prompt_len: int = 10) -> Outcome:
    """One token for the first chunk and for each gap."""
    return Outcome(
        prompt_len, start=start, ttft=ttft, latency=ttft + sum(gaps), itl=gaps, output_len=1 + len(gaps), text="x"
    )


# Two completed requests that overlap, one of a single token, one failed; 4 seconds in all.
LOAD = LoadResult(
    [
        outcome(100.0, 0.1, [0.02, 0.04]),
        outcome(100.05, 0.3, [0.01, 0.03, 0.05], prompt_len=30),
        outcome(103.0, 0.2, []),
        Outcome(99, start=101.0, error="HTTP 503: busy"),
    ],
    duration=4.0,
)


def summary(load: LoadResult = LOAD, percentiles: tuple[float, ...] = (99.0,), **limits: float) -> Summary:
    return summarise(load, percentiles, limits)
