"""WindowPages: the pages of windowed layer groups, beside those of full attention (docs/design/003-hybrid-models.md).

Knows: sequences' window tables, and which window pages lie beside a full page of the prefix tree ("attached"). Must not
know: the tree's shape, steps. All windowed groups move in lockstep: a logical page has one page of each, or none.

References are those of the one PagePool: a window table counts as a table, an attachment as the tree. So a window
page is in use while a sequence has it in its window, evictable while it is attached only, and else free.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace

from pinnate.core.layer_groups import PageNeeds
from pinnate.core.request import Sequence
from pinnate.kvcache.page_pool import NULL_PAGE, PagePool
from pinnate.kvcache.radix_cache import PrefixMatch

Pages = tuple[int, ...]  # one of each windowed group


class WindowPages:
    """Implements `TreePages` for the tree: a full page that leaves the tree takes what is attached with it.

    Attached pages that no sequence needs wait for eviction in one of two queues, oldest first, by their full page.
    Those in `_passed`, which running sequences slid past, serve only a prompt that branches off just there: they go
    first. In `_kept` are the last windows of sequences that were released, and those where prompts do branch off:
    they go with their full pages, or when there is nothing else.
    """

    def __init__(self, pool: PagePool, needs: PageNeeds, take: Callable[[], int], copy: Callable[[int], int]) -> None:
        """`take` gives a page, evicting if need be; `copy` gives one that will hold a copy of the page it is given."""
        self._pool = pool
        self._page_size = needs.page_size
        self._reach = needs.window_pages - 1
        self._num_groups = needs.window_groups
        self._take = take
        self._copy = copy
        self.first: dict[int, int] = {}  # by seq_id: the first logical page that its window tables have
        self.attached: dict[int, Pages] = {}  # by full page
        self._passed: dict[int, None] = {}
        self._kept: dict[int, None] = {}
        self._branches: set[int] = set()  # full pages whose attachment a branching match used, or lacked

    # ------------------------------------------------------------------ of the tree

    def add_tree_ref(self, page: int) -> None:
        self._pool.add_tree_ref(page)

    def drop_tree_ref(self, page: int) -> int:
        """Returns how many pages became free."""
        freed = int(self._pool.drop_tree_ref(page))
        if self._pool.tree_refs[page]:
            return freed
        self._branches.discard(page)
        return freed + self._detach(page)

    # ------------------------------------------------------------------ matches

    def usable(self, match: PrefixMatch) -> PrefixMatch:
        """The match, or the part of it after which a sequence finds its window. Time: O(pages matched)."""
        pages, attached = match.pages, self.attached
        end = len(pages)
        while (gap := self._last_gap(pages, end)) is not None:
            end = gap
        if end == len(pages) and (match.tail_page == NULL_PAGE or match.tail_page in attached):
            return match
        kept = end * self._page_size
        return replace(
            match,
            num_tokens=kept,
            pages=pages[:end],
            tail_page=NULL_PAGE,
            lost_to_window=match.num_tokens - kept,
            lost_pages=tuple(pages[max(end, len(pages) - self._reach) :]),
        )

    def _last_gap(self, pages: array[int], end: int) -> int | None:
        """The last of the logical pages in the window before page `end` that has no attachment."""
        for logical in range(end - 1, max(0, end - self._reach) - 1, -1):
            if pages[logical] not in self.attached:
                return logical
        return None

    def count(self, match: PrefixMatch) -> int:
        """Window pages that the match brings along."""
        return self._num_groups * min(len(match.pages), self._reach)

    def count_idle(self, match: PrefixMatch) -> int:
        """Those of them that count as available now and no longer will once the match is adopted."""
        needed = [self.attached[page][0] for page in match.pages[-self._reach :]] if self._reach else []
        refs, holds = self._pool.seq_refs, self._pool.holds
        return self._num_groups * sum(1 for page in needed if not refs[page] and not holds[page])

    def count_held(self, seq: Sequence) -> int:
        """Window pages of the sequence's tables."""
        return self._num_groups * (len(seq.page_table) - self.first.get(seq.seq_id, 0))

    def tail(self, match: PrefixMatch) -> Pages:
        """The window pages beside the match's tail page."""
        return self.attached[match.tail_page]

    # ------------------------------------------------------------------ sequences

    def adopt(self, seq: Sequence, match: PrefixMatch) -> None:
        """Window tables for the whole pages of a usable match."""
        first = max(0, len(match.pages) - self._reach)
        tables = tuple(array("i", [NULL_PAGE]) * first for _ in range(self._num_groups))
        node = match.node
        branches = node is not None and (match.num_tokens < node.end or bool(node.children))
        for page in match.pages[first:]:
            for table, own in zip(tables, self.attached[page], strict=True):
                self._pool.add_seq_ref(own)
                table.append(own)
            self._forget_idle(page)
            if branches:
                self._branches.add(page)
        self._branches.update(match.lost_pages)  # to keep them, once they are computed again
        seq.window_tables = tables
        self.first[seq.seq_id] = first

    def append_copies(self, seq: Sequence, sources: Pages) -> None:
        """The next logical page, as copies of `sources`, which the caller holds."""
        for table, source in zip(seq.window_tables, sources, strict=True):
            table.append(self._copy(source))

    def append(self, seq: Sequence) -> None:
        """The next logical page, empty."""
        for table in seq.window_tables:
            table.append(self._take())

    def slide(self, seq: Sequence, logical: int) -> None:
        """Gives up what no position from logical page `logical` on sees."""
        end = logical - self._reach
        first = self.first[seq.seq_id]
        if first < end:
            self._give_up(seq, first, end, keep=False)
            self.first[seq.seq_id] = end

    def pages_at(self, seq: Sequence, logical: int) -> Pages:
        return tuple(table[logical] for table in seq.window_tables)

    def replace_by_copies(self, seq: Sequence, logical: int) -> None:
        """Copy-on-write of a logical page, whose pages the caller holds."""
        sources = self.pages_at(seq, logical)
        for table, source in zip(seq.window_tables, sources, strict=True):
            table[logical] = self._copy(source)
            self._pool.drop_seq_ref(source)
        self._queue_if_idle(seq.page_table[logical], sources, keep=True)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        first = self.first[child.seq_id] = self.first[parent.seq_id]
        child.window_tables = tuple(table[:] for table in parent.window_tables)
        for table in child.window_tables:
            for page in table[first:]:
                self._pool.add_seq_ref(page)

    def attach(self, seq: Sequence, first: int, end: int) -> None:
        """Logical pages first .. end - 1 have entered the tree, and the sequence's table has the tree's pages: so gets
        the tree the window pages it lacks, and the sequence those that the tree has."""
        for logical in range(max(first, self.first[seq.seq_id]), end):
            page = seq.page_table[logical]
            own, known = self.pages_at(seq, logical), self.attached.get(page)
            if known is None and self._pool.tree_refs[page]:
                self.attached[page] = own
                for window_page in own:
                    self._pool.add_tree_ref(window_page)
            elif known is not None and known != own:
                for table, old, new in zip(seq.window_tables, own, known, strict=True):
                    self._pool.add_seq_ref(new)
                    self._pool.drop_seq_ref(old)
                    table[logical] = new
                self._forget_idle(page)

    def release(self, seq: Sequence) -> None:
        """Before the sequence's page table goes."""
        self._give_up(seq, self.first.pop(seq.seq_id), len(seq.page_table), keep=True)
        seq.window_tables = ()

    def _give_up(self, seq: Sequence, first: int, end: int, *, keep: bool) -> None:
        for logical in range(first, end):
            given_up = self.pages_at(seq, logical)
            for table, page in zip(seq.window_tables, given_up, strict=True):
                self._pool.drop_seq_ref(page)
                table[logical] = NULL_PAGE
            self._queue_if_idle(seq.page_table[logical], given_up, keep)

    # ------------------------------------------------------------------ eviction

    def evict_passed(self, num_pages: int) -> int:
        """Frees `num_pages` pages, or all that can be, of those that sequences slid past. Returns the number."""
        return self._evict(self._passed, num_pages)

    def evict_kept(self, num_pages: int) -> int:
        """The same of the others, where the tree can evict nothing more: on full pages that are in use."""
        return self._evict(self._kept, num_pages)

    def _evict(self, queue: dict[int, None], num_pages: int) -> int:
        freed, holds = 0, self._pool.holds  # a source of a copy has to wait for its step
        while freed < num_pages:
            page = next((page for page in queue if not holds[self.attached[page][0]]), None)
            if page is None:
                break
            freed += self._detach(page)
        return freed

    def _detach(self, page: int) -> int:
        """Returns how many pages became free."""
        self._forget_idle(page)
        return sum(self._pool.drop_tree_ref(window_page) for window_page in self.attached.pop(page, ()))

    def _queue_if_idle(self, page: int, window_pages: Pages, keep: bool) -> None:
        if not self._pool.seq_refs[window_pages[0]] and self.attached.get(page) == window_pages:
            (self._kept if keep or page in self._branches else self._passed)[page] = None

    def _forget_idle(self, page: int) -> None:
        self._passed.pop(page, None)
        self._kept.pop(page, None)

    @property
    def idle(self) -> list[int]:
        """Full pages whose attachments nobody needs, each once."""
        return [*self._passed, *self._kept]
