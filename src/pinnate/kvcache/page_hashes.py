"""Names for cached pages: a hash of everything from a sequence's first token to the page's last.

Knows: the whole pages in the prefix tree and their hashes. Must not know: what the hashes are for.
Exists only where somebody listens (KV events, cache reports); without it the tree tells nobody anything.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pinnate.core.request import Namespace
from pinnate.kvcache.page_pool import NULL_PAGE

if TYPE_CHECKING:
    from pinnate.kvcache.radix_cache import Node

HASH_BYTES = 8


class StoredPages(NamedTuple):
    """Consecutive whole pages, new in the tree. `parent` is the hash of the page before them, None at the beginning."""

    namespace: Namespace
    parent: int | None
    hashes: list[int]
    tokens: array[int]


class TreeWatch(Protocol):
    """Whoever the prefix tree tells of what comes and goes (RadixCache.watch). Called in the engine's thread: it must
    be quick."""

    def stored(
        self, namespace: Namespace, tokens: array[int], page_table: array[int], begin: int, end: int, parent_page: int
    ) -> None:
        """The tree took in tokens[begin:end], which are in the pages of `page_table`. `parent_page` is the tree's page
        before the one of position `begin`."""
        ...

    def cut(self, leaf: Node, position: int, pages: array[int]) -> None:
        """The tree is about to take tokens from `position` on off a leaf, in `pages`. Their content is still there."""
        ...


class Watches:
    """Several as one."""

    def __init__(self, watches: Iterable[TreeWatch]) -> None:
        self._watches = tuple(watches)

    def stored(
        self, namespace: Namespace, tokens: array[int], page_table: array[int], begin: int, end: int, parent_page: int
    ) -> None:
        for watch in self._watches:
            watch.stored(namespace, tokens, page_table, begin, end, parent_page)

    def cut(self, leaf: Node, position: int, pages: array[int]) -> None:
        for watch in self._watches:
            watch.cut(leaf, position, pages)


class HashListener(Protocol):
    def stored(self, pages: StoredPages) -> None: ...

    def removed(self, leaf: Node, position: int, hashes: list[int], boundary: int) -> None:
        """`leaf` is about to lose its tokens from `position` on, and with them the whole pages of `hashes`. `boundary`
        is the hash of its path up to the page boundary at or before `position`."""
        ...


def root_hash(namespace: Namespace) -> int:
    """The hash of no tokens. A salt cannot be told from it other than by guessing."""
    adapter, salt = (part.encode() for part in namespace)
    return _digest(len(adapter).to_bytes(8, "big") + adapter + salt)


def namespace_label(namespace: Namespace) -> str:
    """Empty for requests without salt and adapter, else a hash."""
    return f"{root_hash(namespace):016x}" if any(namespace) else ""


def page_hash(before: int, tokens: array[int]) -> int:
    """Of one page, given the hash of all that is before it. Also of a part of a page, which no whole page equals."""
    return _digest(before.to_bytes(HASH_BYTES, "big") + tokens.tobytes())


class PageHashes:
    """A TreeWatch. A listener is called in the engine's thread: it must be quick."""

    def __init__(self, page_size: int, listeners: Iterable[HashListener] = ()) -> None:
        self._page_size = page_size
        self._listeners = tuple(listeners)
        self._hashes: dict[int, int] = {}  # by page

    def __len__(self) -> int:
        return len(self._hashes)

    def of(self, page: int, namespace: Namespace) -> int:
        """The hash up to the end of a whole page of the tree; of the null page, that of no tokens."""
        return root_hash(namespace) if page == NULL_PAGE else self._hashes[page]

    def stored(
        self, namespace: Namespace, tokens: array[int], page_table: array[int], begin: int, end: int, parent_page: int
    ) -> None:
        """As TreeWatch."""
        size = self._page_size
        first, last = begin // size, end // size
        if first == last:
            return
        before = self.of(parent_page, namespace)
        parent = None if parent_page == NULL_PAGE else before
        hashes = []
        for logical in range(first, last):
            before = page_hash(before, tokens[logical * size : (logical + 1) * size])
            self._hashes[page_table[logical]] = before
            hashes.append(before)
        stored = StoredPages(namespace, parent, hashes, tokens[first * size : last * size])
        for listener in self._listeners:
            listener.stored(stored)

    def cut(self, leaf: Node, position: int, pages: array[int]) -> None:
        """As TreeWatch."""
        removed = [self._hashes.pop(page) for page in pages if page in self._hashes]
        boundary = self.of(self.page_before(leaf, position // self._page_size), leaf.namespace)
        for listener in self._listeners:
            listener.removed(leaf, position, removed, boundary)

    def page_before(self, node: Node, logical: int) -> int:
        """The page before logical page `logical` on the path to `node`; the null page before the first one."""
        size = self._page_size
        step = node
        while step.parent is not None and step.start // size > logical - 1:
            step = step.parent
        return NULL_PAGE if step.parent is None else step.pages[logical - 1 - step.start // size]


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=HASH_BYTES).digest(), "big")
