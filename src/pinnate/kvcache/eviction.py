"""Eviction policies: which unlocked leaf of the prefix tree goes first when pages run out.

Knows: what a node remembers of its use. Must not know: tokens, pages, the tree's shape. A policy is a pure function
from these facts to a rank; the lowest rank goes first.

A rank never falls while its node lives: `last_used` and `hits` only grow, `priority` only becomes more urgent. That is
what lets the tree keep ranks in a heap and look at them again only when they come up (RadixCache.evict).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, Protocol


class Usage(Protocol):
    """What a node of the tree remembers of its use."""

    last_used: int  # a counter's value, not a time
    hits: int  # how many sequences started with these tokens from the cache
    priority: int  # the most urgent of the requests that used it; lower is more urgent


Rank = Any  # ints, or tuples of ints: one kind for each policy
EvictionPolicy = Callable[[Usage], Rank]


# Least recently used. The default, and asked for at every insertion: the only one that is worth a C function.
lru: Final[EvictionPolicy] = attrgetter("last_used")


def lfu(node: Usage) -> Rank:
    """Fewest hits; among equals the least recently used."""
    return node.hits, node.last_used


def slru(node: Usage) -> Rank:
    """Segmented LRU (Karedla, Love and Wherry, 1994): what was never found again goes before what was, each by
    recency, so that a flood of prompts seen once does not wash out the shared ones. Neither segment is bounded."""
    return node.hits > 0, node.last_used


def priority(node: Usage) -> Rank:
    """What only requests of the least urgent priority used; among equals the least recently used."""
    return -node.priority, node.last_used


EVICTION_POLICIES: Final[Mapping[str, EvictionPolicy]] = MappingProxyType(
    {"lru": lru, "lfu": lfu, "slru": slru, "priority": priority}
)
