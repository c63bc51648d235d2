"""PagePool: the free list and the reference counts of KV pages.

Knows: who refers to a page (sequences' tables, nodes of the prefix tree, copies of the step under way). Must
not know: tokens, the tree's shape, the content of a page.
"""

from __future__ import annotations

from typing import Protocol

NULL_PAGE = 0


class TreePages(Protocol):
    """What the prefix tree needs of a pool."""

    def add_tree_ref(self, page: int) -> None: ...

    def drop_tree_ref(self, page: int) -> int:
        """Returns how many pages became free."""
        ...


class PagePool:
    """Pages 1..num_pages; page 0 is null and never handed out.

    A page is *in use* while a table or a pending copy refers to it. Every other page is free or held by the
    prefix tree alone. Locked tree nodes hold only pages of their sequences' tables (see RadixCache), so the
    tree-only pages are exactly those that evicting every unlocked node would free.
    """

    __slots__ = ("_free", "holds", "num_in_use", "num_pages", "seq_refs", "tree_refs")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_in_use = 0
        self.seq_refs = [0] * (num_pages + 1)  # references by page tables
        self.tree_refs = [0] * (num_pages + 1)  # references by tree nodes
        self.holds = [0] * (num_pages + 1)  # references by copies that have not run yet
        self._free = list(range(num_pages, 0, -1))  # a stack, so that warm pages are used again first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        """Pages held by the prefix tree alone."""
        return self.num_pages - self.num_in_use - len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that can be had: free now, or after eviction."""
        return self.num_pages - self.num_in_use

    def free_pages(self) -> list[int]:
        return list(self._free)

    def take(self) -> int:
        """Hands out a free page with one table reference. Raises IndexError if none is free: evict first."""
        page = self._free.pop()
        self.seq_refs[page] = 1
        self.num_in_use += 1
        return page

    def add_seq_ref(self, page: int) -> None:
        if self.seq_refs[page] == 0 and self.holds[page] == 0:
            self.num_in_use += 1
        self.seq_refs[page] += 1

    def drop_seq_ref(self, page: int) -> None:
        self.seq_refs[page] -= 1
        if self.seq_refs[page] == 0 and self.holds[page] == 0:
            self._leave_use(page)

    def hold(self, page: int) -> None:
        """Keeps the source of a copy alive until the copy has run."""
        if self.seq_refs[page] == 0 and self.holds[page] == 0:
            self.num_in_use += 1
        self.holds[page] += 1

    def unhold(self, page: int) -> None:
        self.holds[page] -= 1
        if self.seq_refs[page] == 0 and self.holds[page] == 0:
            self._leave_use(page)

    def add_tree_ref(self, page: int) -> None:
        self.tree_refs[page] += 1

    def drop_tree_ref(self, page: int) -> bool:
        """Returns whether the page became free."""
        self.tree_refs[page] -= 1
        if self.tree_refs[page] or self.seq_refs[page] or self.holds[page]:
            return False
        self._free.append(page)
        return True

    def _leave_use(self, page: int) -> None:
        self.num_in_use -= 1
        if self.tree_refs[page] == 0:
            self._free.append(page)
