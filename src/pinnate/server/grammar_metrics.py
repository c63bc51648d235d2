"""Metrics of structured outputs: how often they are checked, how long that takes, how often it fails.

Knows: the checker's counts, names. Must not know: grammars. A source of Metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from prometheus_client.core import CounterMetricFamily, Metric

from pinnate.engine.grammar_checker import GrammarChecker

_FAMILIES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "checks": ("structured_checks", "Structured outputs that requests asked for."),
        "cache_hits": ("structured_check_cache_hits", "Of them, those whose check was remembered."),
        "failures": ("structured_check_failures", "Refused: invalid, unsupported or beyond a limit."),
        "timeouts": ("structured_check_timeouts", "Refused since they took too long to compile."),
        "seconds": ("structured_check_seconds", "Time in the checking process."),
    }
)


def grammar_source(checker: GrammarChecker) -> Callable[[str], Iterator[Metric]]:
    """For `Metrics.sources`."""

    def collect(prefix: str) -> Iterator[Metric]:
        for field, (name, text) in _FAMILIES.items():
            yield CounterMetricFamily(prefix + name, text, value=getattr(checker.counts, field))

    return collect
