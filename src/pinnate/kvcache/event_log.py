"""What the prefix tree gained and lost since it was last asked: the material of KV events.

Knows: pages stored and removed, in order. Must not know: the format of events, sockets. A HashListener.
"""

from __future__ import annotations

from pinnate.kvcache.explain import path_tokens
from pinnate.kvcache.page_hashes import PageHashes, StoredPages
from pinnate.kvcache.page_pool import NULL_PAGE
from pinnate.kvcache.radix_cache import Node, RadixCache


class RemovedPages(list[int]):
    """Hashes of pages that are gone."""


class Cleared:
    """The tree became empty."""


Change = StoredPages | RemovedPages | Cleared


class EventLog:
    """Filled by the tree, emptied by `take` between steps."""

    def __init__(self) -> None:
        self._changes: list[Change] = []

    def stored(self, pages: StoredPages) -> None:
        self._changes.append(pages)

    def removed(self, leaf: Node, position: int, hashes: list[int], boundary: int) -> None:  # noqa: ARG002
        if hashes:
            self._changes.append(RemovedPages(hashes))

    def take(self, hashes: PageHashes) -> list[Change]:
        """The changes since the last call. Where they leave no page at all, that is all there is to say."""
        if not self._changes:
            return self._changes
        changes, self._changes = self._changes, []
        return changes if len(hashes) else [Cleared()]


def snapshot(tree: RadixCache, hashes: PageHashes, page_size: int) -> list[Change]:
    """Changes that lead from nothing to the tree as it is. Time: O(tokens in the tree)."""
    changes: list[Change] = [Cleared()]
    for node in tree.nodes():  # parents first
        first, last = node.start // page_size, node.end // page_size
        if node.parent is None or first == last:
            continue
        before = hashes.page_before(node, first)
        parent = None if before == NULL_PAGE else hashes.of(before, node.namespace)
        tokens = path_tokens(node, first * page_size, last * page_size)
        own = [hashes.of(page, node.namespace) for page in node.pages[: last - first]]
        changes.append(StoredPages(node.namespace, parent, own, tokens))
    return changes
