"""A load's figures as a table and as JSON, with the keys that `vllm bench serve` writes.

Knows: names of keys, layout. Must not know: how anything was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pinnate.bench.load import LoadResult, Pace
from pinnate.bench.metrics import METRICS, Summary

_TITLES: Mapping[str, str] = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
_SHOWN_ERRORS = 5


@dataclass(frozen=True, slots=True)
class About:
    """What the figures are of."""

    date: str  # YYYYmmdd-HHMMSS
    backend: str
    model: str
    tokenizer: str | None
    label: str | None = None


def percentile_name(p: float) -> str:
    """p99, p99.9"""
    return f"p{int(p)}" if p == int(p) else f"p{p}"


def as_json(about: About, pace: Pace, summary: Summary, metrics: Sequence[str] = METRICS) -> dict[str, Any]:
    """Times of the metrics in milliseconds, null where nothing was measured; `duration` in seconds."""
    result: dict[str, Any] = {
        "date": about.date,
        "backend": about.backend,
        "label": about.label,
        "model_id": about.model,
        "tokenizer_id": about.tokenizer,
        "num_prompts": summary.completed + summary.failed,
        "request_rate": pace.request_rate if math.isfinite(pace.request_rate) else "inf",
        "burstiness": pace.burstiness,
        "max_concurrency": pace.max_concurrency,
        "duration": summary.duration,
        "completed": summary.completed,
        "failed": summary.failed,
        "total_input_tokens": summary.total_input,
        "total_output_tokens": summary.total_output,
        "request_throughput": summary.request_throughput,
        "request_goodput": summary.goodput,
        "output_throughput": summary.output_throughput,
        "total_token_throughput": summary.total_throughput,
        "max_concurrent_requests": summary.max_concurrent,
    }
    for name in metrics:
        stats = summary.stats[name]
        result |= {f"mean_{name}_ms": stats.mean, f"median_{name}_ms": stats.median, f"std_{name}_ms": stats.std}
        result |= {f"{percentile_name(p)}_{name}_ms": value for p, value in stats.percentiles.items()}
    return result


def details(load: LoadResult) -> dict[str, Any]:
    """Every request; seconds. `errors` holds an empty text where there was none."""
    outcomes = load.outcomes
    return {
        "input_lens": [o.prompt_len for o in outcomes],
        "output_lens": [o.output_len for o in outcomes],
        "ttfts": [o.ttft for o in outcomes],
        "itls": [o.itl for o in outcomes],
        "start_times": [o.start for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error or "" for o in outcomes],
    }


def as_text(summary: Summary, metrics: Sequence[str] = METRICS) -> str:
    rows = [
        ("requests completed", f"{summary.completed}"),
        ("requests failed", f"{summary.failed}"),
        ("duration, s", f"{summary.duration:.2f}"),
        ("input tokens", f"{summary.total_input}"),
        ("output tokens", f"{summary.total_output}"),
        ("requests / s", f"{summary.request_throughput:.2f}"),
        *([] if summary.goodput is None else [("requests / s within limits", f"{summary.goodput:.2f}")]),
        ("output tokens / s", f"{summary.output_throughput:.1f}"),
        ("all tokens / s", f"{summary.total_throughput:.1f}"),
        ("most requests at once", f"{summary.max_concurrent}"),
    ]
    lines = [f"{name:<28}{value:>12}" for name, value in rows]
    if metrics:
        names = [percentile_name(p) for p in summary.stats[metrics[0]].percentiles]
        lines += ["", f"{'milliseconds':<28}" + "".join(f"{n:>12}" for n in ("mean", "median", "std", *names))]
    for name in metrics:
        stats = summary.stats[name]
        values = (stats.mean, stats.median, stats.std, *stats.percentiles.values())
        lines.append(f"{_TITLES[name] + f' ({name})':<28}" + "".join(f"{_number(v):>12}" for v in values))
    return "\n".join([*lines, *error_lines(summary)])


def error_lines(summary: Summary) -> list[str]:
    """The errors, most frequent first; the rest is counted."""
    ordered = sorted(summary.errors.items(), key=lambda item: -item[1])
    lines = [f"failed {times} x: {message}" for message, times in ordered[:_SHOWN_ERRORS]]
    rest = sum(times for _, times in ordered[_SHOWN_ERRORS:])
    return [*lines, f"failed {rest} x: for other reasons"] if rest else lines


def default_filename(about: About, pace: Pace) -> str:
    rate = f"{pace.request_rate:g}qps"
    at_once = "" if pace.max_concurrency is None else f"-concurrency{pace.max_concurrency}"
    return f"{about.label or about.backend}-{rate}{at_once}-{Path(about.model).name}-{about.date}.json"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
