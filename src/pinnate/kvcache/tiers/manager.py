"""TierManager: the tier below the KV pool as the scheduler (LowerTiers) and the engine's loop see it.

Knows: which waiting sequence has pages in the tier, when loading beats computing, what a preempted one should do. Must
not know: files, the thread, the queue.

A load is a sequence that never runs: it holds the matched prefix and the pages that are being filled as any sequence
would, so eviction, sharing and the integrity check need to know nothing of loads. When it is finished it commits what
has come, which the sequence that waits for it then finds in the prefix tree.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pinnate.core.request import Request, Sequence
from pinnate.core.sampling import SamplingParams
from pinnate.kvcache.manager import KVCacheManager
from pinnate.kvcache.page_pool import NULL_PAGE
from pinnate.kvcache.radix_cache import PrefixMatch
from pinnate.kvcache.tiers.cost import CostModel
from pinnate.kvcache.tiers.mover import Load, PageMover
from pinnate.kvcache.tiers.saved_pages import SavedPages
from pinnate.kvcache.tiers.tier import PageName, Tier, page_key

FIRST_LOAD_ID = -(2**40)  # seq_ids of loads go down from here; pins have those from -1
PREFILL_TOKENS = 64  # a step of so many tokens says how fast prompts are computed
LOAD_WAIT_SECONDS = 0.002
NO_SAMPLING = SamplingParams(max_tokens=1, seed=0)


@dataclass(slots=True, eq=False)
class Fetch:
    """A load and the sequence that waits for it. `holder` has the pages; `matched` tokens needed no load."""

    load: Load
    holder: Sequence
    matched: int
    done: bool = False
    end: int = 0  # tokens that are there once it is done


class TierManager:
    """Implements LowerTiers. Belongs to the engine's thread, like the cache, whose `tiers` it becomes."""

    def __init__(self, cache: KVCacheManager, pages: SavedPages, tier: Tier, mover: PageMover, cost: CostModel) -> None:
        self._cache = cache
        self._pages = pages
        self._tier = tier
        self._mover = mover
        self._cost = cost
        self._fetches: dict[int, Fetch] = {}  # by seq_id of the one that waits
        self._under_way: dict[int, Fetch] = {}  # by seq_id of the holder
        self._loading: set[bytes] = set()  # keys
        self._num_loads = 0
        cache.tiers = self
        self._close = weakref.finalize(self, mover.close)  # also for an engine that nobody closes
        self._totals = dict.fromkeys(("hit_tokens", "swaps", "recomputes", "declined"), 0)

    @property
    def is_loading(self) -> bool:
        return bool(self._under_way)

    def fetch(self, seq: Sequence, match: PrefixMatch, limit: int) -> bool:
        known = self._fetches.get(seq.seq_id)
        if known is not None:
            return not known.done
        names: list[PageName] = []
        for name in self._names_after(seq, match, limit):
            if name.key in self._loading:
                return True  # for another one; then the match will be longer
            if not self._mover.has(name.key):
                break
            names.append(name)
        if not names:
            return False
        end = (len(match.pages) + len(names)) * self._cache.page_size
        if not self._cost.prefers_load(min(end, limit) - match.num_tokens, len(names), self._mover.num_queued):
            self._totals["declined"] += 1
            return False
        return self._start(seq, match, names)

    def poll(self) -> None:
        for load in self._mover.take_finished():
            fetch = next(fetch for fetch in self._under_way.values() if fetch.load is load)
            del self._under_way[fetch.holder.seq_id]
            self._loading.difference_update(name.key for name in load.names)
            fetch.done = True
            fetch.end = fetch.holder.num_computed_tokens = (
                fetch.holder.num_computed_tokens + load.num_loaded * self._cache.page_size
            )
            self._cache.release(fetch.holder)
        for fetch in self._under_way.values():
            left = len(fetch.load.pages) - fetch.load.num_loaded
            if not self._cost.goes_on(left * self._cache.page_size, left):
                fetch.load.stop = True

    def started(self, seq: Sequence) -> int:
        fetch = self._fetches.pop(seq.seq_id, None)
        if fetch is None:
            return 0
        brought = max(0, min(seq.num_computed_tokens, fetch.end) - fetch.matched)
        self._totals["hit_tokens"] += brought
        return brought

    def forget(self, seq: Sequence) -> None:
        self._fetches.pop(seq.seq_id, None)

    def preempt(self, seq: Sequence) -> None:
        num_pages = seq.num_computed_tokens // self._cache.page_size
        if self._cost.prefers_swap(num_pages * self._cache.page_size, num_pages):
            self._totals["swaps"] += 1
            self._pages.save(seq.page_table[:num_pages])
        else:
            self._totals["recomputes"] += 1

    def flush(self, drop: Callable[[], int]) -> int:
        freed = self._pages.discard_while(drop)
        self._mover.clear()
        return freed

    def wait_for_load(self) -> bool:
        if not self._under_way:
            return False
        self._mover.wait(LOAD_WAIT_SECONDS)
        return True

    def note_step(self, num_tokens: int, seconds: float) -> None:
        if num_tokens >= PREFILL_TOKENS:
            self._cost.prefill.add(num_tokens, seconds)
        self._mover.note_step()

    def stats(self) -> dict[str, int]:
        usage = self._tier.usage()
        return {
            "tier_pages": usage.num_pages,
            "tier_bytes": usage.num_bytes,
            "tier_hit_tokens": self._totals["hit_tokens"],
            "tier_loaded_pages": self._mover.num_loaded,
            "tier_stored_pages": self._mover.num_stored,
            "tier_rejected_pages": usage.num_rejected,
            "swaps": self._totals["swaps"],
        }

    def describe(self) -> dict[str, Any]:
        """For GET /debug/cache."""
        usage = self._tier.usage()
        return {
            "name": self._tier.name,
            "on": not self._mover.is_off,
            "pages": usage.num_pages,
            "bytes": usage.num_bytes,
            "max_bytes": usage.max_bytes,
            "loads_under_way": len(self._under_way),
            "pages_to_store": self._mover.num_unsaved,
            "load_pages_per_second": round(self._cost.load.per_second, 1),
            "prefill_tokens_per_second": round(self._cost.prefill.per_second, 1),
            "prefers_load": self._cost.goes_on(self._cache.page_size, 1),
            **self._totals,
            "loaded_pages": self._mover.num_loaded,
            "stored_pages": self._mover.num_stored,
            "rejected_pages": usage.num_rejected,
        }

    def close(self) -> None:
        self._close()

    def _names_after(self, seq: Sequence, match: PrefixMatch, limit: int) -> Iterator[PageName]:
        """Of the whole pages of known tokens behind the match, as far as they reach below `limit`."""
        size = self._cache.page_size
        namespace = seq.request.namespace
        key = self._pages.key_of(match.pages[-1] if match.pages else NULL_PAGE, namespace)
        for logical in range(len(match.pages), min(seq.num_tokens // size, -(-limit // size))):
            own = seq.token_ids[logical * size : (logical + 1) * size]
            name = PageName(page_key(key, own), key, own)
            yield name
            key = name.key

    def _start(self, seq: Sequence, match: PrefixMatch, names: list[PageName]) -> bool:
        size, request = self._cache.page_size, seq.request
        whole = len(match.pages) * size
        end = whole + len(names) * size
        self._num_loads += 1
        holder = Sequence(
            FIRST_LOAD_ID - self._num_loads,
            Request(
                request_id="",
                prompt_token_ids=[],
                sampling=NO_SAMPLING,
                priority=request.priority,
                cache_salt=request.cache_salt,
                adapter=request.adapter,
            ),
            0,
            token_ids=seq.token_ids[:end],
        )
        holder.num_computed_tokens = self._cache.adopt(holder, self._cache.match(holder, whole), count_hit=False)
        if not self._cache.allocate(holder, end - whole):
            self._cache.release(holder)
            return False
        load = Load(names, array("i", holder.page_table[len(match.pages) :]))
        fetch = Fetch(load, holder, match.num_tokens)
        self._fetches[seq.seq_id] = self._under_way[holder.seq_id] = fetch
        self._loading.update(name.key for name in names)
        self._mover.load(load)
        return True
