"""What of the tree is sent to the tier, when, and that no page is ever saved under a name that is no longer its own."""

from __future__ import annotations

from pinnate.kvcache.manager import KVCacheManager
from pinnate.kvcache.page_pool import NULL_PAGE
from pinnate.kvcache.tiers.cost import CostModel
from pinnate.kvcache.tiers.mover import PageMover
from pinnate.kvcache.tiers.saved_pages import SavedPages
from pinnate.kvcache.tiers.tier import root_key
from tests.unit.kvcache.helpers import compute
from tests.unit.kvcache.tiers.helpers import PAGE_BYTES, PAGE_SIZE, MemoryIO, MemoryTier, content, names


class Rig:
    def __init__(self, num_pages: int = 8) -> None:
        self.io, self.tier, self.worth = MemoryIO(), MemoryTier(), True
        self.mover = PageMover(self.io, self.tier, CostModel(), staging_bytes=3 * PAGE_BYTES, threaded=False)
        self.pages = SavedPages(PAGE_SIZE, self.mover, lambda: self.worth)
        self.cache = KVCacheManager(num_pages, PAGE_SIZE, watch=self.pages)
        self.work()

    def work(self) -> None:
        while self.mover.work():
            pass

    def compute(self, num_pages: int, more: int = 0, first: int = 0) -> None:
        compute(self.cache, [first + i // PAGE_SIZE for i in range(num_pages * PAGE_SIZE + more)])

    def evict(self, num_pages: int) -> None:
        """And gives the pages to others, who write into them."""
        self.cache.tree.evict(num_pages)
        for page in self.cache.pool.free_pages():
            self.io.pages[page][:] = content(99)


def test_whole_pages_are_written_under_the_keys_of_their_past() -> None:
    rig = Rig()
    rig.compute(3, more=2)
    assert rig.mover.num_unsaved == 3
    rig.work()
    expected = [name.key for name in names(3)]
    assert list(rig.tier.pages) == expected
    (leaf,) = rig.cache.tree.root(("", "")).children.values()
    assert [rig.pages.key_of(page, ("", "")) for page in leaf.pages[:3]] == expected
    assert rig.pages.key_of(NULL_PAGE, ("", "x")) == root_key(("", "x"))
    rig.compute(4)  # goes on from there
    rig.work()
    assert list(rig.tier.pages) == [name.key for name in names(4)]
    assert rig.mover.num_stored == 4


def test_what_is_evicted_before_its_turn_is_saved_as_far_as_there_is_room() -> None:
    rig = Rig()
    rig.compute(5)
    pages = [bytes(rig.io.pages[page]) for page in next(iter(rig.cache.tree.root(("", "")).children.values())).pages]
    rig.evict(5)
    rig.work()
    kept = [name.key in rig.tier.pages for name in names(5)]
    assert kept.count(True) == 3
    for name, data, there in zip(names(5), pages, kept, strict=True):
        assert not there or rig.tier.pages[name.key] == data


def test_a_page_queued_twice_is_not_saved_once_it_is_another() -> None:
    """Its first turn stored it, its file was lost, and its second turn came after the page had been given away."""
    rig = Rig()
    rig.compute(1)
    (leaf,) = rig.cache.tree.root(("", "")).children.values()
    rig.pages.save(leaf.pages)
    assert rig.mover.num_unsaved == 2
    rig.mover.work()
    assert rig.mover.num_stored == 1
    rig.tier.pages.clear()
    rig.evict(1)
    rig.work()
    assert rig.tier.pages == {}


def test_what_is_flushed_is_not_saved() -> None:
    rig = Rig()
    rig.compute(3)
    assert rig.pages.discard_while(lambda: rig.cache.tree.evict(8)) == 3
    rig.work()
    assert rig.tier.pages == {}
    rig.compute(1)
    rig.evict(1)
    rig.work()
    assert len(rig.tier.pages) == 1


def test_what_nobody_would_load_is_saved_only_when_asked() -> None:
    rig = Rig()
    rig.worth = False
    rig.compute(3)
    assert rig.mover.num_unsaved == 0
    (leaf,) = rig.cache.tree.root(("", "")).children.values()
    rig.pages.save([leaf.pages[1], NULL_PAGE])
    rig.work()
    assert list(rig.tier.pages) == [names(3)[1].key]
    rig.evict(3)
    rig.work()
    assert len(rig.tier.pages) == 1


def test_what_is_there_already_is_not_written_again() -> None:
    rig = Rig()
    rig.compute(2)
    rig.work()
    rig.evict(2)
    rig.compute(2)
    assert rig.mover.num_unsaved == 0
    rig.evict(2)
    assert rig.mover.num_unsaved == 0
    assert rig.mover.num_stored == 2
