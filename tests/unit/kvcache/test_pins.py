"""Pins: what they hold, what they cost, what is refused."""

from __future__ import annotations

import pytest

from pinnate.core.errors import InvalidRequestError, NotFoundError, UnsupportedError
from pinnate.kvcache.manager import KVCacheManager
from pinnate.kvcache.pins import Pins
from tests.unit.kvcache.helpers import compute

PAGE = 4
PREFIX = list(range(10))  # two whole pages and a tail


@pytest.fixture
def cache() -> KVCacheManager:
    return KVCacheManager(16, PAGE, pinnable_pages=4)


def test_a_pinned_prefix_survives_a_flush_and_pressure(cache: KVCacheManager) -> None:
    compute(cache, PREFIX)
    pin = Pins(cache).pin(PREFIX)
    assert pin is not None
    assert (pin.num_tokens, len(pin.seq.page_table)) == (8, 2)
    cache.flush()
    assert cache.num_free_pages == 14
    compute(cache, list(range(100, 100 + 14 * PAGE)))  # all the rest of the pool
    cache.check_integrity()
    assert compute(cache, PREFIX) == 8


def test_unpinned_it_is_cached_until_it_is_evicted(cache: KVCacheManager) -> None:
    compute(cache, PREFIX)
    pins = Pins(cache)
    pin = pins.pin(PREFIX)
    assert pin is not None
    assert pins.unpin(pin.pin_id) == 2
    assert compute(cache, PREFIX) == 9
    cache.flush()
    assert cache.num_free_pages == cache.num_pages
    cache.check_integrity()


def test_nothing_is_pinned_that_is_not_cached(cache: KVCacheManager) -> None:
    compute(cache, PREFIX[:6])
    pins = Pins(cache)
    assert pins.pin(PREFIX) is None
    assert pins.pin(PREFIX[:4], cache_salt="another") is None
    assert pins.all() == []


def test_the_same_prefix_again_is_the_same_pin_and_a_longer_one_shares_its_pages(cache: KVCacheManager) -> None:
    compute(cache, list(range(17)))
    pins = Pins(cache)
    first = pins.pin(PREFIX)
    assert first is pins.pin(PREFIX[:9])
    longer = pins.pin(list(range(16)))
    assert first is not None
    assert longer is not None
    assert pins.num_pages == 4  # and not 2 + 4
    assert pins.unpin(longer.pin_id) == 2
    assert [pin.pin_id for pin in pins.all()] == [first.pin_id]
    assert pins.num_pages == 2


def test_the_quota_is_kept_with_the_numbers(cache: KVCacheManager) -> None:
    compute(cache, PREFIX)
    compute(cache, list(range(50, 63)))
    pins = Pins(cache)
    pins.pin(PREFIX)
    with pytest.raises(InvalidRequestError, match="3 more pages; 2 of the 4 that may be pinned") as error:
        pins.pin(list(range(50, 63)))
    assert (error.value.param, error.value.code) == ("prompt", "pin_quota_exceeded")
    with pytest.raises(InvalidRequestError, match="5 more pages"):  # refused before it is computed
        pins.pin(list(range(200, 220)))
    cache.check_integrity()


def test_what_cannot_be_pinned(cache: KVCacheManager) -> None:
    with pytest.raises(InvalidRequestError, match="3 tokens; at least one page of 4"):
        Pins(cache).pin([1, 2, 3])
    with pytest.raises(UnsupportedError, match="without --pin-quota"):
        Pins(KVCacheManager(16, PAGE)).pin(PREFIX)
    with pytest.raises(UnsupportedError, match="without prefix caching"):
        Pins(KVCacheManager(16, PAGE, enable_prefix_caching=False, pinnable_pages=4)).pin(PREFIX)
    with pytest.raises(NotFoundError, match="no pin 'pin-9'"):
        Pins(cache).unpin("pin-9")


def test_a_pin_is_no_hit(cache: KVCacheManager) -> None:
    compute(cache, PREFIX)
    Pins(cache).pin(PREFIX)
    assert all(node.hits == 0 for node in cache._tree.nodes() if node.parent is not None)
