"""The proof of the KV memory's conservation, from first principles: everything is counted again.

Knows: the invariants of PagePool and RadixCache. Changes nothing.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable

from pinnate.core.errors import PinnateError
from pinnate.core.request import Sequence
from pinnate.kvcache.page_pool import NULL_PAGE, PagePool
from pinnate.kvcache.radix_cache import Node, RadixCache
from pinnate.kvcache.window_pages import WindowPages

Holder = tuple[Sequence, Node | None]  # a sequence with pages, and the node that it locks


class IntegrityError(PinnateError):
    """KV memory is not what its books say: a defect of pinnate, never of a request."""


def check(
    pool: PagePool,
    tree: RadixCache,
    page_size: int,
    holders: list[Holder],
    held: Iterable[int],
    windows: WindowPages | None = None,
) -> None:
    """Raises IntegrityError naming the first page, node or sequence that is wrong."""
    nodes = list(tree.nodes())
    attached = [page for pages in windows.attached.values() for page in pages] if windows else []
    _check_pages(pool, holders, nodes, held, attached)
    if windows:
        _check_windows(pool, [seq for seq, _ in holders], windows)
    for seq, locked in holders:
        _check_table(seq, page_size)
        if locked is not None:
            _check_locked_path(seq, locked, page_size)
    locks = Counter(id(node) for _, locked in holders for node in _path(locked))
    for node in nodes:
        _check_node(node, page_size, locks[id(node)])


def _check_pages(
    pool: PagePool, holders: list[Holder], nodes: list[Node], held: Iterable[int], attached: list[int]
) -> None:
    in_tables = Counter(page for seq, _ in holders for page in seq.page_table)
    in_tables.update(page for seq, _ in holders for table in seq.window_tables for page in table if page != NULL_PAGE)
    in_tree = Counter(page for node in nodes for page in node.pages)
    in_tree.update(attached)
    holds = Counter(held)
    free = Counter(pool.free_pages())
    in_use = evictable = 0
    for page in range(NULL_PAGE, pool.num_pages + 1):
        seen = (in_tables[page], in_tree[page], holds[page])
        booked = (pool.seq_refs[page], pool.tree_refs[page], pool.holds[page])
        _require(seen == booked, f"page {page}: (tables, nodes, holds) are {seen}, booked are {booked}")
        expected_free = int(page != NULL_PAGE and not any(seen))
        _require(free[page] == expected_free, f"page {page}: {free[page]} times free with references {seen}")
        in_use += bool(in_tables[page] or holds[page])
        evictable += bool(in_tree[page] and not in_tables[page] and not holds[page])
    _require(in_tables[NULL_PAGE] + in_tree[NULL_PAGE] + holds[NULL_PAGE] == 0, "the null page is referred to")
    _require(pool.num_in_use == in_use, f"{in_use} pages in use, booked {pool.num_in_use}")
    _require(pool.num_evictable == evictable, f"{evictable} pages evictable, booked {pool.num_evictable}")
    total = pool.num_free + evictable + in_use
    _require(total == pool.num_pages, f"free + cached + in use = {total}, of {pool.num_pages} pages")


def _check_table(seq: Sequence, page_size: int) -> None:
    covered = len(seq.page_table) * page_size
    computed = seq.num_computed_tokens
    facts = f"sequence {seq.seq_id}: {computed} of {seq.num_tokens} tokens computed in {covered} slots"
    _require(computed <= min(covered, seq.num_tokens), facts)
    _require(len(set(seq.page_table)) == len(seq.page_table), f"sequence {seq.seq_id}: a page twice in its table")


def _check_windows(pool: PagePool, sequences: list[Sequence], windows: WindowPages) -> None:
    """Tables have pages from the first one in the window on. What is attached lies beside a page of the tree, in
    one piece; eviction finds it exactly when no sequence needs it."""
    needed: set[int] = set()
    for seq in sequences:
        first = windows.first[seq.seq_id]
        for table in seq.window_tables:
            ok = len(table) == len(seq.page_table) and not any(table[:first]) and all(table[first:])
            _require(ok, f"sequence {seq.seq_id}: window table {table.tolist()}, from page {first}")
        needed.update(page for table in seq.window_tables for page in table)
    _require(len(windows.first) == len(sequences), "window tables of sequences that are gone")
    idle = Counter(windows.idle)
    for page, attached in windows.attached.items():
        in_use = {window_page in needed for window_page in attached}
        _require(pool.tree_refs[page] > 0, f"page {page}: window pages attached, but it is not in the tree")
        _require(len(in_use) == 1, f"page {page}: a part of its window pages {attached} is in use")
        _require(idle[page] == (not in_use.pop()), f"page {page}: {idle[page]} times idle, with {attached}")
    _require(idle.keys() <= windows.attached.keys(), "idle pages without window pages")


def _check_locked_path(seq: Sequence, locked: Node, page_size: int) -> None:
    """The locked path says the sequence's tokens and holds exactly the first pages of its table."""
    tokens, pages = array("i"), array("i")
    for node in reversed(list(_path(locked))):
        tokens.extend(node.tokens)
        pages.extend(node.pages)
    name = f"sequence {seq.seq_id}: its locked path of {locked.end} tokens"
    _require(locked.end % page_size == 0, f"{name} ends inside a page")
    _require(locked.end <= seq.num_computed_tokens, f"{name} exceeds the {seq.num_computed_tokens} computed")
    _require(tokens == seq.token_ids[: locked.end], f"{name} says other tokens")
    _require(pages == seq.page_table[: locked.end // page_size], f"{name} has other pages than its table")


def _check_node(node: Node, page_size: int, locks: int) -> None:
    name = f"node [{node.start}, {node.end}) of {node.namespace!r}"
    _require(node.lock_count == locks, f"{name}: {locks} locks, booked {node.lock_count}")
    if node.parent is None:
        _require(not node.tokens and not node.pages, f"{name}: a root has tokens or pages")
    else:
        _require(len(node.tokens) > 0 and node.start == node.parent.end, f"{name}: does not continue its parent")
        _require(node.parent.children.get(node.tokens[0]) is node, f"{name}: its parent does not know it")
        _require(node.parent.last_used >= node.last_used, f"{name}: used later than its parent")
        _require(node.parent.hits >= node.hits, f"{name}: hit more often than its parent")
        _require(node.parent.priority <= node.priority, f"{name}: more urgent than its parent")
        _require(bool(node.children or locks or node.queued), f"{name}: an unlocked leaf that eviction cannot find")
    left_to_children = bool(node.children and node.end % page_size)
    end_page = node.end // page_size if left_to_children else -(-node.end // page_size)
    expected = end_page - node.start // page_size
    _require(len(node.pages) == expected, f"{name}: {len(node.pages)} pages instead of {expected}")


def _path(node: Node | None) -> Iterable[Node]:
    while node is not None:
        yield node
        node = node.parent


def _require(holds: bool, facts: str) -> None:
    if not holds:
        raise IntegrityError(f"KV memory: {facts}")
