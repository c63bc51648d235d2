"""Steps whose logits are given: row i of a matrix is the logits of the sequence that holds token i."""

from array import array
from dataclasses import dataclass, field

import numpy as np

from pinnate.core.batch import Sample, ScheduledSequence, SchedulerOutput, StepResult
from pinnate.core.sampling import SamplingParams
from pinnate.executor.base import ExecutorSpec
from pinnate.executor.forward_batch import build_forward_batch, step_result
from pinnate.executor.native import NativeExecutor
from pinnate.executor.sampling import sample_rows
from pinnate.graph import GraphBuilder
from tests.unit.executor.native_helpers import tensor


class FixedMatcher:
    """Allows the tokens of a list."""

    is_terminated = False

    def __init__(self, allowed: list[int]) -> None:
        self.allowed = allowed

    def advance(self, token: int) -> None: ...

    def forced(self) -> list[int]:
        return []

    def clone(self) -> "FixedMatcher":
        return self

    def fill(self, mask: memoryview) -> None:
        for token in self.allowed:
            mask[token // 32] |= 1 << token % 32


@dataclass
class Draw:
    """One sample from logits row `row`."""

    row: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 1
    index: int = 0
    position: int = 1
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    banned: tuple[int, ...] = ()
    allowed: list[int] | None = None

    def sample(self) -> Sample:
        history = array("i", self.prompt + self.output)
        return Sample(
            self.params,
            self.seed,
            self.index,
            self.position,
            history if history else None,
            len(self.prompt),
            self.banned,
            matcher=None if self.allowed is None else FixedMatcher(self.allowed),
        )


def step_of(draws: list[Draw]) -> SchedulerOutput:
    return SchedulerOutput(
        tuple(
            ScheduledSequence(i, 0, array("i", [draw.row]), array("i", [1]), (draw.sample(),))
            for i, draw in enumerate(draws)
        )
    )


def numpy_draws(logits: np.ndarray, draws: list[Draw]) -> StepResult:
    output = step_of(draws)
    batch = build_forward_batch(output, 16)
    return step_result(output, batch, sample_rows(logits.astype(np.float32)[batch.tokens], batch))


def logits_executor(logits: np.ndarray, *, isa: str = "auto", threads: int = 1, most: int = 4096) -> NativeExecutor:
    """A native executor whose model is a table of logits."""
    b = GraphBuilder()
    graph = b.finish(b.gather_rows(b.embedding(tensor("logits", logits))))
    spec = ExecutorSpec(num_pages=1, page_size=16, max_num_batched_tokens=most, max_num_seqs=1, max_model_len=16)
    return NativeExecutor(graph, spec, dtype="float32", isa=isa, threads=threads)
