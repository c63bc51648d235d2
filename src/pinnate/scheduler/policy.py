"""Policies: in which order waiting sequences are offered for admission, and how much background work a step takes.

Knows: the waiting queue, which is always in order of arrival (preempted sequences and lower priority values
first), and what is cached. Must not know: pages, budgets, the running batch. A policy is a pure function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final, Protocol

from pinnate.core.request import RequestStatus, Sequence

QUEUE_WINDOW: Final = 64  # how deep into the queue a step looks; bounds its cost
# Tokens of background work that a step takes along with live ones. A few rows more cost a step little (its time is that
# of reading the weights); more would be felt in every token of a live stream (benchmarks/batches.py).
BACKGROUND_TOKENS_BESIDE_LIVE: Final = 8
LPM_PATIENCE: Final = 32  # how often a request may be overtaken before it goes first


class QueueFacts(Protocol):
    """What a policy may ask about a waiting sequence."""

    def cached_tokens(self, seq: Sequence) -> int: ...

    def times_overtaken(self, seq: Sequence) -> int: ...


Policy = Callable[[list[Sequence], QueueFacts], Iterable[Sequence]]


def fcfs(waiting: list[Sequence], _facts: QueueFacts) -> Iterable[Sequence]:
    """First come, first served, within a priority."""
    return waiting


def lpm(waiting: list[Sequence], facts: QueueFacts) -> Iterable[Sequence]:
    """Longest cached prefix first, within a priority. Preempted sequences and those overtaken too often lead, in
    order of arrival, so that nobody waits for more than LPM_PATIENCE later ones."""

    def key(seq: Sequence) -> tuple[int, bool, int]:
        leads = seq.status is RequestStatus.PREEMPTED or facts.times_overtaken(seq) >= LPM_PATIENCE
        return seq.request.priority, not leads, 0 if leads else -facts.cached_tokens(seq)

    return sorted(waiting[:QUEUE_WINDOW], key=key)  # stable: equal keys stay in order of arrival


POLICIES: Final[Mapping[str, Policy]] = MappingProxyType({"fcfs": fcfs, "lpm": lpm})
