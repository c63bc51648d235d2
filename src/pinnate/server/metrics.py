"""/metrics: what Prometheus reads.

Knows: names, the engine's stats, the server's own counts and times. Must not know: how a step runs. Everything
happens on the event loop, so counts are plain numbers; prometheus_client only writes the text.
Counters never fall: an engine that restarts counts from 0 again, and what it had counted before is kept here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from pinnate.core.messages import EngineStats
from pinnate.server.request_record import RequestRecord

PREFIX = "pinnate:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_COUNTERS = {  # field of EngineStats -> (name, without the _total that the format adds; help)
    "prompt_tokens": ("prompt_tokens", "Prompt tokens computed or found in the prefix cache."),
    "generation_tokens": ("generation_tokens", "Tokens generated."),
    "prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "preemptions": ("num_preemptions", "Sequences put back to the queue for lack of KV pages."),
    "evicted_pages": ("evicted_pages", "Cached KV pages given up for others."),
    "beam_page_steps": ("beam_search_page_steps", "KV pages held by beams, added up over the steps of their searches."),
    "beam_lone_page_steps": ("beam_search_lone_page_steps", "The same, had no beam shared a page with another."),
    "tier_hit_tokens": ("kv_tier_hit_tokens", "Prompt tokens loaded from the tier below the KV pool."),
    "tier_loaded_pages": ("kv_tier_loaded_pages", "KV pages loaded from the tier."),
    "tier_stored_pages": ("kv_tier_stored_pages", "KV pages stored in the tier."),
    "tier_rejected_pages": ("kv_tier_rejected_pages", "KV pages of the tier that could not be read or trusted."),
    "swaps": ("num_swaps", "Preempted sequences whose pages went to the tier."),
    "steps": ("engine_steps", "Steps of the engine."),
    "step_seconds": ("engine_step_seconds", "Time in steps, execution included."),
    "execute_seconds": ("engine_execute_seconds", "Time in the executor."),
}
_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "PATCH"})
_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Histogram:
    """Counts of values by upper bound. `observe` costs a bisection."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(float(bound) for bound in bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        running = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), running))
        return HistogramMetricFamily(PREFIX + name, text, buckets=buckets, sum_value=self.total)


class Metrics:
    """The server's numbers. Handlers call `observe` on the histograms and count ends and refusals."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(_LATENCY)
        self.inter_token_latency = Histogram(_LATENCY)
        self.time_per_output_token = Histogram(_LATENCY)
        self.e2e_latency = Histogram(_LATENCY)
        self.request_prompt_tokens = Histogram(_TOKENS)
        self.request_generation_tokens = Histogram(_TOKENS)
        self.finished: Counter[str] = Counter()  # choices, by finish reason
        self.rejected: Counter[str] = Counter()  # requests refused before their first token, by error code
        self.http_requests: Counter[tuple[str, str, str]] = Counter()  # by route, method, status
        self.engine_restarts = 0
        self.sources: list[Callable[[str], Iterator[Metric]]] = []  # of further families, given the prefix
        self._stats = EngineStats()
        self._before: Counter[str] = Counter()  # of engine processes that are gone; floats too
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def record_stats(self, stats: EngineStats) -> None:
        """Takes the engine's latest stats. Called at least once a request, so that a restart is not overlooked."""
        if any(getattr(stats, field) < getattr(self._stats, field) for field in _COUNTERS):
            self.engine_restarts += 1
            for field in _COUNTERS:
                self._before[field] += getattr(self._stats, field)
        self._stats = stats

    def count_http(self, record: RequestRecord) -> None:
        """A listener for the Observer. Paths that no route knows are counted together, as are unusual methods, so that
        no client can make series."""
        method = record.method if record.method in _METHODS else "other"
        self.http_requests[record.route or "other", method, str(record.status)] += 1

    def text(self) -> bytes:
        """The exposition text, format 0.0.4."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """For prometheus_client's registry."""
        stats = self._stats
        gauges: dict[str, tuple[float, str]] = {
            "num_requests_running": (stats.num_running, "Sequences that the engine is computing."),
            "num_requests_waiting": (stats.num_waiting, "Sequences that wait for room."),
            "kv_cache_usage_perc": (
                _usage(stats),
                "Share of KV pages in use by requests, 0 to 1; evictable ones are free.",
            ),
            "kv_pages": (stats.num_pages, "KV pages of the pool."),
            "kv_pages_free": (stats.num_free_pages, "KV pages that hold nothing."),
            "kv_pages_cached": (stats.num_cached_pages, "KV pages held by the prefix cache alone, evictable."),
            "kv_tier_pages": (stats.tier_pages, "KV pages of this model in the tier below the pool (--kv-disk)."),
            "kv_tier_bytes": (stats.tier_bytes, "What the tier takes, other models' pages included."),
            "new_token_ratio": (stats.new_token_ratio, "Share of a request's output that admission reserves."),
        }
        for name, (value, text) in gauges.items():
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, value=self._before[field] + getattr(stats, field))
        yield CounterMetricFamily(
            PREFIX + "engine_restarts", "Times the engine's process was started again.", value=self.engine_restarts
        )
        yield _labelled("request_success", "Choices that ended, by reason.", "finished_reason", self.finished)
        yield _labelled("requests_rejected", "Requests refused before their first token.", "code", self.rejected)
        http = CounterMetricFamily(
            PREFIX + "http_requests", "HTTP requests that were answered.", labels=["route", "method", "status"]
        )
        for labels, count in sorted(self.http_requests.items()):
            http.add_metric(labels, count)
        yield http
        yield self.time_to_first_token.family(
            "time_to_first_token_seconds", "From arrival to the first token of a prompt."
        )
        yield self.inter_token_latency.family("inter_token_latency_seconds", "Between two steps of a choice.")
        yield self.time_per_output_token.family(
            "request_time_per_output_token_seconds", "Mean over a choice, first token excepted."
        )
        yield self.e2e_latency.family("e2e_request_latency_seconds", "From arrival to the end of a choice.")
        yield self.request_prompt_tokens.family("request_prompt_tokens", "Tokens of a prompt.")
        yield self.request_generation_tokens.family("request_generation_tokens", "Tokens of a choice.")
        for source in self.sources:
            yield from source(PREFIX)


def _usage(stats: EngineStats) -> float:
    if not stats.num_pages:
        return 0.0
    return (stats.num_pages - stats.num_free_pages - stats.num_cached_pages) / stats.num_pages


def _labelled(name: str, text: str, label: str, counts: Counter[str]) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family
