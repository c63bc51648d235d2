"""The text of /metrics is always valid, counters only grow, other engines' series are theirs to the bucket."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from pinnate.core.messages import EngineStats, RequestTiming
from pinnate.core.request import FinishReason
from pinnate.engine.output_processor import OutputDelta
from pinnate.server.histogram import Histogram
from pinnate.server.metrics_compat import RATE_SECONDS, TokenRate
from tests.unit.server.conftest import Client, FakeEngine, make_client

LINE = re.compile(r'[A-Za-z_:][\w:]*(\{([A-Za-z_]\w*="(\\.|[^"\\\n])*",?)*\})? [-+]?(\d[\d.eE+-]*|Inf|NaN)', re.ASCII)

# Names, types and labels as vLLM's documents and published outputs have them.
VLLM = {
    "gauge": ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc"],
    "counter": ["prompt_tokens", "generation_tokens", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits",
                "request_success"],
    "histogram": ["time_to_first_token_seconds", "inter_token_latency_seconds", "time_per_output_token_seconds",
                  "request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
                  "request_inference_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
                  "request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens",
                  "iteration_tokens_total", "request_params_n", "request_params_max_tokens"],
}  # fmt: skip
SGLANG = {
    "gauge": ["num_running_reqs", "num_queue_reqs", "num_used_tokens", "token_usage", "cache_hit_rate",
              "gen_throughput", "max_total_num_tokens", "new_token_ratio"],
    "counter": ["prompt_tokens", "generation_tokens", "cached_tokens", "num_requests", "num_aborted_requests",
                "num_retracted_requests"],
    "histogram": ["time_to_first_token_seconds", "e2e_request_latency_seconds", "time_per_output_token_seconds",
                  "inter_token_latency_seconds", "func_latency_seconds"],
}  # fmt: skip


def check(text: str) -> dict[tuple[str, ...], float]:
    """The samples of a text that a strict reader accepts, by name and labels."""
    types: dict[str, str] = {}
    for line in text.rstrip("\n").split("\n"):
        if line.startswith("# TYPE"):
            name, kind = line.split(" ")[2:]
            assert name not in types, f"two families {name}"
            types[name] = kind
        elif not line.startswith("#"):
            assert LINE.fullmatch(line), line
    values: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        assert family.type in ("gauge", "counter", "histogram"), family.name
        for sample in family.samples:
            key = (sample.name, *(f"{k}={v}" for k, v in sorted(sample.labels.items())))
            assert key not in values, key
            assert sample.value >= 0, key
            values[key] = sample.value
        if family.type == "histogram":
            check_histogram(family)
    return values


def check_histogram(family: Any) -> None:
    buckets = [s for s in family.samples if s.name.endswith("_bucket")]
    bounds = [float(s.labels["le"]) for s in buckets]
    assert bounds == sorted(set(bounds))
    assert bounds[-1] == float("inf")
    counts = [s.value for s in buckets]
    assert counts == sorted(counts)
    assert [s.value for s in family.samples if s.name.endswith("_count")] == [counts[-1]]
    assert [s.name for s in family.samples if s.name.endswith("_sum")] == [family.name + "_sum"]


def counters(text: str) -> dict[tuple[str, ...], float]:
    growing = [f.name for f in text_string_to_metric_families(text) if f.type in ("counter", "histogram")]
    values = check(text)
    suffixes = ("_total", "_bucket", "_count", "_sum", "")
    names = {name + suffix for name in growing if not name.startswith("process_") for suffix in suffixes}
    return {key: value for key, value in values.items() if key[0] in names}


Event = tuple[str, Any]
EVENTS = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 5000)),
    st.tuples(st.just("restart"), st.none()),
    st.tuples(st.just("request"), st.lists(st.integers(0, 4), min_size=1, max_size=3)),
    st.tuples(st.just("path"), st.text(max_size=8)),
    st.tuples(st.just("refused"), st.integers(-5, 5)),
)


@settings(max_examples=15, deadline=None)
@given(events=st.lists(EVENTS, max_size=12), model=st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_any_sequence_of_events_leaves_a_valid_text_and_growing_counters(events: list[Event], model: str) -> None:
    asyncio.run(live_through(events, model))


async def live_through(events: list[Event], model: str) -> None:
    engine = FakeEngine(info={"max_num_seqs": 64, "page_size": 16, "num_pages": 8, "max_model_len": 100})
    client = make_client(engine, metrics_compat="both", served_model_name=(model,))
    before: dict[tuple[str, ...], float] = {}
    steps = tokens = 0
    for kind, value in events:
        if kind == "step":
            steps, tokens = steps + 1, tokens + value
        elif kind == "restart":
            steps = tokens = 0
        if kind in ("step", "restart"):
            engine.stats = EngineStats(
                num_pages=8, num_free_pages=tokens % 4, num_cached_pages=tokens % 3, prompt_tokens=2 * tokens,
                generation_tokens=tokens, prefix_cache_queries=tokens, steps=steps, step_tokens=tokens,
            )  # fmt: skip
            client.state.metrics.record_stats(engine.stats)
        await act(client, kind, value)
        text = (await client.call("GET", "/metrics")).body.decode()
        now = counters(text)
        assert all(now[key] >= value for key, value in before.items())
        before = now


async def act(client: Client, kind: str, value: Any) -> None:
    if kind == "request":
        deltas = [
            OutputDelta(
                0, "x", [1] * size, timing=RequestTiming(0.5, None if size % 2 else 0.25) if not number else None
            )
            for number, size in enumerate(value)
        ]
        ended = OutputDelta(0, "", [], finish_reason=FinishReason.LENGTH)
        client.engine.script = lambda *_: [*deltas, ended] if sum(value) % 3 else deltas
        await client.complete(max_tokens=5)
    elif kind == "path":
        await client.call("GET", "/" + value)
    elif kind == "refused":
        await client.complete(temperature=value, top_k=value)


@given(
    own=st.lists(st.integers(0, 30), min_size=1, unique=True),
    more=st.lists(st.integers(0, 30), unique=True),
    values=st.lists(st.floats(0, 40)),
)
def test_each_set_of_bounds_is_counted_as_if_alone(own: list[int], more: list[int], values: list[float]) -> None:
    together = Histogram(sorted(own), more)
    for value in values:
        together.observe(value)
    for bounds in (sorted(own), sorted(more)):
        expected = [(float(bound), sum(value <= bound for value in values)) for bound in bounds]
        found = [(float(bound), count) for bound, count in together.buckets(bounds)]
        assert found == [*expected, (float("inf"), len(values))]
    with pytest.raises(ValueError, match="31"):
        together.buckets([31])


async def families(compat: str, **engine: Any) -> dict[str, Any]:
    client = make_client(FakeEngine(**engine), metrics_compat=compat, served_model_name=('a"b\\c',))
    client.state.metrics.record_stats(client.engine.stats)
    await client.complete(max_tokens=3)
    text = (await client.call("GET", "/metrics")).body.decode()
    check(text)
    return {family.name: family for family in text_string_to_metric_families(text)}


@pytest.mark.parametrize("compat", ["none", "vllm", "sglang", "both"])
async def test_the_series_asked_for_are_there_and_no_others(compat: str) -> None:
    found = await families(compat)
    for prefix, series, on in (
        ("vllm:", VLLM, compat in ("vllm", "both")),
        ("sglang:", SGLANG, compat in ("sglang", "both")),
    ):
        names = {prefix + name: kind for kind, some in series.items() for name in some}
        if not on:
            assert not [name for name in found if name.startswith(prefix)]
            continue
        assert {name: found[name].type for name in names} == names
    assert "pinnate:prompt_tokens" in found


async def test_vllms_labels_and_buckets() -> None:
    info = {"max_num_seqs": 64, "page_size": 16, "num_pages": 50, "max_model_len": 2048, "kv_cache_dtype": "bfloat16",
            "enable_prefix_caching": True}  # fmt: skip
    found = await families("vllm", info=info, stats=EngineStats(num_pages=10, num_free_pages=4, num_cached_pages=1))
    for kind, names in VLLM.items():
        for name in names:
            for sample in found["vllm:" + name].samples:
                assert sample.labels["model_name"] == 'a"b\\c'
                assert sample.labels["engine"] == "0", (kind, name)

    def bounds(name: str) -> list[str]:
        samples = found["vllm:" + name].samples
        return [s.labels["le"] for s in samples if s.name.endswith("_bucket")]

    assert bounds("time_to_first_token_seconds") == [
        "0.001", "0.005", "0.01", "0.02", "0.04", "0.06", "0.08", "0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0",
        "7.5", "10.0", "20.0", "40.0", "80.0", "160.0", "640.0", "2560.0", "+Inf",
    ]  # fmt: skip
    assert bounds("inter_token_latency_seconds")[:3] == ["0.01", "0.025", "0.05"]
    assert bounds("e2e_request_latency_seconds")[-3:] == ["1920.0", "7680.0", "+Inf"]
    assert bounds("request_prompt_tokens") == [
        "1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "500.0", "1000.0", "2000.0", "+Inf",
    ]  # fmt: skip
    assert bounds("request_params_n") == ["1.0", "2.0", "5.0", "10.0", "20.0", "+Inf"]
    assert bounds("iteration_tokens_total")[:3] == ["1.0", "8.0", "16.0"]
    assert found["vllm:kv_cache_usage_perc"].samples[0].value == 0.5
    reasons = {s.labels["finished_reason"]: s.value for s in found["vllm:request_success"].samples}
    assert reasons == {"stop": 1, "length": 0, "abort": 0, "error": 0}
    (config,) = found["vllm:cache_config_info"].samples
    assert (config.value, config.labels["block_size"], config.labels["num_gpu_blocks"]) == (1, "16", "50")
    http = {tuple(s.labels.values()): s.value for s in found["http_requests"].samples}
    assert http == {("/v1/completions", "POST", "2xx"): 1}


async def test_sglangs_labels_buckets_and_values() -> None:
    stats = EngineStats(
        num_pages=10, num_free_pages=4, num_cached_pages=1, num_running=2, num_waiting=3, generation_tokens=7, steps=1,
        prefix_cache_queries=8, prefix_cache_hits=2, tier_hit_tokens=1, new_token_ratio=0.5,
    )  # fmt: skip
    found = await families("sglang", stats=stats, info={"max_num_seqs": 64, "page_size": 16, "num_pages": 10})
    values = {name: found["sglang:" + name].samples[0].value for name in SGLANG["gauge"]}
    assert values.pop("gen_throughput") == 7 / (RATE_SECONDS / 10)
    assert values == {
        "num_running_reqs": 2, "num_queue_reqs": 3, "num_used_tokens": 80, "token_usage": 0.5, "cache_hit_rate": 0.25,
        "max_total_num_tokens": 160, "new_token_ratio": 0.5,
    }  # fmt: skip
    request = {"model_name": 'a"b\\c'}
    engine = request | {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
    for name in (*SGLANG["gauge"], "num_retracted_requests"):
        assert found["sglang:" + name].samples[0].labels == engine
    for name in ("prompt_tokens", "generation_tokens", "num_requests", "num_aborted_requests"):
        assert found["sglang:" + name].samples[0].labels == request
    cached = {s.labels["cache_source"]: s.value for s in found["sglang:cached_tokens"].samples}
    assert cached == {"device": 1.0, "storage_disk": 1.0}
    (config,) = found["sglang:cache_config_info"].samples
    assert (config.value, config.labels) == (1, engine | {"page_size": "16", "num_pages": "10"})
    bounds = [s.labels["le"] for s in found["sglang:e2e_request_latency_seconds"].samples if "le" in s.labels]
    assert (bounds[0], bounds[-2:]) == ("0.3", ["60.0", "+Inf"])
    function = found["sglang:func_latency_seconds"].samples[1].labels
    assert function == {"name": "generate_request", "le": "0.07500000000000001"}


async def test_bounds_and_labels_are_those_that_were_published() -> None:
    """Each run of bounds that somebody has published is one of ours without a bound more or less, and of ours each but
    a few has been published."""
    published = json.loads((Path(__file__).parents[2] / "data/published_metrics.json").read_text())
    found = await families("both", info={"max_num_seqs": 64, "page_size": 16, "num_pages": 8, "max_model_len": 40960})
    seen: dict[str, set[str]] = {}
    for run in published:
        samples = [s for s in found[run["series"]].samples if s.name.endswith("_bucket")]
        ours = [s.labels["le"] for s in samples]
        first = ours.index(run["le"][0])
        assert ours[first : first + len(run["le"])] == run["le"], (run["series"], run["source"])
        labels = set(samples[0].labels) - {"le"}
        assert labels - {"engine"} == set(run["labels"]) - {"engine"}  # which older vLLM had not
        seen.setdefault(run["series"], {"+Inf"}).update(run["le"])
    unpublished = {
        "vllm:iteration_tokens_total": {"1024.0", "2048.0", "4096.0", "8192.0", "16384.0"},
        "vllm:request_params_max_tokens": {"20000.0"},
    }
    # Some are published of a series with the same bounds alone.
    same = {
        "vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
        "vllm:request_time_per_output_token_seconds": "vllm:time_per_output_token_seconds",
        "vllm:request_max_num_generation_tokens": "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens": "vllm:request_prompt_tokens",
        **{f"vllm:{name}_seconds": "vllm:request_queue_time_seconds" for name in (
            "e2e_request_latency", "request_prefill_time", "request_decode_time", "request_inference_time",
        )},
    }  # fmt: skip
    for name, family in found.items():
        if family.type == "histogram" and not name.startswith("pinnate:"):
            ours = {s.labels["le"] for s in family.samples if "le" in s.labels}
            assert ours - seen.get(same.get(name, name), set()) == unpublished.get(name, set()), name


def test_a_rate_falls_to_zero() -> None:
    rate = TokenRate()
    assert rate.per_second(0.0) == 0
    for step in range(101):
        rate.note(total=10.0 * step, now=0.1 * step)
    assert rate.per_second(10.0) == pytest.approx(100, rel=0.15)
    assert rate.per_second(10.0 + RATE_SECONDS + 0.01) == 0
    rate.note(total=1010.0, now=100.0)
    assert rate.per_second(100.1) == 10 / (RATE_SECONDS / 10)


async def test_times_of_a_request_are_observed(client: Client) -> None:
    client.engine.script = lambda *_: [
        OutputDelta(0, "a", [97], timing=RequestTiming(0.25, 0.5)),
        OutputDelta(0, "b", [98], finish_reason=FinishReason.LENGTH),
    ]
    await client.complete(n=1, max_tokens=2)
    metrics = client.state.metrics
    assert (metrics.queue_time.total, metrics.prefill_time.total) == (0.25, 0.5)
    assert metrics.inference_time.total == pytest.approx(0.5 + metrics.decode_time.total)
    assert (metrics.params_n.total, metrics.params_max_tokens.total, metrics.max_generation_tokens.total) == (1, 2, 2)


async def test_a_request_refused_by_the_engine_leaves_no_times(client: Client) -> None:
    client.engine.full = True
    assert (await client.complete()).status in (429, 503)
    assert client.state.metrics.params_n.total == 0


def test_steps_are_counted_once_and_over_restarts(client: Client) -> None:
    metrics = client.state.metrics
    for steps, tokens in ((1, 5), (1, 5), (2, 7), (0, 0), (1, 9), (1, 9)):
        metrics.record_stats(EngineStats(steps=steps, step_tokens=tokens))
    assert (sum(metrics.step_tokens.counts), metrics.step_tokens.total) == (3, 21)
    assert (metrics.engine_restarts, metrics.total("steps")) == (1, 3)
