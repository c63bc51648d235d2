"""The index of a router: what it must believe to be cached, from events alone."""

from __future__ import annotations

from collections.abc import Iterable

from pinnate.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from pinnate.kvcache.manager import KVCacheManager
from pinnate.kvcache.page_hashes import namespace_label
from tests.property.test_cache_explanations import pages_in_tree

Prefix = tuple[str, tuple[int, ...]]  # label of the namespace, tokens from the first on


class KVIndex:
    """Strict: an event that does not fit what is known is an error."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, str, tuple[int, ...]]] = {}

    def apply(self, events: Iterable[KVEvent]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    for value in event.block_hashes:
                        del self.blocks[value]
                case AllBlocksCleared():
                    self.blocks.clear()

    def _store(self, event: BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert parent is None or parent in self.blocks
        for number, value in enumerate(event.block_hashes):
            assert 0 <= value < 2**64
            assert value not in self.blocks
            label = event.extra_keys[number][0] if event.extra_keys else ""
            self.blocks[value] = parent, label, tuple(event.token_ids[number * size : (number + 1) * size])
            parent = value

    def prefixes(self) -> set[Prefix]:
        return {self._prefix(value) for value in self.blocks}

    def _prefix(self, value: int) -> Prefix:
        tokens: tuple[int, ...] = ()
        step: int | None = value
        while step is not None:
            step, label, own = self.blocks[step]
            tokens = own + tokens
        return label, tokens


def prefixes_in_tree(cache: KVCacheManager) -> set[Prefix]:
    """What a router should know: every whole page of the tree, by the tokens up to its end."""
    return {(namespace_label(namespace), tokens) for namespace, tokens in pages_in_tree(cache).values()}
