"""PagePool: who refers to a page decides where it is counted."""

import pytest

from pinnate.kvcache.page_pool import NULL_PAGE, PagePool


def counts(pool: PagePool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_evictable, pool.num_in_use


def test_hands_out_every_page_but_null_once() -> None:
    pool = PagePool(4)
    assert sorted(pool.take() for _ in range(4)) == [1, 2, 3, 4]
    assert NULL_PAGE not in pool.free_pages()
    with pytest.raises(IndexError):
        pool.take()


def test_a_page_is_free_when_its_last_table_lets_go() -> None:
    pool = PagePool(3)
    page = pool.take()
    pool.add_seq_ref(page)
    pool.drop_seq_ref(page)
    assert counts(pool) == (2, 0, 1)
    pool.drop_seq_ref(page)
    assert counts(pool) == (3, 0, 0)


def test_a_page_that_only_the_tree_has_is_evictable() -> None:
    pool = PagePool(3)
    page = pool.take()
    pool.add_tree_ref(page)
    assert counts(pool) == (2, 0, 1)
    pool.drop_seq_ref(page)
    assert counts(pool) == (2, 1, 0)
    pool.add_seq_ref(page)
    assert counts(pool) == (2, 0, 1)
    pool.drop_seq_ref(page)
    assert pool.num_available == 3
    assert pool.drop_tree_ref(page)
    assert counts(pool) == (3, 0, 0)


def test_the_tree_letting_go_of_a_used_page_frees_nothing() -> None:
    pool = PagePool(3)
    page = pool.take()
    pool.add_tree_ref(page)
    assert not pool.drop_tree_ref(page)
    assert counts(pool) == (2, 0, 1)


def test_a_hold_keeps_a_page_from_everyone() -> None:
    pool = PagePool(1)
    page = pool.take()
    pool.hold(page)
    pool.drop_seq_ref(page)
    assert counts(pool) == (0, 0, 1)
    pool.unhold(page)
    assert counts(pool) == (1, 0, 0)
