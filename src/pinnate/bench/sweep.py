"""The same load at several concurrencies.

Knows: the order of the points, the table. Must not know: datasets, drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pinnate.bench.metrics import Summary
from pinnate.bench.report import percentile_name
from pinnate.core.errors import ConfigError

REQUESTS_PER_STREAM = 4
LEAST_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class Point:
    concurrency: int
    summary: Summary


def parse_concurrency(text: str) -> list[int]:
    """`1,2,4` in ascending order.

    Raises:
        ConfigError: a part is not a positive whole number, or is there twice.
    """
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1 or len(set(values)) < len(values):
        raise ConfigError(f"--concurrency {text!r}: expected different positive numbers such as 1,2,4,8")
    return sorted(values)


def requests_at(concurrency: int, asked: int | None) -> int:
    """Enough requests that most of a point's time has all its streams busy, unless the number is given."""
    return asked if asked is not None else max(LEAST_REQUESTS, REQUESTS_PER_STREAM * concurrency)


def as_table(points: Sequence[Point], percentile: float) -> str:
    tail = percentile_name(percentile)
    names = ("at once", "failed", "out tok/s", "ttft p50", f"ttft {tail}", "tpot p50", f"tpot {tail}", "e2el p50")
    lines = ["".join(f"{name:>11}" for name in names) + "   (ms)"]
    for point in points:
        stats, s = point.summary.stats, point.summary
        times = (
            stats["ttft"].median, stats["ttft"].percentiles[percentile],
            stats["tpot"].median, stats["tpot"].percentiles[percentile], stats["e2el"].median,
        )  # fmt: skip
        shown = "".join(f"{'-' if t is None else f'{t:.1f}':>11}" for t in times)
        lines.append(f"{point.concurrency:>11}{s.failed:>11}{s.output_throughput:>11.1f}{shown}")
    return "\n".join(lines)
