"""What the scheduler and the loop ask of the tiers below the KV pool, and the answers where there are none.

Knows: the questions. Must not know: who answers (TierManager).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pinnate.core.request import Sequence
from pinnate.kvcache.radix_cache import PrefixMatch


class LowerTiers(Protocol):
    """`KVCacheManager.tiers`. All methods are quick."""

    @property
    def is_loading(self) -> bool:
        """Whether loads hold pages of the pool."""
        ...

    def poll(self) -> None:
        """Takes in what has been loaded. Called before each schedule."""
        ...

    def fetch(self, seq: Sequence, match: PrefixMatch, limit: int) -> bool:
        """Whether a sequence that could start now should rather wait: pages that go on from its match, of its first
        `limit` tokens, are on their way, or set out now. Each sequence is loaded for once, until it starts."""
        ...

    def started(self, seq: Sequence) -> int:
        """The sequence starts, with `num_computed_tokens` from the prefix tree: how many of them a tier brought."""
        ...

    def forget(self, seq: Sequence) -> None:
        """The sequence waits no longer."""
        ...

    def preempt(self, seq: Sequence) -> None:
        """The sequence is about to lose its pages: to a tier if getting them back from there will be faster than
        computing them again."""
        ...

    def flush(self, drop: Callable[[], int]) -> int:
        """Runs `drop`, which empties the pool of what is cached, and empties the tiers: afterwards nothing is a hit.
        Loads under way go on. Returns what `drop` does."""
        ...

    def stats(self) -> dict[str, int]:
        """Fields of EngineStats."""
        ...

    def wait_for_load(self) -> bool:
        """For a loop that has nothing to run: waits a moment for a load. False: there is none to wait for."""
        ...

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long in the executor."""
        ...

    def close(self) -> None:
        """Before the executor is closed: its pages are read and written until now."""
        ...


class NoTiers:
    """Implements LowerTiers."""

    is_loading = False

    def poll(self) -> None:
        pass

    def fetch(self, seq: Sequence, match: PrefixMatch, limit: int) -> bool:  # noqa: ARG002
        return False

    def started(self, seq: Sequence) -> int:  # noqa: ARG002
        return 0

    def forget(self, seq: Sequence) -> None:
        pass

    def preempt(self, seq: Sequence) -> None:
        pass

    def flush(self, drop: Callable[[], int]) -> int:
        return drop()

    def stats(self) -> dict[str, int]:
        return {}

    def wait_for_load(self) -> bool:
        return False

    def note_step(self, num_tokens: int, seconds: float) -> None:
        pass

    def close(self) -> None:
        pass
