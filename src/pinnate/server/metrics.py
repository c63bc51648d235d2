"""/metrics: what Prometheus reads.

Knows: our names, the engine's stats, the server's own counts and times. Must not know: how a step runs, other engines'
names (metrics_compat.py). Everything happens on the event loop, so counts are plain numbers; prometheus_client only
writes the text.
Counters never fall: an engine that restarts counts from 0 again, and what it had counted before is kept here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

import pinnate
from pinnate.core.messages import EngineStats
from pinnate.core.sampling import SamplingParams
from pinnate.server.histogram import Histogram
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
    "forced_tokens": ("structured_forced_tokens", "Tokens of structured outputs appended without being drawn."),
    "steps": ("engine_steps", "Steps of the engine."),
    "step_seconds": ("engine_step_seconds", "Time in steps, execution included."),
    "execute_seconds": ("engine_execute_seconds", "Time in the executor."),
}
_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "PATCH"})
_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

# attribute of Metrics -> (name, help, bounds)
_HISTOGRAMS: Mapping[str, tuple[str, str, tuple[float, ...]]] = {
    "time_to_first_token": (
        "time_to_first_token_seconds", "From arrival to the first token of a prompt.", _LATENCY,
    ),
    "inter_token_latency": ("inter_token_latency_seconds", "Between two steps of a choice.", _LATENCY),
    "time_per_output_token": (
        "request_time_per_output_token_seconds", "Mean over a choice, first token excepted.", _LATENCY,
    ),
    "e2e_latency": ("e2e_request_latency_seconds", "From arrival to the end of a choice.", _LATENCY),
    "queue_time": ("request_queue_time_seconds", "From a prompt's arrival at the engine to its first step.", _LATENCY),
    "prefill_time": ("request_prefill_time_seconds", "From a prompt's first step to its first token.", _LATENCY),
    "decode_time": ("request_decode_time_seconds", "From a choice's first token to its last.", _LATENCY),
    "inference_time": ("request_inference_time_seconds", "From a prompt's first step to a choice's last.", _LATENCY),
    "request_prompt_tokens": ("request_prompt_tokens", "Tokens of a prompt.", _TOKENS),
    "request_generation_tokens": ("request_generation_tokens", "Tokens of a choice.", _TOKENS),
    "max_generation_tokens": ("request_max_num_generation_tokens", "Tokens of a request's longest choice.", _TOKENS),
    "params_n": ("request_params_n", "The n of a request.", (1, 2, 5, 10, 20, 50, 100)),
    "params_max_tokens": ("request_params_max_tokens", "The max_tokens of a request that gave one.", _TOKENS),
    "step_tokens": ("engine_step_tokens", "Tokens computed in a step.", _STEP_TOKENS),
}  # fmt: skip


class Metrics:
    """The server's numbers. Handlers call `observe` on the histograms and count ends and refusals.

    `more_bounds`: further bounds to count by, by attribute. Functions in `sources` give further families when the text
    is made; `on_step` is called for each step, and must be quick.
    """

    def __init__(self, more_bounds: Mapping[str, Iterable[float]] | None = None) -> None:
        more = more_bounds or {}

        def histogram(name: str) -> Histogram:
            return Histogram(_HISTOGRAMS[name][2], more.get(name, ()))

        self.time_to_first_token = histogram("time_to_first_token")
        self.inter_token_latency = histogram("inter_token_latency")
        self.time_per_output_token = histogram("time_per_output_token")
        self.e2e_latency = histogram("e2e_latency")
        self.queue_time = histogram("queue_time")
        self.prefill_time = histogram("prefill_time")
        self.decode_time = histogram("decode_time")
        self.inference_time = histogram("inference_time")
        self.request_prompt_tokens = histogram("request_prompt_tokens")
        self.request_generation_tokens = histogram("request_generation_tokens")
        self.max_generation_tokens = histogram("max_generation_tokens")
        self.params_n = histogram("params_n")
        self.params_max_tokens = histogram("params_max_tokens")
        self.step_tokens = histogram("step_tokens")
        self.finished: Counter[str] = Counter()  # choices, by finish reason
        self.rejected: Counter[str] = Counter()  # requests refused before their first token, by error code
        self.http_requests: Counter[tuple[str, str, str]] = Counter()  # by route, method, status
        self.engine_restarts = 0
        self.stats = EngineStats()
        self.sources: list[Callable[[str], Iterable[Metric]]] = []  # of further families, given our prefix
        self.on_step: Callable[[], None] | None = None
        self._before: Counter[str] = Counter()  # of engine processes that are gone; floats too
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def record_stats(self, stats: EngineStats) -> None:
        """Takes the engine's latest stats: called for each step, and for each new engine before its first."""
        last = self.stats
        if stats.steps <= last.steps and any(getattr(stats, field) < getattr(last, field) for field in _COUNTERS):
            self.engine_restarts += 1
            for field in _COUNTERS:
                self._before[field] += getattr(last, field)
            last = EngineStats()
        if stats.steps > last.steps:
            self.step_tokens.observe(stats.step_tokens)
        self.stats = stats
        if self.on_step is not None:
            self.on_step()

    def total(self, field: str) -> float:
        """A counter of EngineStats over the lives of all engine processes."""
        value: float = self._before[field] + getattr(self.stats, field)
        return value

    def observe_params(self, params: SamplingParams) -> None:
        """What one request asked for."""
        self.params_n.observe(params.n)
        if params.max_tokens is not None:
            self.params_max_tokens.observe(params.max_tokens)

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
        yield from self._gauges()
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, value=self.total(field))
        yield CounterMetricFamily(
            PREFIX + "engine_restarts", "Times the engine's process was started again.", value=self.engine_restarts
        )
        yield _labelled("request_success", "Choices that ended, by reason.", "finished_reason", self.finished)
        yield _labelled("requests_rejected", "Requests refused before their first token.", "code", self.rejected)
        http = CounterMetricFamily(
            PREFIX + "http_requests", "HTTP requests that have ended.", labels=["route", "method", "status"]
        )
        for labels, count in sorted(self.http_requests.items()):
            http.add_metric(labels, count)
        yield http
        for attribute, (name, text, _) in _HISTOGRAMS.items():
            histogram: Histogram = getattr(self, attribute)
            yield histogram.add_to(HistogramMetricFamily(PREFIX + name, text, labels=()), {})
        for source in self.sources:
            yield from source(PREFIX)

    def _gauges(self) -> Iterator[Metric]:
        stats = self.stats
        gauges: dict[str, tuple[float, str]] = {
            "num_requests_running": (stats.num_running, "Sequences that the engine is computing."),
            "num_requests_waiting": (stats.num_waiting, "Sequences that wait for room."),
            "kv_cache_usage_perc": (
                cache_usage(stats),
                "Share of KV pages in use by requests, 0 to 1; evictable ones are free.",
            ),
            "kv_pages": (stats.num_pages, "KV pages of the pool."),
            "kv_pages_free": (stats.num_free_pages, "KV pages that hold nothing."),
            "kv_pages_cached": (stats.num_cached_pages, "KV pages held by the prefix cache alone, evictable."),
            "kv_committed_bytes": (
                stats.kv_committed_bytes,
                "Of the pool's memory, what the system has given or will give in idle time. Grows in a few steps.",
            ),
            "kv_tier_pages": (stats.tier_pages, "KV pages of this model in the tier below the pool (--kv-disk)."),
            "kv_tier_bytes": (stats.tier_bytes, "What the tier takes, other models' pages included."),
            "new_token_ratio": (stats.new_token_ratio, "Share of a request's output that admission reserves."),
        }
        for name, (value, text) in gauges.items():
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
        build = GaugeMetricFamily(PREFIX + "build_info", "Always 1; the version is a label.", labels=["version"])
        build.add_metric([pinnate.__version__], 1)
        yield build


def used_pages(stats: EngineStats) -> int:
    """Pages that requests hold. What the prefix cache alone holds can be had at any time and counts as free."""
    return stats.num_pages - stats.num_free_pages - stats.num_cached_pages


def cache_usage(stats: EngineStats) -> float:
    """Share of the pool, 0 to 1."""
    return used_pages(stats) / stats.num_pages if stats.num_pages else 0.0


def _labelled(name: str, text: str, label: str, counts: Counter[str]) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family
