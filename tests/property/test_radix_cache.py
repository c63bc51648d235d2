"""RadixCache against a model that is a plain list of token runs."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from pinnate.kvcache.page_pool import PagePool
from pinnate.kvcache.radix_cache import Node, RadixCache, common_length
from tests.property.slot_memory import SlotMemory, prefix_hashes

NUM_PAGES = 400

token_runs = st.lists(st.integers(0, 2), min_size=1, max_size=40)
namespaces = st.sampled_from(["", "salt"])


class TreeModel:
    """Inserts whole runs, each computed into pages of its own, and remembers them."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pool = PagePool(NUM_PAGES)
        self.tree = RadixCache(self.pool, page_size)
        self.memory = SlotMemory(NUM_PAGES, page_size)
        self.runs: list[tuple[str, list[int]]] = []

    def insert(self, run: list[int], namespace: str) -> None:
        tokens, hashes = array("i", run), prefix_hashes(run, namespace)
        table = array("i", [self.pool.take() for _ in range(-(-len(run) // self.page_size))])
        for position in range(len(run)):
            self.memory.write(table, position, hashes[position + 1])
        root = self.tree.root(namespace)
        self.tree.lock(root)
        node, known = self.tree.insert(root, tokens, table, len(run))
        assert node.start < len(run) <= node.end
        self.memory.check(known, hashes, len(known) * self.page_size)
        for page in table:
            self.pool.drop_seq_ref(page)
        self.tree.unlock(root)
        self.runs.append((namespace, run))

    def longest(self, run: list[int], namespace: str, limit: int) -> int:
        """The answer by brute force."""
        best = 0
        for other_namespace, other in self.runs:
            if other_namespace == namespace:
                same = 0
                while same < min(limit, len(run), len(other)) and run[same] == other[same]:
                    same += 1
                best = max(best, same)
        return best

    def match(self, run: list[int], namespace: str, limit: int) -> int:
        """The tree's answer, with every slot of it read back."""
        match = self.tree.match_prefix(array("i", run), namespace, limit)
        assert len(match.pages) == match.num_tokens // self.page_size
        assert bool(match.tail_page) == bool(match.num_tokens % self.page_size)
        self.memory.check([*match.pages, match.tail_page], prefix_hashes(run, namespace), match.num_tokens)
        return match.num_tokens

    def locked(self, run: list[int], namespace: str) -> tuple[Node, array[int]]:
        """A lock on the whole pages of a match, with the table references that go with it."""
        match = self.tree.match_prefix(array("i", run), namespace, len(run))
        node = self.tree.node_at(match.node or self.tree.root(namespace), len(match.pages) * self.page_size)
        self.tree.lock(node)
        for page in match.pages:
            self.pool.add_seq_ref(page)
        return node, match.pages


runs_with_namespaces = st.lists(st.tuples(token_runs, namespaces), min_size=1, max_size=8)
page_sizes = st.sampled_from([1, 4, 16])


@settings(deadline=None)
@given(page_sizes, runs_with_namespaces, st.lists(st.tuples(token_runs, namespaces, st.integers(0, 45)), max_size=8))
def test_match_is_the_longest_common_prefix(
    page_size: int, runs: list[tuple[list[int], str]], queries: list[tuple[list[int], str, int]]
) -> None:
    model = TreeModel(page_size)
    for run, namespace in runs:
        model.insert(run, namespace)
    for run, namespace, limit in [*queries, *((run, namespace, len(run)) for run, namespace in runs)]:
        assert model.match(run, namespace, limit) == model.longest(run, namespace, limit)


@settings(deadline=None)
@given(
    page_sizes, runs_with_namespaces, st.lists(st.integers(1, 6), max_size=6), st.sets(st.integers(0, 7), max_size=2)
)
def test_eviction_frees_what_is_asked_for_and_keeps_what_is_locked(
    page_size: int, runs: list[tuple[list[int], str]], demands: list[int], lock: set[int]
) -> None:
    model = TreeModel(page_size)
    for run, namespace in runs:
        model.insert(run, namespace)
    chosen = [runs[i] for i in lock if i < len(runs)]
    locks = [model.locked(run, namespace) for run, namespace in chosen]
    for demand in [*demands, NUM_PAGES]:
        before, free = model.pool.num_evictable, model.pool.num_free
        freed = model.tree.evict(demand)
        assert freed == min(demand, before)
        assert (model.pool.num_evictable, model.pool.num_free) == (before - freed, free + freed)
        for run, namespace in runs:
            assert model.match(run, namespace, len(run)) <= model.longest(run, namespace, len(run))
        for run, namespace in chosen:
            assert model.match(run, namespace, len(run)) >= len(run) // page_size * page_size
    assert model.pool.num_evictable == 0
    for node, pages in locks:
        for page in pages:
            model.pool.drop_seq_ref(page)
        model.tree.unlock(node)
    model.tree.evict(NUM_PAGES)
    assert model.pool.num_free == NUM_PAGES
    assert list(model.tree.nodes()) == []


@given(token_runs, token_runs, st.integers(0, 50), st.integers(0, 50), st.integers(0, 200))
def test_common_length(edge: list[int], tokens: list[int], start: int, limit: int, repeat: int) -> None:
    edge, tokens = [1] * repeat + edge, [1] * repeat + tokens
    start = min(start, len(tokens))
    limit = min(start + limit + repeat, len(tokens))
    same = 0
    while same < len(edge) and start + same < limit and edge[same] == tokens[start + same]:
        same += 1
    assert common_length(array("i", edge), array("i", tokens), start, limit) == same
