"""The same numbers under the names that dashboards, autoscalers and load balancers of vLLM and SGLang ask for.

Knows: those series' names, types, labels and bounds, as their documents and published outputs have them (sources:
tests/data/published_metrics.json, by series). Must not know: how the numbers come about. Only made with
--metrics-compat; a value is then counted by the bounds of all names together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from time import monotonic
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from pinnate.server.histogram import Histogram
from pinnate.server.metrics import Metrics, cache_usage, used_pages

FINISHED_REASONS = ("stop", "length", "abort", "error")
RATE_SECONDS = 5.0

_DECADES = 8
# 1, 2, 5, 10, ... : vLLM shows those up to the context's length (2000 of 2048, 20000 of 40960).
_ONE_TWO_FIVE = tuple(mantissa * 10**exponent for exponent in range(_DECADES) for mantissa in (1, 2, 5))
_VLLM_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_VLLM_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_VLLM_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
# SGLang's are those that its documentation shows; its releases of 2025 showed others now and then.
_SGLANG_FIRST_TOKEN = (*_VLLM_FIRST_TOKEN[:16], 15.0, 20.0, 25.0, 30.0)
_SGLANG_REQUEST = _VLLM_REQUEST[:15]
_SGLANG_TOKEN = (
    *(0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
_SGLANG_FUNCTION = tuple(0.05 * 1.5**power for power in range(18))

# name -> (attribute of Metrics, bounds; help)
_Histograms = Mapping[str, tuple[str, tuple[float, ...], str]]
_VLLM_HISTOGRAMS: _Histograms = {
    "time_to_first_token_seconds": ("time_to_first_token", _VLLM_FIRST_TOKEN, "Time to first token in seconds."),
    "inter_token_latency_seconds": ("inter_token_latency", _VLLM_TOKEN, "Inter-token latency in seconds."),
    "time_per_output_token_seconds": ("inter_token_latency", _VLLM_TOKEN, "Older name of inter_token_latency_seconds."),
    "request_time_per_output_token_seconds": (
        "time_per_output_token", _VLLM_TOKEN, "Mean time per output token of a request.",
    ),
    "e2e_request_latency_seconds": ("e2e_latency", _VLLM_REQUEST, "End to end request latency in seconds."),
    "request_queue_time_seconds": ("queue_time", _VLLM_REQUEST, "Time in the WAITING phase of a request."),
    "request_inference_time_seconds": ("inference_time", _VLLM_REQUEST, "Time in the RUNNING phase of a request."),
    "request_prefill_time_seconds": ("prefill_time", _VLLM_REQUEST, "Time in the PREFILL phase of a request."),
    "request_decode_time_seconds": ("decode_time", _VLLM_REQUEST, "Time in the DECODE phase of a request."),
    "request_prompt_tokens": ("request_prompt_tokens", _ONE_TWO_FIVE, "Prompt tokens of a request."),
    "request_generation_tokens": ("request_generation_tokens", _ONE_TWO_FIVE, "Generated tokens of a request."),
    "request_max_num_generation_tokens": (
        "max_generation_tokens", _ONE_TWO_FIVE, "Most tokens generated for a choice of a request.",
    ),
    "iteration_tokens_total": (
        "step_tokens", (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384), "Tokens of an engine step.",
    ),  # published up to 512; then it doubles
    "request_params_n": ("params_n", (1, 2, 5, 10, 20), "The n parameter of a request."),
    "request_params_max_tokens": ("params_max_tokens", _ONE_TWO_FIVE, "The max_tokens parameter of a request."),
}  # fmt: skip
_SGLANG_HISTOGRAMS: _Histograms = {
    "time_to_first_token_seconds": ("time_to_first_token", _SGLANG_FIRST_TOKEN, "Time to first token in seconds."),
    "e2e_request_latency_seconds": ("e2e_latency", _SGLANG_REQUEST, "End-to-end request latency in seconds."),
    "time_per_output_token_seconds": (
        "inter_token_latency",
        _SGLANG_TOKEN,
        "Older name of inter_token_latency_seconds.",
    ),
    "inter_token_latency_seconds": ("inter_token_latency", _SGLANG_TOKEN, "Inter-token latency in seconds."),
}
_FUNCTION = ("e2e_latency", _SGLANG_FUNCTION, "Function latency in seconds.")


def more_bounds(compat: str) -> dict[str, list[float]]:
    """What the histograms of Metrics must count by besides their own bounds, by attribute."""
    shown: list[tuple[str, tuple[float, ...], str]] = []
    if compat in ("vllm", "both"):
        shown += _VLLM_HISTOGRAMS.values()
    if compat in ("sglang", "both"):
        shown += [*_SGLANG_HISTOGRAMS.values(), _FUNCTION]
    bounds: dict[str, list[float]] = {}
    for attribute, some, _ in shown:
        bounds.setdefault(attribute, []).extend(some)
    return bounds


def compat_sources(
    compat: str, metrics: Metrics, model: str, engine_info: Callable[[], Mapping[str, Any]]
) -> list[Callable[[str], Iterable[Metric]]]:
    """For `Metrics.sources`. `engine_info`: what the engine chose at its start, empty before that."""
    sources: list[Callable[[str], Iterable[Metric]]] = []
    if compat in ("vllm", "both"):
        sources.append(VLLMSeries(metrics, model, engine_info).collect)
    if compat in ("sglang", "both"):
        sources.append(SGLangSeries(metrics, model, engine_info).collect)
    return sources


class _Family:
    """Makes families of one prefix and one set of labels."""

    def __init__(self, prefix: str, labels: Mapping[str, str]) -> None:
        self._prefix, self.labels = prefix, dict(labels)

    def gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, text, labels=list(self.labels))
        family.add_metric(list(self.labels.values()), value)
        return family

    def counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(self._prefix + name, text, labels=list(self.labels))
        family.add_metric(list(self.labels.values()), value)
        return family

    def histogram(
        self,
        name: str,
        text: str,
        histogram: Histogram,
        bounds: Iterable[float],
        labels: Mapping[str, str] | None = None,
    ) -> Metric:
        shown = self.labels if labels is None else labels
        family = HistogramMetricFamily(self._prefix + name, text, labels=list(shown))
        return histogram.add_to(family, shown, bounds)


class VLLMSeries:
    """Labels `model_name` and `engine`, as vLLM's V1 engine has them."""

    def __init__(self, metrics: Metrics, model: str, engine_info: Callable[[], Mapping[str, Any]]) -> None:
        self._metrics, self._info = metrics, engine_info
        self._family = _Family("vllm:", {"model_name": model, "engine": "0"})

    def collect(self, _: str) -> Iterator[Metric]:
        metrics, family, stats = self._metrics, self._family, self._metrics.stats
        yield family.gauge("num_requests_running", "Number of requests in model execution batches.", stats.num_running)
        yield family.gauge("num_requests_waiting", "Number of requests waiting to be processed.", stats.num_waiting)
        usage = cache_usage(stats)
        yield family.gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", usage)
        yield family.gauge("gpu_cache_usage_perc", "Older name of kv_cache_usage_perc.", usage)
        for name, field, text in (
            ("prompt_tokens", "prompt_tokens", "Number of prefill tokens processed."),
            ("generation_tokens", "generation_tokens", "Number of generation tokens processed."),
            ("num_preemptions", "preemptions", "Cumulative number of preemptions from the engine."),
            ("prefix_cache_queries", "prefix_cache_queries", "Prefix cache queries, in tokens."),
            ("prefix_cache_hits", "prefix_cache_hits", "Prefix cache hits, in tokens."),
            ("gpu_prefix_cache_queries", "prefix_cache_queries", "Older name of prefix_cache_queries."),
            ("gpu_prefix_cache_hits", "prefix_cache_hits", "Older name of prefix_cache_hits."),
        ):
            yield family.counter(name, text, metrics.total(field))
        yield self._success()
        longest = self._info().get("max_model_len", _ONE_TWO_FIVE[-1])
        for name, (attribute, bounds, text) in _VLLM_HISTOGRAMS.items():
            shown = [bound for bound in bounds if bound <= longest] if bounds is _ONE_TWO_FIVE else bounds
            yield family.histogram(name, text, getattr(metrics, attribute), shown)
        yield self._config()
        yield self._http()

    def _success(self) -> Metric:
        labels = ["model_name", "engine", "finished_reason"]
        family = CounterMetricFamily("vllm:request_success", "Count of successfully processed requests.", labels=labels)
        for reason in FINISHED_REASONS:
            family.add_metric([*self._family.labels.values(), reason], self._metrics.finished[reason])
        return family

    def _config(self) -> Metric:
        """What load balancers read the page size and the pool's size from."""
        info = self._info()
        shown = {
            "engine": "0",
            "block_size": info.get("page_size", ""),
            "cache_dtype": info.get("kv_cache_dtype", ""),
            "enable_prefix_caching": info.get("enable_prefix_caching", ""),
            "num_gpu_blocks": info.get("num_pages", ""),
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "Information of the cache's config", labels=list(shown))
        family.add_metric([str(value) for value in shown.values()], 1)
        return family

    def _http(self) -> Metric:
        """As prometheus-fastapi-instrumentator has it, which vLLM mounts."""
        sums: dict[tuple[str, str, str], int] = {}
        for (route, method, status), count in self._metrics.http_requests.items():
            key = ("none" if route == "other" else route, method, f"{status[0]}xx")
            sums[key] = sums.get(key, 0) + count
        labels = ["handler", "method", "status"]
        family = CounterMetricFamily("http_requests", "Total number of requests.", labels=labels)
        for values, count in sorted(sums.items()):
            family.add_metric(values, count)
        return family


class SGLangSeries:
    """Label `model_name`; what the scheduler counts has the place of a process too, of which there is one."""

    def __init__(self, metrics: Metrics, model: str, engine_info: Callable[[], Mapping[str, Any]]) -> None:
        self._metrics, self._info = metrics, engine_info
        self._requests = _Family("sglang:", {"model_name": model})
        place = {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
        self._engine = _Family("sglang:", {"model_name": model} | place)
        self._rate = TokenRate()
        metrics.on_step = lambda: self._rate.note(metrics.total("generation_tokens"), monotonic())

    def collect(self, _: str) -> Iterator[Metric]:
        metrics, family, ended = self._metrics, self._requests, self._metrics.finished
        for name, value, text in (
            ("prompt_tokens", metrics.total("prompt_tokens"), "Number of prefill tokens processed."),
            ("generation_tokens", metrics.total("generation_tokens"), "Number of generation tokens processed."),
            ("num_requests", sum(ended.values()), "Number of requests processed."),
            ("num_aborted_requests", ended["abort"], "Number of requests aborted."),
        ):
            yield family.counter(name, text, value)
        yield self._cached()
        yield from self._scheduler()
        for name, (attribute, bounds, text) in _SGLANG_HISTOGRAMS.items():
            yield family.histogram(name, text, getattr(metrics, attribute), bounds)
        attribute, bounds, text = _FUNCTION
        labels = {"name": "generate_request"}
        yield family.histogram("func_latency_seconds", text, getattr(metrics, attribute), bounds, labels)

    def _cached(self) -> Metric:
        """By where the tokens were: in the pool, or in the tier below it."""
        labels = ["model_name", "cache_source"]
        family = CounterMetricFamily("sglang:cached_tokens", "Number of cached prompt tokens.", labels=labels)
        hits, loaded = (self._metrics.total(field) for field in ("prefix_cache_hits", "tier_hit_tokens"))
        for source, count in (("device", hits - loaded), ("storage_disk", loaded)):
            family.add_metric([*self._requests.labels.values(), source], count)
        return family

    def _scheduler(self) -> Iterator[Metric]:
        metrics, family, stats, info = self._metrics, self._engine, self._metrics.stats, self._info()
        queries = metrics.total("prefix_cache_queries")
        hit_rate = metrics.total("prefix_cache_hits") / queries if queries else 0.0
        page_size = info.get("page_size", 0)
        for name, value, text in (
            ("num_running_reqs", stats.num_running, "The number of running requests"),
            ("num_queue_reqs", stats.num_waiting, "The number of requests in the waiting queue"),
            ("num_used_tokens", used_pages(stats) * page_size, "The number of used tokens"),
            ("max_total_num_tokens", stats.num_pages * page_size, "The size of the KV pool in tokens"),
            ("token_usage", cache_usage(stats), "The token usage"),
            ("cache_hit_rate", hit_rate, "The prefix cache hit rate, over the server's life"),
            ("gen_throughput", self._rate.per_second(monotonic()), "The generation throughput (token/s)"),
            ("new_token_ratio", stats.new_token_ratio, "The new token ratio"),
        ):
            yield family.gauge(name, text, value)
        retracted = metrics.total("preemptions")
        yield family.counter("num_retracted_requests", "Total number of retracted requests.", retracted)
        shown = family.labels | {"page_size": str(page_size), "num_pages": str(info.get("num_pages", 0))}
        config = GaugeMetricFamily("sglang:cache_config_info", "Cache configuration.", labels=list(shown))
        config.add_metric(list(shown.values()), 1)
        yield config


class TokenRate:
    """Tokens a second over the last RATE_SECONDS. 0 once nothing has come for that long."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque()  # time, tokens until then; a tenth of the window apart
        self._total = 0.0

    def note(self, total: float, now: float) -> None:
        """`total` tokens have come so far."""
        if not self._marks or now - self._marks[-1][0] > RATE_SECONDS / 10:
            self._marks.append((now, self._total))
            while self._marks[0][0] < now - RATE_SECONDS:
                self._marks.popleft()
        self._total = total

    def per_second(self, now: float) -> float:
        while self._marks and self._marks[0][0] < now - RATE_SECONDS:
            self._marks.popleft()
        if not self._marks:
            return 0.0
        began, before = self._marks[0]
        return (self._total - before) / max(now - began, RATE_SECONDS / 10)
