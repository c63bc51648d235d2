"""Runs given token ids through an executor and collects the logits: shared by the oracle tests."""

from __future__ import annotations

from array import array
from typing import Protocol

import numpy as np

from pinnate.core.batch import ScheduledSequence, SchedulerOutput
from pinnate.executor.base import ExecutorSpec

PAGE_SIZE = 16


class LogitsExecutor(Protocol):
    def logits(self, output: SchedulerOutput) -> np.ndarray: ...


def spec_for(num_tokens: int, page_size: int = PAGE_SIZE, chunk: int = 512) -> ExecutorSpec:
    return ExecutorSpec(
        num_pages=-(-num_tokens // page_size),
        page_size=page_size,
        max_num_batched_tokens=chunk,
        max_num_seqs=16,
        max_model_len=max(num_tokens, 64),
    )


def forced_logits(executor: LogitsExecutor, token_ids: list[int], chunk: int, page_size: int = PAGE_SIZE) -> np.ndarray:
    """Logits at every position, [len(token_ids), vocab], computed in chunks on pages in an order that is not sorted."""
    pages = array("i", range(-(-len(token_ids) // page_size), 0, -1))
    rows = []
    for start in range(0, len(token_ids), chunk):
        tokens = array("i", token_ids[start : start + chunk])
        # which tokens are scored does not matter here: a score asks for the logits of its position
        sequence = ScheduledSequence(seq_id=1, start=start, token_ids=tokens, page_table=pages, score=tokens)
        rows.append(executor.logits(SchedulerOutput((sequence,))))
    return np.concatenate(rows)
