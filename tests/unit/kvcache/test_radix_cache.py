"""RadixCache: the shape of the tree, who holds which page, and the order of eviction."""

from array import array

from pinnate.kvcache.page_pool import PagePool
from pinnate.kvcache.radix_cache import Node, RadixCache

PAGE = 4


def ints(*values: int) -> "array[int]":
    return array("i", values)


def make(num_pages: int = 20) -> tuple[PagePool, RadixCache]:
    pool = PagePool(num_pages)
    return pool, RadixCache(pool, PAGE)


def put(pool: PagePool, tree: RadixCache, tokens: "array[int]", namespace: str = "") -> "array[int]":
    """Inserts a run in pages of its own, which then are the tree's alone. Returns these pages."""
    table = array("i", [pool.take() for _ in range(-(-len(tokens) // PAGE))])
    root = tree.root(namespace)
    tree.lock(root)
    tree.insert(root, tokens, table, len(tokens))
    for page in table:
        pool.drop_seq_ref(page)
    tree.unlock(root)
    return table


def spans(tree: RadixCache) -> list[tuple[int, int, list[int]]]:
    return sorted((n.start, n.end, list(n.pages)) for n in tree.nodes() if n.parent is not None)


def test_match_gives_whole_pages_and_the_page_of_the_tail() -> None:
    pool, tree = make()
    table = put(pool, tree, ints(1, 2, 3, 4, 5, 6, 7, 8, 9))
    match = tree.match_prefix(ints(1, 2, 3, 4, 5, 6, 0), "", 7)
    assert (match.num_tokens, match.pages, match.tail_page) == (6, table[:1], table[1])
    match = tree.match_prefix(ints(1, 2, 3, 4, 5, 6, 7, 8, 9), "", 8)
    assert (match.num_tokens, match.pages, match.tail_page) == (8, table[:2], 0)
    assert tree.match_prefix(ints(2, 2), "", 2).num_tokens == 0


def test_matching_leaves_the_tree_as_it_is() -> None:
    pool, tree = make()
    put(pool, tree, ints(1, 2, 3, 4, 5, 6))
    before = spans(tree)
    tree.match_prefix(ints(1, 2, 3), "", 3)
    assert spans(tree) == before
    assert tree.match_prefix(ints(1, 2), "other", 2).num_tokens == 0
    assert len(list(tree.nodes())) == 2


def test_a_branch_inside_a_page_leaves_that_page_to_the_branches() -> None:
    pool, tree = make()
    first = put(pool, tree, ints(1, 2, 3, 4, 5, 6, 7, 8))
    second = put(pool, tree, ints(1, 2, 3, 4, 5, 6, 9, 9, 9))
    assert spans(tree) == [(0, 6, [first[0]]), (6, 8, [first[1]]), (6, 9, [second[1], second[2]])]
    assert pool.num_free == 20 - 4  # the second's copy of the first page was not kept
    assert tree.match_prefix(ints(1, 2, 3, 4, 5, 6), "", 6).tail_page == first[1]
    match = tree.match_prefix(ints(1, 2, 3, 4, 5, 6, 9, 9), "", 8)
    assert list(match.pages) == [first[0], second[1]]


def test_the_last_child_leaves_its_shared_page_to_the_parent() -> None:
    pool, tree = make()
    first = put(pool, tree, ints(1, 2, 3, 4, 5, 6, 7, 8))
    second = put(pool, tree, ints(1, 2, 3, 4, 5, 6, 9, 9, 9))
    assert tree.evict(1) == 1  # the older branch: its page is its own
    assert spans(tree) == [(0, 6, [first[0]]), (6, 9, [second[1], second[2]])]
    assert tree.evict(1) == 1  # the end of the other one
    assert spans(tree) == [(0, 6, [first[0]]), (6, 8, [second[1]])]
    assert tree.evict(1) == 1  # its rest goes, the shared page stays for the parent, then the parent is shortened
    assert spans(tree) == [(0, 4, [first[0]])]
    assert tree.evict(99) == 1
    assert list(tree.nodes()) == []
    assert pool.num_free == 20


def test_a_leaf_grows_instead_of_getting_a_chain_of_children() -> None:
    pool, tree = make()
    put(pool, tree, ints(1, 2, 3, 4, 5))
    longer = put(pool, tree, ints(1, 2, 3, 4, 5, 6, 7))
    assert [(start, end) for start, end, _ in spans(tree)] == [(0, 7)]
    assert spans(tree)[0][2][1] == longer[1]  # the fuller page replaces the emptier
    assert pool.num_free == 18


def test_eviction_takes_the_least_recently_used_leaf_first() -> None:
    pool, tree = make()
    put(pool, tree, ints(1, 1, 1, 1))
    put(pool, tree, ints(2, 2, 2, 2))
    put(pool, tree, ints(3, 3, 3, 3))
    touched = tree.match_prefix(ints(1, 1, 1, 1), "", 4).node
    assert touched is not None
    tree.touch(touched)
    order = []
    while pool.num_evictable:
        tree.evict(1)
        order.append({n.tokens[0] for n in tree.nodes() if n.parent is not None})
    assert order == [{1, 3}, {1}, set()]


def test_a_locked_path_survives_and_its_split_keeps_the_lock() -> None:
    pool, tree = make()
    table = put(pool, tree, ints(1, 2, 3, 4, 5, 6, 7, 8))
    node = tree.match_prefix(ints(1, 2, 3, 4, 5, 6, 7, 8), "", 8).node
    assert node is not None
    tree.lock(node)
    for page in table:
        pool.add_seq_ref(page)
    put(pool, tree, ints(1, 2, 9, 9))
    assert isinstance(node.parent, Node)
    assert (node.start, node.lock_count, node.parent.lock_count) == (2, 1, 1)
    assert tree.evict(99) == 1
    assert [(start, end) for start, end, _ in spans(tree)] == [(0, 2), (2, 8)]
    for page in table:
        pool.drop_seq_ref(page)
    tree.unlock(node)
    assert tree.evict(99) == 2


def test_node_at_splits_only_where_needed() -> None:
    pool, tree = make()
    put(pool, tree, ints(1, 2, 3, 4, 5, 6, 7, 8, 9))
    deepest = tree.match_prefix(ints(1, 2, 3, 4, 5, 6, 7, 8, 9), "", 9).node
    assert deepest is not None
    upper = tree.node_at(deepest, 4)
    assert (upper.start, upper.end, deepest.start, deepest.end) == (0, 4, 4, 9)
    assert tree.node_at(deepest, 4) is upper
    assert tree.node_at(deepest, 9) is deepest
    assert tree.node_at(deepest, 0) is tree.root("")


def test_namespaces_are_apart_and_empty_ones_vanish() -> None:
    pool, tree = make()
    put(pool, tree, ints(1, 2, 3, 4), "a")
    put(pool, tree, ints(1, 2, 3, 4), "b")
    assert pool.num_free == 18
    assert tree.match_prefix(ints(1, 2, 3, 4), "c", 4).num_tokens == 0
    tree.evict(1)
    assert {node.namespace for node in tree.nodes()} == {"b"}
