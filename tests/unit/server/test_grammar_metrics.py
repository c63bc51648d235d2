"""Counts of the checker as metrics, read when the text is made."""

from __future__ import annotations

from pinnate.engine.grammar_checker import GrammarChecker
from pinnate.engine.grammar_worker import WorkerStart
from pinnate.server.grammar_metrics import grammar_source
from pinnate.server.metrics import Metrics


async def test_counts_are_those_of_the_moment() -> None:
    checker = GrammarChecker(lambda: WorkerStart([], [], [], 0))
    metrics = Metrics()
    metrics.sources.append(grammar_source(checker))
    assert b"pinnate:structured_checks_total 0.0" in metrics.text()
    checker.counts.checks, checker.counts.failures, checker.counts.seconds = 3, 2, 0.5
    text = metrics.text()
    assert b"pinnate:structured_checks_total 3.0" in text
    assert b"pinnate:structured_check_failures_total 2.0" in text
    assert b"pinnate:structured_check_seconds_total 0.5" in text
