"""The roofline of small cases that can be worked out by hand."""

from __future__ import annotations

import pytest

from pinnate.bench.roofline import Job, Peaks, Work, ideal_seconds, work_of
from pinnate.graph import GraphBuilder, Tensor, TensorType

WORK = Work(body_weights=100, head_weights=50, pair_flops=8, kv_bytes=4, weight_bytes=300)
COMPUTE_ONLY = Peaks(flops=1.0, bytes_read=1e30)
MEMORY_ONLY = Peaks(flops=1e30, bytes_read=1.0)


def tensor(name: str, *shape: int) -> Tensor:
    return Tensor(name, shape, TensorType.F32, memoryview(b""))


def test_work_counts_body_head_attention_and_kv() -> None:
    g = GraphBuilder()
    x = g.embedding(tensor("embed", 20, 8))
    q, k, v = (g.linear(x, tensor(n, width, 8)) for n, width in (("q", 8), ("k", 4), ("v", 4)))
    x = g.add(x, g.attention(q, k, v, head_dim=4))
    graph = g.finish(g.linear(g.gather_rows(x), tensor("head", 20, 8)))
    work = work_of(graph, element_bytes=2)
    assert work == Work(
        body_weights=8 * 16, head_weights=160, pair_flops=4 * 8, kv_bytes=2 * 4 * 2, weight_bytes=2 * 288
    )


def test_prompt_costs_body_for_each_token_and_one_head() -> None:
    # 3 tokens: 3 * 2 * 100, one head 2 * 50, pairs 1 + 2 + 3 of 8 FLOPs
    assert ideal_seconds(WORK, [Job(3, 1)], COMPUTE_ONLY, concurrency=1) == pytest.approx(600 + 100 + 48)


def test_chunks_cost_the_same_flops_and_more_bytes() -> None:
    whole = ideal_seconds(WORK, [Job(6, 1)], COMPUTE_ONLY, concurrency=1)
    assert ideal_seconds(WORK, [Job(6, 1)], COMPUTE_ONLY, concurrency=1, chunk=2) == pytest.approx(whole)
    once = ideal_seconds(WORK, [Job(6, 1)], MEMORY_ONLY, concurrency=1)
    thrice = ideal_seconds(WORK, [Job(6, 1)], MEMORY_ONLY, concurrency=1, chunk=2)
    assert once == pytest.approx(300 + 6 * 4)
    assert thrice == pytest.approx(3 * 300 + (2 + 4 + 6) * 4)


def test_decode_steps_read_the_weights_once_for_all_streams() -> None:
    alone = ideal_seconds(WORK, [Job(1, 5)], MEMORY_ONLY, concurrency=1)
    together = ideal_seconds(WORK, [Job(1, 5)] * 4, MEMORY_ONLY, concurrency=4)
    assert alone == pytest.approx(5 * 300 + (1 + 2 + 3 + 4 + 5) * 4)
    assert together == pytest.approx(5 * 300 + 4 * (1 + 2 + 3 + 4 + 5) * 4)


def test_concurrency_serialises_the_rest() -> None:
    one = ideal_seconds(WORK, [Job(2, 3)], MEMORY_ONLY, concurrency=1)
    assert ideal_seconds(WORK, [Job(2, 3)] * 3, MEMORY_ONLY, concurrency=1) == pytest.approx(3 * one)


def test_each_step_is_bound_by_the_slower_of_the_two() -> None:
    peaks = Peaks(flops=10.0, bytes_read=10.0)
    # prefill: 748 FLOPs against 312 bytes; then one decode: 300 + 32 FLOPs against 300 + 16 bytes
    assert ideal_seconds(WORK, [Job(3, 2)], peaks, concurrency=1) == pytest.approx(74.8 + 33.2)
