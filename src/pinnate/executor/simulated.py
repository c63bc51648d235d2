"""SimulatedExecutor: tokens by arithmetic, with no model behind them. What is left is the cost of everything else.

Knows: the Executor contract. Must not know: graphs, weights, KV memory: it has none, so a tier below the pool has
nothing to keep. For load tests of the server, the engine loop and clients: `--executor simulated` takes a model's
tokenizer, template and sizes, and answers with noise.
"""

from __future__ import annotations

import time
from array import array

import numpy as np

from pinnate.core.batch import Sample, SchedulerOutput, StepResult, TokenLogprobs
from pinnate.core.structured import Matcher
from pinnate.executor.base import WeightGroup
from pinnate.executor.masks import fill_masks

_LOGPROB = -1.0  # of every token


class SimulatedExecutor:
    """Implements executor.base.Executor. A token depends on the one before it, its position and, where the request
    samples, on the seed: as with a model, the same request gets the same tokens in whatever batch.

    A step takes `step_seconds` and none of the CPU.
    """

    def __init__(self, vocab_size: int, step_seconds: float = 0.0) -> None:
        self._vocab_size = vocab_size
        self._step_seconds = step_seconds
        self._end = 0.0  # of the latest step, on the monotonic clock

    @staticmethod
    def weigh() -> list[WeightGroup]:
        return [WeightGroup("no weights", "the simulated executor computes nothing", 0, 0)]

    def execute(self, output: SchedulerOutput) -> StepResult:
        tokens: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        scores = {}
        for sequence in output.sequences:
            last = sequence.token_ids[-1]
            for sample in sequence.samples:
                token = self._draw(last, sample) if sample.target < 0 else sample.target
                tokens.append(token)
                logprobs.append(self._logprobs(token, _num_top(sample)))
            if sequence.score is not None:
                scores[sequence.seq_id] = [self._scored(token, sequence.score_top) for token in sequence.score]
        self._pace()
        return StepResult(tokens, logprobs, scores)

    @property
    def kv_committed_bytes(self) -> int:
        return 0

    @property
    def page_bytes(self) -> int:
        return 0

    def read_pages(self, pages: array[int], out: bytearray | memoryview) -> None:
        """Nothing is kept."""

    def write_pages(self, pages: array[int], data: bytes | bytearray | memoryview) -> None:
        """Nothing is kept."""

    def describe(self) -> dict[str, object]:
        return {"executor": "simulated", "dtype": "none", "isa": "none", "threads": 0, "weight_bytes": 0, "kv_bytes": 0}

    def close(self) -> None:
        """Nothing is held."""

    def _draw(self, last: int, sample: Sample) -> int:
        salt = 0 if sample.params.is_greedy else sample.seed + sample.index
        number = last * 1103515245 + sample.position * 12345 + salt
        if sample.matcher is not None:
            return self._draw_allowed(sample.matcher, number)
        token = number % self._vocab_size
        while token in sample.banned:
            token = (token + 1) % self._vocab_size
        return token

    def _draw_allowed(self, matcher: Matcher, number: int) -> int:
        bits = np.unpackbits(fill_masks([matcher], self._vocab_size).view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: self._vocab_size])
        return int(allowed[number % len(allowed)]) if len(allowed) else 0

    def _logprobs(self, token: int, num_top: int | None) -> TokenLogprobs | None:
        return None if num_top is None else self._scored(token, num_top)

    def _scored(self, token: int, num_top: int) -> TokenLogprobs:
        size = self._vocab_size
        return TokenLogprobs(token, _LOGPROB, 1, [((token + i) % size, _LOGPROB - i) for i in range(num_top)])

    def _pace(self) -> None:
        """Steps that follow each other end `step_seconds` apart: the engine's own work does not slow them down."""
        if not self._step_seconds:
            return
        now = time.monotonic()
        follows = now < self._end + self._step_seconds
        self._end = (self._end if follows else now) + self._step_seconds
        time.sleep(max(0.0, self._end - now))


def _num_top(sample: Sample) -> int | None:
    return sample.params.logprobs if sample.num_top is None else sample.num_top
