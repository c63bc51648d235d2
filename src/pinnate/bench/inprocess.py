"""Throughput and latency of the engine in this process: no HTTP, no arrival process.

Knows: prompts of given lengths, wall time. Must not know: flags, how an engine computes.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pinnate.bench.datasets import Conversation
from pinnate.core.sampling import SamplingParams
from pinnate.engine.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True)
class Throughput:
    """All prompts given at once. Tokens are those computed: prompts and outputs."""

    seconds: float
    requests: int
    prompt_tokens: int
    output_tokens: int

    def as_json(self) -> dict[str, float]:
        total = self.prompt_tokens + self.output_tokens
        return {
            "elapsed_time": self.seconds,
            "num_requests": self.requests,
            "total_num_tokens": total,
            "total_prompt_tokens": self.prompt_tokens,
            "total_output_tokens": self.output_tokens,
            "requests_per_second": self.requests / self.seconds,
            "tokens_per_second": total / self.seconds,
            "output_tokens_per_second": self.output_tokens / self.seconds,
        }


def measure_throughput(llm: LLM, conversations: Sequence[Conversation]) -> Throughput:
    """Runs the first turn of each conversation, its output of exactly the length asked for."""
    turns = [turns[0] for turns in conversations]
    params = [forced(turn.output_len) for turn in turns]
    begin = time.perf_counter()
    results = llm.generate([turn.prompt for turn in turns], params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    return Throughput(
        seconds=seconds,
        requests=len(results),
        prompt_tokens=sum(len(result.prompt_token_ids) for result in results),
        output_tokens=sum(len(result.outputs[0].token_ids) for result in results),
    )


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds of each iteration: one batch from its first prompt token to its last output token."""

    seconds: list[float]

    def as_json(self) -> dict[str, Any]:
        return {
            "avg_latency": statistics.fmean(self.seconds),
            "latencies": self.seconds,
            "percentiles": {str(p): float(np.percentile(self.seconds, p)) for p in PERCENTILES},
        }


def measure_latency(
    llm: LLM, rng: random.Random, *, batch_size: int, input_len: int, output_len: int, warmup: int, iterations: int
) -> Latency:
    """Every iteration has random token ids of its own, so that no prompt is found in the prefix cache."""
    vocab_size = int(llm.info["vocab_size"])
    low = min(100, vocab_size // 2)
    walls = []
    for _ in range(warmup + iterations):
        prompts = [[rng.randrange(low, vocab_size) for _ in range(input_len)] for _ in range(batch_size)]
        begin = time.perf_counter()
        llm.generate(list(prompts), forced(output_len), use_tqdm=False)
        walls.append(time.perf_counter() - begin)
    return Latency(walls[warmup:])


def forced(tokens: int) -> SamplingParams:
    """Greedy, and exactly that many tokens."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
