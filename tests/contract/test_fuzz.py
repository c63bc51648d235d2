"""Requests made from the OpenAPI document: no 5xx, answers as documented. The long version: benchmarks/fuzz_api.py."""

from __future__ import annotations

import pytest
from fuzz_api import fuzz

from tests.e2e.harness import Server

CASES = 150


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("fuzz")
    flags = ["--max-model-len", "64", "--max-num-seqs", "16", "--data-dir", str(folder), "--pin-quota", "0.1"]
    server = Server(folder, *flags, "--cache-report", "all")
    try:
        yield server.wait_until(200)
    finally:
        server.stop()


def test_no_fault_in_generated_requests(small_server: Server) -> None:
    report = fuzz(small_server.url, CASES)
    assert not report.faults, report.faults[:3]
    assert report.cases >= CASES
    counts = {status: sum(c[status] for c in report.statuses.values()) for status in (200, 400, 404)}
    assert counts[200] > CASES // 10, counts  # some were served
    assert counts[400] > CASES // 10, counts
