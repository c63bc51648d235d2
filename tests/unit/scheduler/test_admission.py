"""AdmissionControl: expectations and the ratio that carries them."""

from array import array

import pytest

from pinnate.core.request import Sequence
from pinnate.kvcache.manager import KVCacheManager
from pinnate.kvcache.radix_cache import NO_MATCH
from pinnate.scheduler.admission import (
    MAX_EXPECTED_TOKENS,
    MIN_RATIO,
    AdmissionControl,
    Limits,
    prefix_is_underway,
)
from tests.unit.scheduler.helpers import make_request


def control(num_pages: int = 100, page_size: int = 4) -> AdmissionControl:
    return AdmissionControl(KVCacheManager(num_pages, page_size), Limits(8, 64, 10_000, 10))


def sequence(tokens: list[int], **fields: object) -> Sequence:
    seq = Sequence(1, make_request("a", tokens, **fields), 0)
    seq.token_ids.extend(tokens)
    return seq


def test_demand_is_the_known_tokens_and_the_expected_ones() -> None:
    admission = control()
    admission.new_token_ratio = 0.5
    seq = sequence([1] * 6, max_tokens=20)
    assert admission.demand(seq, 1) == 4  # 6 + 10 tokens
    assert admission.demand(seq, 3) == 4 + 2 * 3  # the whole page of the prompt is shared
    seq.page_table = array("i", [1, 2])
    seq.token_ids.extend([2] * 10)
    assert admission.demand(seq, 1) == 4  # 16 + 5 tokens, two pages there


def test_a_huge_max_tokens_is_not_taken_at_its_word() -> None:
    admission = control()
    admission.new_token_ratio = 1.0
    assert admission.demand(sequence([1] * 4, max_tokens=9_000), 1) == 1 + MAX_EXPECTED_TOKENS // 4


@pytest.mark.parametrize(("reserved", "room"), [(0, True), (96, True), (97, False)])
def test_room_is_what_the_running_ones_leave(reserved: int, room: bool) -> None:
    admission = control()
    admission.new_token_ratio = 0.5
    assert admission.has_room(sequence([1] * 6, max_tokens=20), 1, NO_MATCH, reserved) is room


def test_cached_pages_are_not_counted_twice() -> None:
    cache = KVCacheManager(4, 4)
    admission = AdmissionControl(cache, Limits(8, 64, 100, 10))
    admission.new_token_ratio = 0.0
    old = sequence(list(range(8)))
    old.num_computed_tokens = cache.adopt(old, NO_MATCH)
    assert cache.allocate(old, 8)
    old.num_computed_tokens = 8
    cache.release(old)
    assert (cache.num_free_pages, cache.num_cached_pages) == (2, 2)
    fits, too_long = sequence(list(range(16))), sequence(list(range(17)))
    assert admission.has_room(fits, 1, cache.match(fits, 15), 0)
    assert not admission.has_room(too_long, 1, cache.match(too_long, 16), 0)


def test_the_ratio_falls_slowly_and_rises_on_preemption() -> None:
    admission = control()
    start = admission.new_token_ratio
    admission.on_smooth_step()
    assert start * 0.98 < admission.new_token_ratio < start
    for _ in range(1000):
        admission.on_smooth_step()
    assert admission.new_token_ratio == MIN_RATIO
    admission.on_preemption()
    assert admission.new_token_ratio == pytest.approx(MIN_RATIO + 0.1)
    for _ in range(20):
        admission.on_preemption()
    assert admission.new_token_ratio == 1.0


def test_a_prefix_is_under_way_only_until_it_is_computed() -> None:
    seq, other = sequence([1, 2, 3, 4, 5, 6]), sequence([1, 2, 3, 4, 9, 9, 9])
    assert prefix_is_underway(seq, 5, NO_MATCH, [other], worth=4)
    assert not prefix_is_underway(seq, 5, NO_MATCH, [other], worth=5)  # differs there
    assert not prefix_is_underway(seq, 3, NO_MATCH, [other], worth=4)  # more than may be reused
    other.num_computed_tokens = 4
    assert not prefix_is_underway(seq, 5, NO_MATCH, [other], worth=4)
