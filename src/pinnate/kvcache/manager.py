"""KVCacheManager: the KV memory as the scheduler sees it.

Knows: sequences' page tables, the pool and the prefix tree, and keeps the three consistent. Must not know:
why a sequence runs, waits or ends, or how many bytes a page has.

Life of a sequence: match (look), adopt (take the cached prefix), then allocate before each step and commit
after it, fork for further choices, release at the end or on preemption. `Sequence.page_table` is written
here only; `Sequence.num_computed_tokens` is only read here.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from pinnate.core.layer_groups import PageNeeds
from pinnate.core.request import Sequence
from pinnate.kvcache import integrity
from pinnate.kvcache.eviction import EVICTION_POLICIES
from pinnate.kvcache.page_hashes import TreeWatch
from pinnate.kvcache.page_pool import PagePool
from pinnate.kvcache.radix_cache import NO_MATCH, Node, PrefixMatch, RadixCache
from pinnate.kvcache.tiers.lower import LowerTiers, NoTiers
from pinnate.kvcache.window_pages import WindowPages


@dataclass(slots=True, eq=False)
class Lease:
    """What a sequence holds: its page table, and a lock on the deepest page boundary that it has in the tree."""

    seq: Sequence
    node: Node | None  # None: prefix caching is off


class KVCacheManager:
    """Gives pages to sequences, shares equal prefixes, and evicts what nobody uses.

    No two sequences ever write slots of the same page: a page that several tables share is copied by whoever
    writes to it first, and a match that ends inside a cached page gets a copy. The tree may refer to a partly
    filled page that its owner still writes to, since the tree reads only the slots filled so far.

    `needs` says what a sequence takes of a model with windowed layer groups; whatever is done to a page of a table is
    then done to the window pages beside it (WindowPages). Without windowed groups there are none.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        enable_prefix_caching: bool = True,
        eviction_policy: str = "lru",
        pinnable_pages: int = 0,
        watch: TreeWatch | None = None,
        needs: PageNeeds | None = None,
    ) -> None:
        """`pinnable_pages` of the pool may be pinned for good: no request is promised them. `watch` is told of what
        enters and leaves the prefix tree."""
        self.page_size = page_size
        self.needs = needs or PageNeeds(page_size=page_size)
        self.enable_prefix_caching = enable_prefix_caching
        self.pinnable_pages = pinnable_pages
        self.evicted_pages = 0  # lifetime counter
        self.tiers: LowerTiers = NoTiers()  # below the pool; whoever builds them sets it once
        self._pool = PagePool(num_pages)
        self._windows: WindowPages | None = None
        if self.needs.window_groups:
            self._windows = WindowPages(self._pool, self.needs, self._take, self._take_copy)
        self._tree = RadixCache(self._windows or self._pool, page_size, EVICTION_POLICIES[eviction_policy])
        self._tree.watch = watch
        self._leases: dict[int, Lease] = {}  # by seq_id
        self._copies: list[tuple[int, int]] = []  # (source, target), not yet handed to a step
        self._held: list[int] = []  # sources of copies of the step under way

    @property
    def tree(self) -> RadixCache:
        """For those who explain it: they only read it."""
        return self._tree

    @property
    def pool(self) -> PagePool:
        """For those who explain it: they only read it."""
        return self._pool

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def num_request_pages(self) -> int:
        """Pages that one request can count on when it is alone."""
        return self._pool.num_pages - self.pinnable_pages

    @property
    def num_free_pages(self) -> int:
        return self._pool.num_free

    @property
    def num_cached_pages(self) -> int:
        """Pages held by the prefix tree alone: evictable."""
        return self._pool.num_evictable

    @property
    def num_available_pages(self) -> int:
        """Free and evictable pages."""
        return self._pool.num_available

    def pages_for(self, num_tokens: int) -> int:
        """Logical pages."""
        return -(-num_tokens // self.page_size)

    def pages_held(self, seq: Sequence) -> int:
        """Pages of all its tables; a page counts for each sequence that shares it."""
        return len(seq.page_table) + (self._windows.count_held(seq) if self._windows else 0)

    def pages_matched(self, match: PrefixMatch) -> int:
        """Pages that a sequence has at once if it adopts the match, its tail aside."""
        return len(match.pages) + (self._windows.count(match) if self._windows else 0)

    def match(self, seq: Sequence, limit: int) -> PrefixMatch:
        """The longest cached prefix of the sequence's first `limit` tokens. Changes nothing."""
        if not self.enable_prefix_caching or limit <= 0:
            return NO_MATCH
        match = self._tree.match_prefix(seq.token_ids, seq.request.namespace, limit)
        return self._windows.usable(match) if self._windows else match

    def num_idle_pages(self, match: PrefixMatch) -> int:
        """Pages of the match that count as available now and no longer will once it is adopted."""
        in_use, holds = self._pool.seq_refs, self._pool.holds
        idle = sum(1 for page in match.pages if not in_use[page] and not holds[page])
        return idle + (self._windows.count_idle(match) if self._windows else 0)

    def adopt(self, seq: Sequence, match: PrefixMatch, *, count_hit: bool = True) -> int:
        """Starts a sequence that has no pages with a fresh match of its own; returns how many tokens it has now.

        A match that ends inside a page gives it a copy of that page. For one step this takes a page more than
        the tokens need; where that one is lacking, the tail is left to be computed again.
        """
        assert seq.seq_id not in self._leases
        for page in match.pages:
            self._pool.add_seq_ref(page)
        seq.page_table = match.pages[:]
        if self._windows:
            self._windows.adopt(seq, match)
        whole = len(match.pages) * self.page_size
        node = None
        if self.enable_prefix_caching:
            deepest = match.node or self._tree.root(seq.request.namespace)
            node = self._tree.node_at(deepest, whole)
            used = deepest if match.num_tokens > whole else node
            self._tree.touch(used)
            if count_hit:
                self._tree.count_hit(used, seq.request.priority)
            self._tree.lock(node)
        self._leases[seq.seq_id] = Lease(seq, node)
        if match.num_tokens == whole:
            return whole
        beside = self._windows.tail(match) if self._windows else ()
        self._hold(match.tail_page, *beside)
        if self._pool.num_available < self.needs.peak(seq.num_tokens) - self.pages_held(seq):
            self._unhold_last(1 + len(beside))
            return whole
        if self._windows:
            self._windows.append_copies(seq, beside)
        seq.page_table.append(self._take_copy(match.tail_page))
        return match.num_tokens

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Makes the next `num_tokens` positions writable, evicting cached pages as needed.

        False, and nothing changed, if there are not enough pages (but what fell out of the window is given up).
        """
        start = seq.num_computed_tokens
        table = seq.page_table
        needed = (start + num_tokens - 1) // self.page_size + 1 - len(table)
        first = start // self.page_size
        shared = first < len(table) and self._pool.seq_refs[table[first]] > 1
        if needed + shared == 0:
            return True
        windows = self._windows
        if windows:
            windows.slide(seq, first)
        if (needed + shared) * (1 + self.needs.window_groups) > self._pool.num_available:
            return False
        if shared:
            source = table[first]
            self._hold(source, *(windows.pages_at(seq, first) if windows else ()))
            if windows:
                windows.replace_by_copies(seq, first)
            table[first] = self._take_copy(source)
            self._pool.drop_seq_ref(source)
        for _ in range(needed):
            if windows:
                windows.append(seq)
            table.append(self._take())
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Gives `child` all pages of `parent`, of which it must have the computed tokens. No copy is made yet."""
        node = self._leases[parent.seq_id].node
        for page in parent.page_table:
            self._pool.add_seq_ref(page)
        child.page_table = parent.page_table[:]
        if self._windows:
            self._windows.fork(parent, child)
        if node is not None:
            self._tree.lock(node)
        self._leases[child.seq_id] = Lease(child, node)

    def commit(self, seq: Sequence) -> None:
        """Enters the computed tokens into the tree. Where the tree already has a whole page of the same tokens,
        the table takes that one (the bytes are equal, see executor.base) and the sequence's own goes."""
        lease = self._leases[seq.seq_id]
        if lease.node is None:
            return
        computed = seq.num_computed_tokens
        whole = computed - computed % self.page_size
        if whole > lease.node.end:
            lease.node = self._commit_pages(seq, lease.node, whole)
        if computed > whole:
            self._tree.insert(lease.node, seq.token_ids, seq.page_table, computed, seq.request.priority)
            if self._windows:
                self._windows.attach(seq, whole // self.page_size, whole // self.page_size + 1)

    def release(self, seq: Sequence, *, keep: bool = True) -> None:
        """Takes all pages from a sequence (it ended or was preempted). What it computed stays cached while there
        is room; `keep=False` forgets what was not committed (its last step did not run to the end)."""
        if keep:
            self.commit(seq)
        lease = self._leases.pop(seq.seq_id)
        if self._windows:
            self._windows.release(seq)
        for page in seq.page_table:
            self._pool.drop_seq_ref(page)
        seq.page_table = array("i")
        if lease.node is not None:
            self._tree.unlock(lease.node)

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """The copies to run before the coming step. Their sources stay valid until `end_step`."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def end_step(self) -> None:
        """The step's copies have run, or never will."""
        for page in self._held:
            self._pool.unhold(page)
        self._held.clear()

    def flush(self) -> int:
        """Drops all cached pages that no sequence uses; returns how many."""
        return self._evict(self.num_pages)

    def check_integrity(self) -> None:
        """Proves the conservation of pages. Raises IntegrityError with the facts. Time: O(pages + cached tokens)."""
        holders = [(lease.seq, lease.node) for lease in self._leases.values()]
        integrity.check(self._pool, self._tree, self.page_size, holders, self._held, self._windows)

    def _commit_pages(self, seq: Sequence, locked: Node, whole: int) -> Node:
        first = locked.end // self.page_size
        node, known = self._tree.insert(locked, seq.token_ids, seq.page_table, whole, seq.request.priority)
        for logical, page in enumerate(known, first):
            own = seq.page_table[logical]
            if page != own:
                self._pool.add_seq_ref(page)
                self._pool.drop_seq_ref(own)
                seq.page_table[logical] = page
        if self._windows:
            self._windows.attach(seq, first, whole // self.page_size)
        target = self._tree.node_at(node, whole)
        self._tree.move_lock(locked, target)
        return target

    def _take(self) -> int:
        if not self._pool.num_free:
            self.evicted_pages += self._evict(1)
        return self._pool.take()

    def _evict(self, num_pages: int) -> int:
        """Window pages that sequences slid past go first, those that are left on pages in use last."""
        if self._windows is None:
            return self._tree.evict(num_pages)
        freed = self._windows.evict_passed(num_pages)
        if freed < num_pages:
            freed += self._tree.evict(num_pages - freed)
        return freed if freed >= num_pages else freed + self._windows.evict_kept(num_pages - freed)

    def _hold(self, *pages: int) -> None:
        """Keeps sources of copies until the end of the step."""
        for page in pages:
            self._pool.hold(page)
        self._held += pages

    def _unhold_last(self, count: int) -> None:
        for page in self._held[-count:]:
            self._pool.unhold(page)
        del self._held[-count:]

    def _take_copy(self, source: int) -> int:
        """A page that will hold a copy of `source`, which the caller has put on hold."""
        page = self._take()
        self._copies.append((source, page))
        return page
