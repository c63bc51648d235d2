"""Histogram: counts of values by upper bound, shown under one or several sets of bounds.

Knows: bounds, the text form of a bound. Must not know: what is measured. One histogram may be shown under several
names, each with bounds of its own (our names, another engine's): it counts by all of them together, which holds each
set's counts exactly, so a value costs one bisection however many sets there are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class Histogram:
    """`bounds` are those it is shown with by default, `more` those of other sets."""

    __slots__ = ("_all", "bounds", "counts", "total")

    def __init__(self, bounds: Iterable[float], more: Iterable[float] = ()) -> None:
        self.bounds = tuple(float(bound) for bound in bounds)
        self._all = sorted({*self.bounds, *map(float, more)})
        self.counts = [0] * (len(self._all) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._all, value)] += 1
        self.total += value

    def buckets(self, bounds: Iterable[float] | None = None) -> list[tuple[str, float]]:
        """(bound as text, how many values are at most that), the last one +Inf. `bounds` must be among those it was
        made with."""
        cumulative, running = [], 0
        for count in self.counts:
            running += count
            cumulative.append(running)
        found = []
        for bound in self.bounds if bounds is None else bounds:
            place = bisect_left(self._all, bound)
            if place == len(self._all) or self._all[place] != bound:
                raise ValueError(f"the histogram does not count by {bound}")
            found.append((floatToGoString(bound), cumulative[place]))  # type: ignore[no-untyped-call]
        return [*found, ("+Inf", running)]

    def add_to(
        self, family: HistogramMetricFamily, labels: Mapping[str, str], bounds: Iterable[float] | None = None
    ) -> HistogramMetricFamily:
        family.add_metric(list(labels.values()), buckets=self.buckets(bounds), sum_value=self.total)
        return family
