"""Each eviction policy against a model that knows every cached prefix by itself, token by token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinnate.core.config import EVICTION_POLICIES as NAMES
from pinnate.core.request import Request, Sequence
from pinnate.core.sampling import SamplingParams
from pinnate.kvcache.eviction import EVICTION_POLICIES
from pinnate.kvcache.manager import KVCacheManager

NUM_PAGES = 24
PARAMS = SamplingParams(max_tokens=1, seed=0)
Prefix = tuple[int, ...]


class Model:
    """Pages of one token: a cached prefix is a page. `rank` is written anew here, from the policy's description."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.clock = 0
        self.used: dict[Prefix, int] = {}
        self.hits: dict[Prefix, int] = {}
        self.urgency: dict[Prefix, int] = {}

    def rank(self, prefix: Prefix) -> tuple[int, int]:
        first = {
            "lru": 0,
            "lfu": self.hits[prefix],
            "slru": min(1, self.hits[prefix]),
            "priority": -self.urgency[prefix],
        }[self.policy]
        return first, self.used[prefix]

    def matched(self, tokens: Prefix) -> int:
        return max((n for n in range(len(tokens)) if tokens[:n] in self.used), default=0)

    def evict(self, locked: set[Prefix]) -> None:
        inner = {prefix[:-1] for prefix in self.used}
        leaves = [prefix for prefix in self.used if prefix not in inner and prefix not in locked]
        victim = min(leaves, key=self.rank)
        for table in (self.used, self.hits, self.urgency):
            del table[victim]

    def run(self, tokens: Prefix, priority: int) -> None:
        """A request that computes all of `tokens` and ends."""
        cached = self.matched(tokens)
        locked = {tokens[:n] for n in range(1, cached + 1)}
        self.clock += 1
        for prefix in locked:
            self.hits[prefix] += 1
            self.used[prefix] = self.clock
            self.urgency[prefix] = min(self.urgency[prefix], priority)
        for _ in range(len(self.used) + len(tokens) - cached - NUM_PAGES):
            self.evict(locked)
        self.clock += 1
        for n in range(1, len(tokens) + 1):
            prefix = tokens[:n]
            self.used[prefix] = self.clock
            self.hits.setdefault(prefix, 0)
            self.urgency[prefix] = min(self.urgency.get(prefix, priority), priority)


def run(cache: KVCacheManager, number: int, tokens: Prefix, priority: int, chunk: int) -> None:
    request = Request(request_id="r", prompt_token_ids=list(tokens), sampling=PARAMS, priority=priority)
    seq = Sequence(number, request, 0)
    seq.token_ids.extend(tokens)
    seq.num_computed_tokens = cache.adopt(seq, cache.match(seq, len(tokens) - 1))
    # All pages at once, the tokens in chunks: when a token is committed must not matter to what goes first.
    assert cache.allocate(seq, len(tokens) - seq.num_computed_tokens)
    while seq.num_computed_tokens < len(tokens):
        seq.num_computed_tokens = min(len(tokens), seq.num_computed_tokens + chunk)
        cache.commit(seq)
    cache.end_step()
    cache.release(seq)


requests = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=16), st.integers(-1, 1), st.integers(1, 16)),
    min_size=4,
    max_size=40,
)


def test_the_names_that_flags_accept_are_those_that_exist() -> None:
    assert set(NAMES) == set(EVICTION_POLICIES)


@pytest.mark.parametrize("policy", NAMES)
@settings(deadline=None, max_examples=200)
@given(requests)
def test_what_is_cached_is_what_the_policy_keeps(policy: str, work: list[tuple[list[int], int, int]]) -> None:
    cache = KVCacheManager(NUM_PAGES, 1, eviction_policy=policy)
    model = Model(policy)
    for number, (tokens, priority, chunk) in enumerate(work):
        run(cache, number, tuple(tokens), priority, chunk)
        model.run(tuple(tokens), priority)
        cache.check_integrity()
        assert cached_prefixes(cache) == set(model.used)


def cached_prefixes(cache: KVCacheManager) -> set[Prefix]:
    prefixes: set[Prefix] = set()
    paths: dict[int, Prefix] = {}
    for node in cache._tree.nodes():  # parents first
        before = paths[id(node.parent)] if node.parent is not None else ()
        tokens = tuple(node.tokens)
        paths[id(node)] = before + tokens
        prefixes.update(before + tokens[: n + 1] for n in range(len(tokens)))
    return prefixes


def test_policies_differ() -> None:
    """The same work under the same pressure leaves, beside the last request, what the policy's name says."""
    often, recent, urgent, fresh, fresher = 4, 1, 2, 5, 6
    work = [(often, 3)] * 4 + [(recent, 3)] * 2 + [(urgent, 3), (fresh, 3), (fresher, 3), (7, 7)]
    kept = {}
    for policy in NAMES:
        cache = KVCacheManager(9, 1, eviction_policy=policy)
        for number, (first, length) in enumerate(work):
            run(cache, number, (first,) + (9,) * (length - 1), -5 if first == urgent else 0, 2)
        kept[policy] = {prefix[0] for prefix in cached_prefixes(cache)} - {7}
    assert kept == {"lru": {fresher}, "lfu": {often}, "slru": {recent}, "priority": {urgent}}
