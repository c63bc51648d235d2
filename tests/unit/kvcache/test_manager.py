"""KVCacheManager: what a sequence gets, shares and leaves behind."""

import pytest

from pinnate.core.request import Request, Sequence
from pinnate.core.sampling import SamplingParams
from pinnate.kvcache.integrity import IntegrityError
from pinnate.kvcache.manager import KVCacheManager

PAGE = 4
ids = iter(range(1, 10_000))


def sequence(tokens: list[int], salt: str = "") -> Sequence:
    request = Request(
        request_id="r", prompt_token_ids=tokens, sampling=SamplingParams(max_tokens=1, seed=0), cache_salt=salt
    )
    seq = Sequence(next(ids), request, 0)
    seq.token_ids.extend(tokens)
    return seq


def start(cache: KVCacheManager, tokens: list[int], salt: str = "") -> Sequence:
    seq = sequence(tokens, salt)
    seq.num_computed_tokens = cache.adopt(seq, cache.match(seq, seq.num_tokens - 1))
    return seq


def compute(cache: KVCacheManager, seq: Sequence, count: int | None = None) -> tuple[tuple[int, int], ...]:
    """One step; returns its copies."""
    count = seq.num_tokens - seq.num_computed_tokens if count is None else count
    assert cache.allocate(seq, count)
    copies = cache.take_copies()
    seq.num_computed_tokens += count
    cache.end_step()
    cache.commit(seq)
    cache.check_integrity()
    return copies


def test_pages_are_taken_step_by_step() -> None:
    cache = KVCacheManager(8, PAGE)
    seq = start(cache, list(range(10)))
    compute(cache, seq, 3)
    assert len(seq.page_table) == 1
    compute(cache, seq, 2)
    assert len(seq.page_table) == 2
    compute(cache, seq)
    assert len(seq.page_table) == 3
    assert cache.num_free_pages == 5


def test_a_match_inside_a_page_is_a_copy_of_that_page() -> None:
    cache = KVCacheManager(8, PAGE)
    first = start(cache, [1, 2, 3, 4, 5, 6, 7])
    compute(cache, first)
    second = start(cache, [1, 2, 3, 4, 5, 6, 9])
    assert second.num_computed_tokens == 6
    assert second.page_table[0] == first.page_table[0]
    assert second.page_table[1] != first.page_table[1]
    assert compute(cache, second) == ((first.page_table[1], second.page_table[1]),)


def test_the_last_token_is_left_to_compute() -> None:
    cache = KVCacheManager(8, PAGE)
    compute(cache, start(cache, [1, 2, 3, 4]))
    assert start(cache, [1, 2, 3, 4]).num_computed_tokens == 3


def test_the_source_of_a_copy_outlives_its_owner_until_the_step_has_run() -> None:
    cache = KVCacheManager(4, PAGE)
    first = start(cache, [1, 2, 3])
    compute(cache, first)
    source = first.page_table[0]
    second = start(cache, [1, 2, 9])
    cache.release(first)
    assert cache.allocate(second, 1)
    assert cache.flush() == 0  # the tree lets go of it, but it is not free
    assert cache.num_free_pages == 2
    assert cache.take_copies() == ((source, second.page_table[0]),)
    cache.end_step()
    assert cache.num_free_pages == 3


def test_without_a_page_to_spare_the_tail_is_computed_again() -> None:
    cache = KVCacheManager(2, PAGE)
    first = start(cache, [1, 2, 3, 4, 5, 6, 7])
    compute(cache, first)
    cache.release(first)
    again = start(cache, [1, 2, 3, 4, 5, 6, 7])
    assert again.num_computed_tokens == 4
    assert compute(cache, again) == ()


def test_impossible_allocation_changes_nothing() -> None:
    cache = KVCacheManager(3, PAGE)
    one, two = start(cache, list(range(8))), start(cache, list(range(20, 28)))
    compute(cache, one)
    assert not cache.allocate(two, 8)
    assert (len(two.page_table), cache.num_free_pages) == (0, 1)
    cache.check_integrity()


def test_allocation_evicts_what_nobody_uses() -> None:
    cache = KVCacheManager(3, PAGE)
    old = start(cache, list(range(8)))
    compute(cache, old)
    cache.release(old)
    assert (cache.num_free_pages, cache.num_cached_pages) == (1, 2)
    new = start(cache, list(range(20, 28)))
    compute(cache, new)
    assert (cache.evicted_pages, cache.num_cached_pages) == (1, 1)
    assert cache.match(sequence(list(range(8))), 8).num_tokens == 4  # cut from the end


def test_forks_share_until_they_write_and_the_last_one_writes_in_place() -> None:
    cache = KVCacheManager(8, PAGE)
    parent = start(cache, [1, 2, 3, 4, 5, 6])
    compute(cache, parent)
    child = sequence([1, 2, 3, 4, 5, 6])
    child.num_computed_tokens = 6
    cache.fork(parent, child)
    assert (child.page_table, cache.num_free_pages) == (parent.page_table, 6)
    shared = parent.page_table[1]
    parent.token_ids.append(7)
    child.token_ids.append(8)
    assert cache.allocate(parent, 1)
    assert cache.allocate(child, 1)
    assert cache.take_copies() == ((shared, parent.page_table[1]),)
    assert child.page_table[1] == shared
    cache.end_step()
    cache.release(parent)
    cache.release(child)
    cache.check_integrity()


def test_equal_pages_computed_twice_become_one() -> None:
    cache = KVCacheManager(8, PAGE)
    one, two = start(cache, [1, 2, 3, 4, 5]), start(cache, [1, 2, 3, 4, 6])
    compute(cache, one)
    assert cache.allocate(two, 5)
    own = two.page_table[:]
    two.num_computed_tokens = 5
    cache.commit(two)
    cache.check_integrity()
    assert two.page_table.tolist() == [one.page_table[0], own[1]]
    assert cache.num_free_pages == 5


def test_released_work_stays_and_is_found_again() -> None:
    cache = KVCacheManager(8, PAGE)
    seq = start(cache, [1, 2, 3, 4, 5, 6])
    assert cache.allocate(seq, 6)
    seq.num_computed_tokens = 6
    cache.release(seq)  # no commit before
    assert start(cache, [1, 2, 3, 4, 5, 6, 7]).num_computed_tokens == 6


def test_release_without_keep_forgets_what_was_not_committed() -> None:
    cache = KVCacheManager(8, PAGE)
    seq = start(cache, list(range(8)))
    compute(cache, seq, 5)
    assert cache.allocate(seq, 3)
    seq.num_computed_tokens = 8
    cache.release(seq, keep=False)
    assert start(cache, list(range(9))).num_computed_tokens == 5


def test_salts_do_not_share() -> None:
    cache = KVCacheManager(8, PAGE)
    compute(cache, start(cache, [1, 2, 3, 4, 5], "a"))
    assert start(cache, [1, 2, 3, 4, 5], "b").num_computed_tokens == 0
    assert start(cache, [1, 2, 3, 4, 5], "a").num_computed_tokens == 4


def test_without_prefix_caching_nothing_stays() -> None:
    cache = KVCacheManager(8, PAGE, enable_prefix_caching=False)
    seq = start(cache, [1, 2, 3, 4, 5])
    compute(cache, seq)
    assert start(cache, [1, 2, 3, 4, 5]).num_computed_tokens == 0
    cache.release(seq)
    assert (cache.num_free_pages, cache.flush()) == (8, 0)


def test_a_path_with_branches_pins_no_more_pages_than_its_length() -> None:
    cache = KVCacheManager(12, PAGE)
    for end in ([9], [2, 9], [2, 3, 9], [2, 3, 4, 5]):
        seq = start(cache, [1, *end])
        compute(cache, seq)
        cache.release(seq)
    start(cache, [1, 2, 3, 4, 5, 6])
    cache.check_integrity()
    assert cache.num_pages - cache.num_available_pages == 3  # one whole page, the tail's source and its copy
    cache.end_step()
    assert cache.num_pages - cache.num_available_pages == 2


@pytest.mark.parametrize("harm", ["seq_ref", "tree_ref", "hold", "lost", "lock", "table", "tokens", "count"])
def test_the_integrity_check_sees_damage(harm: str) -> None:
    cache = KVCacheManager(8, PAGE)
    seq = start(cache, [1, 2, 3, 4, 5, 6])
    compute(cache, seq)
    cache.check_integrity()
    page = seq.page_table[0]
    pool, node = cache._pool, cache._leases[seq.seq_id].node
    assert node is not None
    match harm:
        case "seq_ref":
            pool.seq_refs[page] += 1
        case "tree_ref":
            pool.tree_refs[page] -= 1
        case "hold":
            cache._held.append(page)
        case "lost":
            pool._free.pop()
        case "lock":
            node.lock_count += 1
        case "table":
            seq.page_table.reverse()
        case "tokens":
            seq.token_ids[0] = 99
        case "count":
            seq.num_computed_tokens = 3
    with pytest.raises(IntegrityError, match="KV memory"):
        cache.check_integrity()
