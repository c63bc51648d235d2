"""Offline measurements of the engine in this process: no HTTP, seeded random prompts, forced lengths."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pinnate.bench.inprocess import forced
from pinnate.bench.roofline import Job, Peaks, Work, ideal_seconds
from pinnate.engine.llm import LLM


@dataclass(frozen=True, slots=True)
class Workload:
    """`streams` requests at once, each of `prompt` tokens with `output` tokens forced."""

    name: str
    streams: int
    prompt: int
    output: int


WORKLOADS = (
    Workload("decode, 1 stream", 1, 64, 128),
    Workload("decode, 32 streams", 32, 32, 128),
    Workload("prefill, 2,000 tokens", 1, 2000, 1),
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Medians over the repetitions. `limit_seconds` is the roofline of the same work on the measured peaks."""

    workload: Workload
    seconds: float
    limit_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.workload.streams * self.workload.output / self.seconds

    @property
    def ratio(self) -> float:
        """Wall time over the machine's limit: 1 is perfect."""
        return self.seconds / self.limit_seconds


def measure(llm: LLM, vocab_size: int, workload: Workload, work: Work, peaks: Peaks, repeats: int) -> Measurement:
    """Runs `workload` once to warm up and `repeats` times for the median. Every run has prompts of its own."""
    rng = random.Random(f"{workload.name}")
    walls = [_run(llm, _prompts(rng, vocab_size, workload), workload) for _ in range(repeats + 1)]
    jobs = [Job(workload.prompt, workload.output)] * workload.streams
    limit = ideal_seconds(work, jobs, peaks, concurrency=workload.streams)
    return Measurement(workload, statistics.median(walls[1:]), limit)


def _run(llm: LLM, prompts: Sequence[list[int]], workload: Workload) -> float:
    begin = time.perf_counter()
    llm.generate(list(prompts), forced(workload.output), use_tqdm=False)
    return time.perf_counter() - begin


def _prompts(rng: random.Random, vocab_size: int, workload: Workload) -> list[list[int]]:
    low = min(100, vocab_size // 2)
    return [[rng.randrange(low, vocab_size) for _ in range(workload.prompt)] for _ in range(workload.streams)]
