"""A chart of a sweep: throughput and latency over concurrency (PNG). Needs matplotlib, the extra `chart`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pinnate.bench.report import percentile_name
from pinnate.bench.sweep import Point
from pinnate.core.errors import ConfigError

_BLUE, _ORANGE, _GREY = "#1f5fa8", "#d1700f", "#666666"


def require_matplotlib() -> None:
    """
    Raises:
        ConfigError: it is not installed; says how to mend that. Asked before a load is run, not after.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--chart needs matplotlib, which is not installed: pip install 'pinnate[chart]'")


def draw(points: Sequence[Point], percentile: float, title: str, path: Path) -> None:
    """Three panels over one axis of concurrency: output tokens a second, TTFT, TPOT; medians and `percentile`.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display

    figure = Figure(figsize=(8, 9), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=13)
    top, middle, bottom = figure.subplots(3, 1, sharex=True)
    streams = [point.concurrency for point in points]
    throughput = [point.summary.output_throughput for point in points]
    top.plot(streams, throughput, color=_BLUE, marker="o")
    for x, y in zip(streams, throughput, strict=True):
        top.annotate(f"{y:.0f}", (x, y), textcoords="offset points", xytext=(0, 7), ha="center", fontsize=9)
    top.set_ylabel("output tokens / s")
    top.set_ylim(0, max(throughput, default=0.0) * 1.18 or 1.0)
    _latencies(middle, points, "ttft", percentile, "time to first token, ms")
    _latencies(bottom, points, "tpot", percentile, "time per output token, ms")
    bottom.set_xscale("log", base=2)
    bottom.set_xticks(streams, [str(n) for n in streams])
    bottom.set_xlabel("requests at once")
    for axes in (top, middle, bottom):
        axes.grid(color=_GREY, alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigError(f"--chart {path}: {error.strerror}") from None


def _latencies(axes: Any, points: Sequence[Point], metric: str, percentile: float, label: str) -> None:
    """A point where nothing was measured leaves a gap in its line."""
    streams = [point.concurrency for point in points]
    stats = [point.summary.stats[metric] for point in points]
    axes.plot(streams, [_or_nan(s.median) for s in stats], color=_BLUE, marker="o", label="median")
    tail = [_or_nan(s.percentiles[percentile]) for s in stats]
    axes.plot(streams, tail, color=_ORANGE, marker="s", linestyle="--", label=percentile_name(percentile))
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value
