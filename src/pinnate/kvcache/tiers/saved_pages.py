"""The prefix tree's whole pages by their keys, and what each of them needs to be saved.

Knows: keys of pages in the tree, stores under way. Must not know: sequences, the cost of anything. A TreeWatch, in the
engine's thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

from pinnate.core.request import Namespace
from pinnate.kvcache.page_pool import NULL_PAGE
from pinnate.kvcache.radix_cache import Node
from pinnate.kvcache.tiers.mover import PageMover, Store
from pinnate.kvcache.tiers.tier import PageName, page_key, root_key


class SavedPages:
    """Sends each new page of the tree to the mover (write-through), and saves what is cut before it was written."""

    def __init__(self, page_size: int, mover: PageMover, worth_keeping: Callable[[], bool]) -> None:
        self._page_size = page_size
        self._mover = mover
        self._worth_keeping = worth_keeping
        self._stores: dict[int, Store] = {}  # of each whole page in the tree, done or not
        self._discarding = False

    def key_of(self, page: int, namespace: Namespace) -> bytes:
        """Up to the end of a whole page of the tree; of the null page, the key of no tokens."""
        return root_key(namespace) if page == NULL_PAGE else self._stores[page].name.key

    def stored(
        self, namespace: Namespace, tokens: array[int], page_table: array[int], begin: int, end: int, parent_page: int
    ) -> None:
        size = self._page_size
        first, last = begin // size, end // size
        if first == last:
            return
        key, keep = self.key_of(parent_page, namespace), self._worth_keeping()
        for logical in range(first, last):
            own = tokens[logical * size : (logical + 1) * size]
            name = PageName(page_key(key, own), key, own)
            key = name.key
            job = self._stores[page_table[logical]] = Store(page_table[logical], name)
            job.done = self._mover.has(key)
            if keep and not job.done:
                self._mover.store(job)
            else:
                job.dropped = not job.done

    def cut(self, leaf: Node, position: int, pages: array[int]) -> None:  # noqa: ARG002
        """Whatever was not written yet is copied while it is still there."""
        for page in pages:
            job = self._stores.pop(page, None)
            if job is None:
                continue
            wanted = not (job.done or job.dropped or self._discarding)
            job.dropped = True  # before anybody can write into the page; it may be queued, even twice
            if wanted:
                self._mover.stage(job)

    def save(self, pages: Iterable[int]) -> None:
        """Stores these whole pages of the tree before all others."""
        for page in pages:
            job = self._stores.get(page)
            if job is not None and not job.done:
                job.dropped = False
                self._mover.store(job, urgent=True)

    def discard_while(self, action: Callable[[], int]) -> int:
        """Runs `action`; what it cuts is not saved."""
        self._discarding = True
        try:
            return action()
        finally:
            self._discarding = False
