"""Figures of a small load (helpers.LOAD) that can be worked out by hand, and their JSON."""

from __future__ import annotations

import json

import pytest

from pinnate.bench.client import Outcome
from pinnate.bench.load import LoadResult, Pace
from pinnate.bench.metrics import METRICS, most_at_once, stats_of
from pinnate.bench.report import About, as_json, as_text, default_filename, details, percentile_name
from tests.unit.bench.helpers import LOAD, outcome, summary

ABOUT = About("20260102-030405", "openai", "org/name", "path/to/it")
# What readers of `vllm bench serve` results look for.
KEYS = [
    "date", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness",
    "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "max_concurrent_requests",
]  # fmt: skip
KEYS += [f"{which}_{metric}_ms" for metric in METRICS for which in ("mean", "median", "std", "p99")]


def test_counts_and_throughputs_are_of_completed_requests() -> None:
    s = summary()
    assert (s.completed, s.failed) == (3, 1)
    assert (s.total_input, s.total_output) == (50, 8)
    assert (s.request_throughput, s.output_throughput, s.total_throughput) == (0.75, 2.0, 14.5)
    assert s.errors == {"HTTP 503: busy": 1}
    assert s.max_concurrent == 2
    assert s.goodput is None


def test_each_metric_has_its_own_population() -> None:
    stats = summary().stats
    assert stats["ttft"].mean == pytest.approx(200.0)
    assert stats["ttft"].median == pytest.approx(200.0)
    assert stats["ttft"].std == pytest.approx((20000 / 3) ** 0.5)
    assert stats["tpot"].mean == pytest.approx(30.0)  # of requests: (20 + 40) / 2, (10 + 30 + 50) / 3
    assert stats["itl"].mean == pytest.approx(30.0)  # of gaps: 150 / 5
    assert stats["itl"].median == pytest.approx(30.0)
    assert stats["e2el"].mean == pytest.approx((160 + 390 + 200) / 3)


def test_percentiles_are_interpolated() -> None:
    stats = stats_of([0.001, 0.002, 0.003, 0.004, 0.005], (0.0, 25.0, 90.0, 100.0))
    assert [stats.percentiles[p] for p in (0.0, 25.0, 90.0, 100.0)] == pytest.approx([1.0, 2.0, 4.6, 5.0])
    assert stats.std == pytest.approx(2.0**0.5)


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 1000.0}, 3),
        ({"ttft": 200.0}, 2),  # 100 and exactly 200
        ({"tpot": 29.0}, 1),  # the single token has no TPOT to exceed it
        ({"e2el": 180.0}, 1),
        ({"ttft": 150.0, "e2el": 159.0}, 0),
    ],
)
def test_goodput_counts_requests_that_keep_every_limit(limits: dict[str, float], good: int) -> None:
    assert summary(**limits).goodput == good / 4.0


def test_a_load_of_failures_has_no_times() -> None:
    s = summary(LoadResult([Outcome(5, error="no")] * 3, 2.0), ttft=1.0)
    assert (s.completed, s.failed, s.goodput, s.max_concurrent) == (0, 3, 0.0, 0)
    assert all(s.stats[name].mean is None and s.stats[name].percentiles == {99.0: None} for name in METRICS)
    document = as_json(ABOUT, Pace(), s)
    assert json.loads(json.dumps(document, allow_nan=False))["mean_ttft_ms"] is None
    assert "failed 3 x: no" in as_text(s)


def test_overlap_of_spans() -> None:
    assert most_at_once([]) == 0
    assert most_at_once([(0, 1), (1, 2), (2, 3)]) == 1
    assert most_at_once([(0, 10), (1, 2), (3, 9), (4, 5), (5, 6)]) == 3


def test_json_has_the_keys_of_vllm_bench_serve() -> None:
    document = as_json(ABOUT, Pace(2.0, 0.5, 7), summary(ttft=200.0))
    assert list(document) == KEYS
    assert (document["model_id"], document["tokenizer_id"], document["backend"]) == ("org/name", "path/to/it", "openai")
    assert (document["request_rate"], document["burstiness"], document["max_concurrency"]) == (2.0, 0.5, 7)
    assert (document["num_prompts"], document["completed"], document["failed"]) == (4, 3, 1)
    assert document["request_goodput"] == 0.5
    assert document["p99_itl_ms"] == pytest.approx(49.6)


def test_json_of_an_endless_rate_is_still_json() -> None:
    document = as_json(ABOUT, Pace(), summary())
    assert document["request_rate"] == "inf"
    assert document["max_concurrency"] is None
    assert document["request_goodput"] is None
    json.dumps(document, allow_nan=False)


def test_only_the_metrics_and_percentiles_asked_for() -> None:
    document = as_json(ABOUT, Pace(), summary(percentiles=(50.0, 99.9)), ["ttft"])
    assert {key for key in document if key.endswith("_ms")} == {
        "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p50_ttft_ms", "p99.9_ttft_ms",
    }  # fmt: skip
    text = as_text(summary(percentiles=(50.0, 99.9)), ["ttft"])
    assert "p99.9" in text
    assert "tpot" not in text


def test_details_hold_every_request() -> None:
    found = details(LOAD)
    assert found["input_lens"] == [10, 30, 10, 99]
    assert found["output_lens"] == [3, 4, 1, 0]
    assert found["ttfts"] == [0.1, 0.3, 0.2, 0.0]
    assert found["itls"][1] == [0.01, 0.03, 0.05]
    assert found["errors"] == ["", "", "", "HTTP 503: busy"]
    assert found["generated_texts"] == ["x", "x", "x", ""]
    assert found["start_times"] == [100.0, 100.05, 103.0, 101.0]


def test_errors_are_shown_most_frequent_first_and_none_is_lost() -> None:
    many = [Outcome(1, error=f"kind {kind}") for kind in range(8) for _ in range(kind + 1)]
    lines = as_text(summary(LoadResult([outcome(0, 0.1, []), *many], 1.0))).splitlines()[-6:]
    assert lines[0] == "failed 8 x: kind 7"
    assert lines[-1] == "failed 6 x: for other reasons"  # kinds 0, 1 and 2
    assert sum(int(line.split()[1]) for line in lines) == len(many)


def test_names() -> None:
    assert [percentile_name(p) for p in (99.0, 99.9, 50.0)] == ["p99", "p99.9", "p50"]
    assert default_filename(ABOUT, Pace()) == "openai-infqps-name-20260102-030405.json"
    labelled = About("d", "openai", "m", None, "mine")
    assert default_filename(labelled, Pace(2.5, 1.0, 8)) == "mine-2.5qps-concurrency8-m-d.json"
