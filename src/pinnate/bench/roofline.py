"""The machine's limit for a workload: an ideal continuous batcher whose every step costs the larger of
FLOPs / peak and bytes / bandwidth (the roofline model, Williams et al. 2009).

Knows: shapes and arithmetic. Must not know: how anything is executed. Pure functions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pinnate.graph import Graph
from pinnate.graph.ops import Attention, GatherRows, Linear


@dataclass(frozen=True, slots=True)
class Peaks:
    """What the machine can do with all threads: operations and bytes a second."""

    flops: float
    bytes_read: float


@dataclass(frozen=True, slots=True)
class Work:
    """What a model costs: weights by part, FLOPs of one (query, key) pair, KV bytes of one token; all layers."""

    body_weights: int
    head_weights: int
    pair_flops: int
    kv_bytes: int
    weight_bytes: float


@dataclass(frozen=True, slots=True)
class Job:
    """One request: prompt tokens, output tokens."""

    prompt: int
    output: int


def work_of(graph: Graph, *, element_bytes: float) -> Work:
    """Counts `graph`; `element_bytes` is the size of one weight and of one KV element in memory."""
    body = head = pairs = 0
    after_gather = False
    for op in graph.ops:
        if isinstance(op, GatherRows):
            after_gather = True
        elif isinstance(op, Linear):
            size = op.weight.shape[0] * op.weight.shape[1]
            head += size if after_gather else 0
            body += 0 if after_gather else size
        elif isinstance(op, Attention):
            pairs += 4 * op.num_heads * op.head_dim
    kv = sum(2 * layer.num_kv_heads * layer.head_dim for layer in graph.kv_layers)
    return Work(body, head, pairs, int(kv * element_bytes), (body + head) * element_bytes)


def ideal_seconds(work: Work, jobs: Sequence[Job], peaks: Peaks, *, concurrency: int, chunk: int = 2048) -> float:
    """Seconds an ideal batcher needs for `jobs`, at most `concurrency` at a time, prompts in chunks of `chunk`."""
    waiting = deque(jobs)
    prefilling: deque[list[int]] = deque()  # [prompt tokens left, prompt tokens, outputs]
    decoding: list[list[int]] = []  # [context, outputs left]
    seconds = 0.0
    while waiting or prefilling or decoding:
        while waiting and len(prefilling) + len(decoding) < concurrency:
            job = waiting.popleft()
            prefilling.append([job.prompt, job.prompt, job.output])
        flops = 0.0
        read = work.weight_bytes
        for sequence in decoding:
            sequence[0] += 1
            sequence[1] -= 1
            flops += 2 * (work.body_weights + work.head_weights) + work.pair_flops * sequence[0]
            read += sequence[0] * work.kv_bytes
        fresh, chunk_flops, chunk_bytes = _prefill(work, prefilling, chunk)
        seconds += max((flops + chunk_flops) / peaks.flops, (read + chunk_bytes) / peaks.bytes_read)
        decoding = [s for s in decoding + fresh if s[1] > 0]
    return seconds


def _prefill(work: Work, prefilling: deque[list[int]], budget: int) -> tuple[list[list[int]], float, float]:
    """Takes up to `budget` prompt tokens; returns the sequences that now decode, the FLOPs and the bytes."""
    flops = read = 0.0
    done = []
    while prefilling and budget > 0:
        left, prompt, output = prefilling[0]
        take = min(budget, left)
        budget -= take
        start = prompt - left
        pairs = (start + 1 + start + take) * take / 2
        flops += 2 * take * work.body_weights + pairs * work.pair_flops
        read += (start + take) * work.kv_bytes
        prefilling[0][0] -= take
        if left == take:
            prefilling.popleft()
            flops += 2 * work.head_weights
            done.append([prompt, output - 1])
    return done, flops, read
