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
    """Compares whole lists and sets: a pool may have tens of thousands of pages, and tests check after every step."""
    in_tables, in_tree, holds = Counter[int](), Counter(attached), Counter(held)
    for seq, _ in holders:
        for table in seq.window_tables:
            in_tables.update(table)
    del in_tables[NULL_PAGE]  # where windows slid past
    for seq, _ in holders:
        in_tables.update(seq.page_table)
    for node in nodes:
        in_tree.update(node.pages)
    seen = [_by_page(counts, pool.num_pages) for counts in (in_tables, in_tree, holds)]
    booked = [pool.seq_refs, pool.tree_refs, pool.holds]
    if seen != booked:
        for page, (found, known) in enumerate(zip(zip(*seen, strict=True), zip(*booked, strict=True), strict=True)):
            _require(found == known, "page {}: (tables, nodes, holds) are {}, booked are {}", page, found, known)
    in_use = in_tables.keys() | holds.keys()
    referred = in_use | in_tree.keys()
    _require(NULL_PAGE not in referred, "the null page is referred to")
    free, expected = Counter(pool.free_pages()), set(range(1, pool.num_pages + 1)) - referred
    if len(expected) != pool.num_free or free.keys() != expected:
        for page in range(NULL_PAGE, pool.num_pages + 1):
            _require(free[page] == (page in expected), "page {}: {} times free with references", page, free[page])
    evictable = len(in_tree.keys() - in_use)
    _require(pool.num_in_use == len(in_use), "{} pages in use, booked {}", len(in_use), pool.num_in_use)
    _require(pool.num_evictable == evictable, "{} pages evictable, booked {}", evictable, pool.num_evictable)
    total = pool.num_free + evictable + len(in_use)
    _require(total == pool.num_pages, "free + cached + in use = {}, of {} pages", total, pool.num_pages)


def _by_page(counts: Counter[int], num_pages: int) -> list[int]:
    found = [0] * (num_pages + 1)
    for page, count in counts.items():
        _require(NULL_PAGE <= page <= num_pages, "a reference to page {} of {}", page, num_pages)
        found[page] = count
    return found


def _check_table(seq: Sequence, page_size: int) -> None:
    covered = len(seq.page_table) * page_size
    computed = seq.num_computed_tokens
    facts = "sequence {}: {} of {} tokens computed in {} slots"
    _require(computed <= min(covered, seq.num_tokens), facts, seq.seq_id, computed, seq.num_tokens, covered)
    once = len(set(seq.page_table)) == len(seq.page_table)
    _require(once, "sequence {}: a page twice in its table", seq.seq_id)


def _check_windows(pool: PagePool, sequences: list[Sequence], windows: WindowPages) -> None:
    """Tables have pages from the first one in the window on. What is attached lies beside a page of the tree, in
    one piece; eviction finds it exactly when no sequence needs it."""
    needed: set[int] = set()
    for seq in sequences:
        first = windows.first[seq.seq_id]
        for table in seq.window_tables:
            ok = len(table) == len(seq.page_table) and not any(table[:first]) and all(table[first:])
            _require(ok, "sequence {}: window table {}, from page {}", seq.seq_id, table, first)
            needed.update(table)
    _require(len(windows.first) == len(sequences), "window tables of sequences that are gone")
    idle = Counter(windows.idle)
    for page, attached in windows.attached.items():
        in_use = {window_page in needed for window_page in attached}
        _require(pool.tree_refs[page] > 0, "page {}: window pages attached, but it is not in the tree", page)
        _require(len(in_use) == 1, "page {}: a part of its window pages {} is in use", page, attached)
        _require(idle[page] == (not in_use.pop()), "page {}: {} times idle, with {}", page, idle[page], attached)
    _require(idle.keys() <= windows.attached.keys(), "idle pages without window pages")


def _check_locked_path(seq: Sequence, locked: Node, page_size: int) -> None:
    """The locked path says the sequence's tokens and holds exactly the first pages of its table."""
    tokens, pages = array("i"), array("i")
    for node in reversed(list(_path(locked))):
        tokens.extend(node.tokens)
        pages.extend(node.pages)
    path, of = "sequence {}: its locked path of {} tokens ", (seq.seq_id, locked.end)
    computed = seq.num_computed_tokens
    _require(locked.end % page_size == 0, path + "ends inside a page", *of)
    _require(locked.end <= computed, path + "exceeds the {} computed", *of, computed)
    _require(tokens == seq.token_ids[: locked.end], path + "says other tokens", *of)
    _require(pages == seq.page_table[: locked.end // page_size], path + "has other pages than its table", *of)


def _check_node(node: Node, page_size: int, locks: int) -> None:
    name = "node [{0.start}, {0.end}) of {0.namespace!r}: "
    _require(node.lock_count == locks, name + "{1} locks, booked {0.lock_count}", node, locks)
    if node.parent is None:
        _require(not node.tokens and not node.pages, name + "a root has tokens or pages", node)
    else:
        _require(len(node.tokens) > 0 and node.start == node.parent.end, name + "does not continue its parent", node)
        _require(node.parent.children.get(node.tokens[0]) is node, name + "its parent does not know it", node)
        _require(node.parent.last_used >= node.last_used, name + "used later than its parent", node)
        _require(node.parent.hits >= node.hits, name + "hit more often than its parent", node)
        _require(node.parent.priority <= node.priority, name + "more urgent than its parent", node)
        found = bool(node.children or locks or node.queued)
        _require(found, name + "an unlocked leaf that eviction cannot find", node)
    left_to_children = bool(node.children and node.end % page_size)
    end_page = node.end // page_size if left_to_children else -(-node.end // page_size)
    expected = end_page - node.start // page_size
    _require(len(node.pages) == expected, name + "{1} pages instead of {2}", node, len(node.pages), expected)


def _path(node: Node | None) -> Iterable[Node]:
    while node is not None:
        yield node
        node = node.parent


def _require(holds: bool, facts: str, *values: object) -> None:
    """`facts` with {} for each of `values`: written only where they are wanted, for that is most of a check's time."""
    if not holds:
        raise IntegrityError(f"KV memory: {facts.format(*values)}")
