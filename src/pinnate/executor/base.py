"""The Executor contract: the data plane as the engine sees it.

Knows: what a step is given and gives back (core/batch.py has both). Must not know: why a sequence is in the step. The
reference executor (reference.py) is the contract's meaning in NumPy, the native one its speed; tests hold one against
the other.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pinnate.core.batch import SchedulerOutput, StepResult
from pinnate.core.layer_groups import LayerGroups


@dataclass(frozen=True, slots=True)
class ExecutorSpec:
    """Sizes an executor is built for. `num_pages` usable pages; page 0 (null) is extra, so ids run to num_pages.
    `groups` says which layers share a page; None: all of them."""

    num_pages: int
    page_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    groups: LayerGroups | None = None


class WeightGroup(NamedTuple):
    """Weights that are held in memory alike, for the same reason: so many matrices or vectors, as they are packed."""

    format: str
    reason: str
    pieces: int
    bytes: int


class Executor(Protocol):
    """Runs one step: copies pages, computes the scheduled tokens, writes their KV, samples.

    Deterministic: the results for a sequence do not depend on what else is in the step, on how its tokens were
    cut into chunks, or on the number of threads.
    """

    def execute(self, output: SchedulerOutput) -> StepResult:
        """In this order: `copies` of pages; for every token of every sequence its keys and values, written to the slot
        that its page table names, and attention over the positions before it; logits of the rows that are asked for;
        one draw for each Sample. One call at a time, from the engine's thread; arrays of `output` are read until it
        returns, not after.

        Raises:
            Exception: whatever went wrong. The engine then ends the step's requests (Scheduler.fail) and comes with the
                next step, for which the executor must be fit; what the failed step wrote is never read.
        """
        ...

    @property
    def page_bytes(self) -> int:
        """Of one page with all its layers, as read_pages gives it."""
        ...

    @property
    def kv_committed_bytes(self) -> int:
        """Of the KV memory, what the system has given or will give in idle time. Never shrinks."""
        ...

    def read_pages(self, pages: array[int], out: bytearray | memoryview) -> None:
        """Copies pages to `out` (page_bytes each). Any thread may call it beside `execute`: a page that the step
        writes comes out torn, for the caller to discard."""
        ...

    def write_pages(self, pages: array[int], data: bytes | bytearray | memoryview) -> None:
        """The inverse. Any thread may call it, for pages that the step under way does not touch."""
        ...

    def describe(self) -> dict[str, object]:
        """dtype, isa, threads, weight_bytes, kv_bytes and what else `doctor` shows."""
        ...

    def close(self) -> None:
        """Gives memory and threads back. Nothing may be called afterwards."""
        ...
