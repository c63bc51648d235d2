"""Page hashes, evicted paths and cache reports, kept up through any order of events, against what really happened."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from pinnate.core.messages import MatchEnd
from pinnate.core.request import Namespace
from pinnate.kvcache.debug_view import describe_cache
from pinnate.kvcache.explain import EvictedPaths, MatchExplainer
from pinnate.kvcache.manager import KVCacheManager
from pinnate.kvcache.page_hashes import PageHashes, page_hash, root_hash
from tests.property.test_kv_manager import KVManagerMachine
from tests.unit.kvcache.helpers import compute, start

Path = tuple[Namespace, tuple[int, ...]]


def chain(namespace: Namespace, tokens: tuple[int, ...], page_size: int) -> int:
    """The hash of a whole number of pages, by its definition."""
    value = root_hash(namespace)
    for first in range(0, len(tokens), page_size):
        value = page_hash(value, array("i", tokens[first : first + page_size]))
    return value


def pages_in_tree(cache: KVCacheManager) -> dict[int, Path]:
    """Every page of which the tree has all slots, with the tokens up to its end."""
    size = cache.page_size
    found: dict[int, Path] = {}
    paths: dict[int, tuple[int, ...]] = {}
    for node in cache.tree.nodes():
        before = paths[id(node.parent)] if node.parent is not None else ()
        tokens = paths[id(node)] = before + tuple(node.tokens)
        for logical, page in enumerate(node.pages, node.start // size):
            if (logical + 1) * size <= node.end:
                found[page] = node.namespace, tokens[: (logical + 1) * size]
    return found


class ExplainedMachine(KVManagerMachine):
    @initialize(page_size=st.sampled_from([1, 4, 16]), num_tokens=st.sampled_from([32, 64, 128]), caching=st.just(True))
    def start_engine(self, page_size: int, num_tokens: int, caching: bool) -> None:
        super().start_engine(page_size, num_tokens, caching)
        self.evicted = EvictedPaths(page_size)
        self.hashes = PageHashes(page_size, [self.evicted])
        self.cache.tree.watch = self.hashes
        self.explainer = MatchExplainer(self.cache.tree, self.hashes, self.evicted, page_size, see_others=True)
        self.ever: set[Path] = set()  # every prefix that was ever in the tree

    @invariant()
    def each_whole_page_has_its_hash(self) -> None:
        if not hasattr(self, "hashes"):
            return
        pages = pages_in_tree(self.cache)
        assert len(self.hashes) == len(pages)
        for page, (namespace, tokens) in pages.items():
            assert self.hashes.of(page, namespace) == chain(namespace, tokens, self.page_size)
        for node in self.cache.tree.nodes():
            seq_tokens = path(node)
            self.ever.update((node.namespace, seq_tokens[:end]) for end in range(node.start + 1, node.end + 1))

    @rule(
        which=st.integers(0), cut=st.integers(0, 60), tail=st.lists(st.integers(0, 3), max_size=4), salted=st.booleans()
    )
    def explain(self, which: int, cut: int, tail: list[int], salted: bool) -> None:
        prompt = array("i", self.known[which % len(self.known)][:cut] + tail or [1])
        namespace, other = (("", "x"), ("", "")) if salted else (("", ""), ("", "x"))
        limit = len(prompt) - 1
        match = self.cache.tree.match_prefix(prompt, namespace, limit)
        elsewhere = self.cache.tree.match_prefix(prompt, other, limit).num_tokens
        report = self.explainer.explain(prompt, namespace, match, limit)
        assert (report.num_prompt_tokens, report.num_cached_tokens) == (len(prompt), match.num_tokens)
        assert (report.reason is MatchEnd.LAST_TOKEN) == (match.num_tokens >= limit)
        lost = tuple(prompt[: match.num_tokens + report.num_lost_tokens])
        if report.reason is MatchEnd.EVICTED:
            assert report.num_lost_tokens > 0
            assert (namespace, lost) in self.ever
        elif report.reason is MatchEnd.OTHER_SALT:
            assert len(lost) == elsewhere > match.num_tokens
        elif report.reason is MatchEnd.NEW_TEXT:
            assert elsewhere <= match.num_tokens
            assert report.num_lost_tokens == 0

    @rule()
    def view(self) -> None:
        view = describe_cache(self.cache, max_nodes=3)
        pages = view["pages"]
        assert pages["free"] + pages["cached"] + pages["in_use"] == pages["total"]
        assert len(view["tree"]["nodes"]) == min(3, view["num_nodes"])
        assert view["tree"]["truncated"] == (view["num_nodes"] > 3)
        assert all(
            node["parent"] is None or view["tree"]["nodes"][node["parent"]]["end"] == node["start"]
            for node in view["tree"]["nodes"]
        )


def path(node: object) -> tuple[int, ...]:
    parts = []
    while node is not None:
        parts.append(tuple(node.tokens))  # type: ignore[attr-defined]
        node = node.parent  # type: ignore[attr-defined]
    return tuple(token for part in reversed(parts) for token in part)


ExplainedMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestExplanations = ExplainedMachine.TestCase


@settings(deadline=None)
@given(
    st.sampled_from([1, 4, 16]),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=50), min_size=1, max_size=6),
    st.integers(0, 40),
)
def test_whatever_is_evicted_is_told_from_new_text(page_size: int, runs: list[list[int]], demand: int) -> None:
    evicted = EvictedPaths(page_size)
    hashes = PageHashes(page_size, [evicted])
    cache = KVCacheManager(400, page_size, watch=hashes)
    for run in runs:
        compute(cache, run)
    cache.tree.evict(demand)
    explainer = MatchExplainer(cache.tree, hashes, evicted, page_size, see_others=False)
    for run in runs:
        limit = len(run) - 1
        for prompt in (run, [*run[:limit], 9, 9]):
            tokens = array("i", prompt)
            match = cache.tree.match_prefix(tokens, ("", ""), len(prompt) - 1)
            report = explainer.explain(tokens, ("", ""), match, len(prompt) - 1)
            if match.num_tokens == len(prompt) - 1:
                assert report.reason is MatchEnd.LAST_TOKEN
            elif match.num_tokens == limit:
                assert report.reason is MatchEnd.NEW_TEXT
            else:
                assert report.reason is MatchEnd.EVICTED


def test_the_memory_of_evicted_paths_is_bounded_and_forgets_the_oldest() -> None:
    evicted = EvictedPaths(4, limit=6)
    hashes = PageHashes(4, [evicted])
    cache = KVCacheManager(64, 4, watch=hashes)
    explainer = MatchExplainer(cache.tree, hashes, evicted, 4, see_others=False)

    def reason(first: int) -> MatchEnd:
        tokens = array("i", [first] * 9)
        return explainer.explain(tokens, ("", ""), cache.tree.match_prefix(tokens, ("", ""), 8), 8).reason

    for first in range(5):
        compute(cache, [first] * 9)
        cache.flush()
    assert len(evicted) == 6
    assert [reason(first) for first in (0, 4, 7)] == [MatchEnd.NEW_TEXT, MatchEnd.EVICTED, MatchEnd.NEW_TEXT]
    compute(cache, [4] * 9)
    assert reason(4) is MatchEnd.LAST_TOKEN


def test_a_window_that_was_released_is_said_before_all_else() -> None:
    hashes = PageHashes(4)
    cache = KVCacheManager(8, 4, watch=hashes)
    explainer = MatchExplainer(cache.tree, hashes, EvictedPaths(4), 4, see_others=True)
    seq = start(cache, list(range(10)))
    match = cache.match(seq, 9)
    assert explainer.explain(seq.token_ids, ("", ""), match, 9, window_lost=True).reason is MatchEnd.WINDOW_LOST
