"""RadixCache: the prefix tree. Which computed tokens are in which pages, exact to the token.

Knows: tokens, pages, order of use. Must not know: sequences, steps, the clock (age is a counter).
Source: RadixAttention (Zheng et al., SGLang, 2024), here with paged memory under token-exact edges.

Who holds a page. A node covers the token range [start, end) of every sequence that runs through it. A logical
page (page_size tokens) may be crossed by several nodes of a path, where others branched off inside it. The
page belongs to the deepest of them: its sequence's page was copied on write or computed, so that it has every
slot of that page for the whole path. Hence:
 - a node holds the pages start // page_size ... of its range;
 - a node that ends inside a page and has children leaves that page to them: any child's has its slots;
 - losing its last child, such a node takes over the child's page, for it then is the deepest.
So a path holds one page for each page_size tokens, whatever its branches, and a split moves no reference.

Pages of 4 tokens, the sequences "abcdef" and "abcdxy":  root - "abcd" [page 1] - "ef" [page 2]
                                                                              `- "xy" [page 3]
"abcq" comes: "abcd" is cut at 3, inside page 1, which stays with the lower part; page 4 is a copy, with q behind abc:
    root - "abc" [] - "d" [page 1] - "ef" [page 2]
                 |               `- "xy" [page 3]
                 `- "q" [page 4]

Locks end at page boundaries (or at a root). A sequence that locks a node has that path's pages in its own
table, so a locked node pins no page that a table does not, and never takes one over.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from pinnate.core.request import Namespace
from pinnate.kvcache.eviction import EvictionPolicy, Rank, lru
from pinnate.kvcache.page_hashes import TreeWatch
from pinnate.kvcache.page_pool import NULL_PAGE, TreePages

ROOT_PRIORITY = -(2**63)  # more urgent than any request's
LAST_PRIORITY = 2**63


class Node:
    """One edge of the tree. Roots have no parent and no tokens. Owned by RadixCache; others keep it as a handle."""

    __slots__ = (
        "children",
        "hits",
        "last_used",
        "lock_count",
        "namespace",
        "pages",
        "parent",
        "priority",
        "queued",
        "start",
        "tokens",
    )

    def __init__(
        self, namespace: Namespace, parent: Node | None, start: int, tokens: array[int], pages: array[int]
    ) -> None:
        self.namespace = namespace
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.pages = pages
        self.children: dict[int, Node] = {}  # by first token
        self.lock_count = 0  # locks on this node or below it
        self.last_used = 0
        self.hits = 0  # adoptions of a match that reached this node
        self.priority = ROOT_PRIORITY if parent is None else LAST_PRIORITY  # the most urgent request that used it
        self.queued = False  # has an entry in the eviction heap

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the tree has of a token run. A snapshot: valid until the tree changes.

    `pages` are the whole pages; `tail_page` has the slots of the remaining num_tokens % page_size tokens
    (null page if there are none); it must be copied before another sequence writes behind them.
    """

    num_tokens: int
    pages: array[int]
    tail_page: int
    node: Node | None  # the deepest node that the match touches; None: nothing was looked up
    lost_to_window: int = 0  # tokens more that the tree has, but not what windowed layers need after them
    lost_pages: tuple[int, ...] = ()  # the whole pages that would have been needed, as far as they are lost


NO_MATCH = PrefixMatch(0, array("i"), NULL_PAGE, None)


def common_length(edge: array[int], tokens: array[int], start: int, limit: int) -> int:
    """How many tokens of `edge` equal tokens[start:limit]. Gallops by slices, which compare at memory speed."""
    size = min(len(edge), limit - start)
    low, stride = 0, 16
    while low < size:
        high = min(low + stride, size)
        if edge[low:high] != tokens[start + low : start + high]:
            break
        low, stride = high, stride * 4
    else:
        return size
    while high - low > 1:  # edge[:low] is equal, edge[low:high] is not
        middle = (low + high) // 2
        if edge[low:middle] == tokens[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low


class RadixCache:
    """Prefix tree over a PagePool. Namespaces (cache salts, adapters) never see each other's tokens."""

    def __init__(self, pool: TreePages, page_size: int, policy: EvictionPolicy = lru) -> None:
        self._pool = pool
        self._page_size = page_size
        self._rank = policy
        self.watch: TreeWatch | None = None  # told of what comes and goes
        self._roots: dict[Namespace, Node] = {}
        self._heap: list[tuple[Rank, int, Node]] = []  # (rank when queued, tie-break, node)
        self._clock = 0
        self._pushes = 0

    def match_prefix(self, tokens: array[int], namespace: Namespace, limit: int) -> PrefixMatch:
        """The longest known prefix of tokens[:limit]. Changes nothing. Time: O(length matched)."""
        root = self._roots.get(namespace)
        if root is None:
            return NO_MATCH
        node, length, pages = self._walk(root, tokens, min(limit, len(tokens)))
        tail = self._page_of(node, length // self._page_size) if length % self._page_size else NULL_PAGE
        return PrefixMatch(length, pages, tail, node)

    def insert(
        self, after: Node, tokens: array[int], page_table: array[int], end: int, priority: int = 0
    ) -> tuple[Node, array[int]]:
        """Makes the tree hold tokens[:end], whose KV is in `page_table`; adds only what it lacks.

        `after` is a root or ends at a page boundary, covers tokens[: after.end], and is locked by the caller.
        `priority` is that of the request which computed them.
        Returns the deepest node that covers position end - 1, and the whole pages behind after.end that the
        tree already had for these tokens.
        """
        node, position, known = self._walk(after, tokens, end)
        # Cut where something branches off, or where the caller's lock will end. Else the node may go on behind `end`.
        if position < node.end and (position < end or end % self._page_size == 0):
            node = self._split(node, position)
        if position < end:
            # An edge can grow while nobody else has a lock that ends at it; locked ends stay at page boundaries.
            private = node.lock_count == 0 or (node is after and node.lock_count == 1 and end % self._page_size == 0)
            # What is added has not been hit, and is as urgent as this request.
            same_use = node.hits == 0 and node.priority >= priority
            if private and same_use and not node.children and node.parent is not None:
                self._grow(node, tokens, page_table, end)
            else:
                node = self._add_leaf(node, tokens, page_table, end)
            if self.watch is not None:
                whole = position // self._page_size
                before = known[-1] if known else page_table[whole - 1] if whole else NULL_PAGE
                self.watch.stored(node.namespace, tokens, page_table, position, end, before)
        self.touch(node)
        if node.priority > priority:
            self._raise_priority(node, priority)
        self._queue_if_evictable(node)
        return node, known

    def node_at(self, node: Node, position: int) -> Node:
        """The ancestor-or-self of `node` that ends at `position`, split off if need be."""
        while node.parent is not None and node.start >= position:
            node = node.parent
        return self._split(node, position) if node.end > position else node

    def root(self, namespace: Namespace) -> Node:
        """The root of a namespace, made on demand. Lock it: an unlocked root without children goes away."""
        if namespace not in self._roots:
            self._roots[namespace] = Node(namespace, None, 0, array("i"), array("i"))
        return self._roots[namespace]

    def lock(self, node: Node) -> None:
        """Keeps the path to `node` (a root, or ending at a page boundary) from eviction."""
        self.move_lock(None, node)

    def move_lock(self, old: Node | None, new: Node) -> None:
        """Moves a lock from `old` to `new`, which is `old` or below it."""
        step: Node | None = new
        while step is not old:
            assert step is not None
            step.lock_count += 1
            step = step.parent

    def unlock(self, node: Node) -> None:
        self.touch(node)
        step: Node | None = node
        while step is not None:
            step.lock_count -= 1
            self._queue_if_evictable(step)
            step = step.parent

    def touch(self, node: Node) -> None:
        """Marks the path to `node` as used now."""
        self._clock += 1
        step: Node | None = node
        while step is not None:
            step.last_used = self._clock
            step = step.parent

    def count_hit(self, node: Node, priority: int) -> None:
        """Notes that a request of `priority` starts from the path to `node`."""
        step: Node | None = node
        while step is not None:
            step.hits += 1
            step = step.parent
        self._raise_priority(node, priority)

    def evict(self, num_pages: int) -> int:
        """Frees `num_pages` pages, or all that can be, from the ends of the unlocked leaves that rank lowest.

        Returns the number of pages freed. Amortised O(log nodes) for each leaf cut: a heap entry that is no
        longer true is dropped or renewed when it comes up.
        """
        freed = 0
        while freed < num_pages and self._heap:
            rank, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.children or node.lock_count:
                continue  # queued again once it is an unlocked leaf
            if rank != self._rank(node):  # used since it was queued
                self._queue_if_evictable(node)
                continue
            freed += self._shorten(node, num_pages - freed)
        return freed

    def namespaces(self) -> list[Namespace]:
        return list(self._roots)

    def roots(self) -> list[Node]:
        return list(self._roots.values())

    def nodes(self) -> Iterator[Node]:
        """Every node, parents first."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _walk(self, node: Node, tokens: array[int], limit: int) -> tuple[Node, int, array[int]]:
        """Follows tokens[node.end:limit] down: deepest node touched, end of the match, whole pages behind node.end."""
        position = node.end
        first_page = position // self._page_size
        pages = array("i")
        while position < limit:
            child = node.children.get(tokens[position])
            if child is None:
                break
            node = child
            pages.extend(node.pages)
            position += common_length(node.tokens, tokens, position, limit)
            if position < node.end:
                break
        del pages[position // self._page_size - first_page :]  # one in which the match ends is not whole
        return node, position, pages

    def _page_of(self, node: Node, logical: int) -> int:
        """The page of a logical page that `node` touches: its own or, where it ends inside, that of a child."""
        while logical - node.start // self._page_size >= len(node.pages):
            node = next(iter(node.children.values()))
        return node.pages[logical - node.start // self._page_size]

    def _split(self, node: Node, position: int) -> Node:
        """Cuts `node` at `position` and returns the new upper part. The lower part keeps its identity, so that
        handles and locks on it stay right; a page cut in two stays with it."""
        assert node.parent is not None
        cut = position - node.start
        page_cut = position // self._page_size - node.start // self._page_size
        upper = Node(node.namespace, node.parent, node.start, node.tokens[:cut], node.pages[:page_cut])
        upper.lock_count = node.lock_count
        upper.last_used, upper.hits, upper.priority = node.last_used, node.hits, node.priority
        node.parent.children[upper.tokens[0]] = upper
        node.parent = upper
        node.start = position
        del node.tokens[:cut]
        del node.pages[:page_cut]
        upper.children[node.tokens[0]] = node
        return upper

    def _grow(self, leaf: Node, tokens: array[int], page_table: array[int], end: int) -> None:
        """Lengthens a leaf to `end`. Its last page, if partly filled, gives way to the table's, which has more."""
        begin = leaf.end
        self._drop_tail(leaf)
        leaf.tokens.extend(tokens[begin:end])
        self._append_pages(leaf, page_table, begin, end)

    def _add_leaf(self, parent: Node, tokens: array[int], page_table: array[int], end: int) -> Node:
        begin = parent.end
        leaf = Node(parent.namespace, parent, begin, tokens[begin:end], array("i"))
        self._append_pages(leaf, page_table, begin, end)
        if not parent.children:
            self._drop_tail(parent)
        parent.children[leaf.tokens[0]] = leaf
        return leaf

    def _append_pages(self, node: Node, page_table: array[int], begin: int, end: int) -> None:
        new = page_table[begin // self._page_size : (end - 1) // self._page_size + 1]
        for page in new:
            self._pool.add_tree_ref(page)
        node.pages.extend(new)

    def _drop_tail(self, leaf: Node) -> None:
        if leaf.end % self._page_size:
            self._pool.drop_tree_ref(leaf.pages.pop())

    def _shorten(self, leaf: Node, num_pages: int) -> int:
        """Cuts pages off the end of an unlocked leaf until `num_pages` became free or the leaf is gone. Returns how
        many became free: fewer than were cut where tables still hold them, or the parent takes the first one over."""
        kept, freed = len(leaf.pages), 0
        while kept > 1 and freed < num_pages:
            kept -= 1
            freed += self._pool.drop_tree_ref(leaf.pages[kept])
        if freed < num_pages:
            kept = 0
        end = max(leaf.start, (leaf.start // self._page_size + kept) * self._page_size)
        if self.watch is not None:
            self.watch.cut(leaf, end, leaf.pages[kept:])
        if kept:
            del leaf.pages[kept:], leaf.tokens[end - leaf.start :]
            self._queue_if_evictable(leaf)
            return freed
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.tokens[0]]
        if not parent.children and parent.end % self._page_size:
            parent.pages.append(leaf.pages[0])
        else:
            freed += self._pool.drop_tree_ref(leaf.pages[0])
        self._queue_if_evictable(parent)
        return freed

    def _raise_priority(self, node: Node, priority: int) -> None:
        while node.priority > priority:  # a parent is at least as urgent as its children, a root more than all
            node.priority = priority
            assert node.parent is not None
            node = node.parent

    def _queue_if_evictable(self, node: Node) -> None:
        if node.children or node.lock_count or node.queued:
            return
        if node.parent is None:
            self._roots.pop(node.namespace, None)
            return
        node.queued = True
        self._pushes += 1
        heapq.heappush(self._heap, (self._rank(node), self._pushes, node))
