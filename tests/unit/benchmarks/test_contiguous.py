"""The contiguous allocators: first fit, runs that never overlap, all returned, one run for a sequence's whole life."""

from __future__ import annotations

import itertools

import contiguous
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinnate.core.errors import UnsupportedError
from pinnate.core.request import Request, Sequence
from pinnate.core.sampling import SamplingParams
from pinnate.kvcache.integrity import IntegrityError
from pinnate.kvcache.radix_cache import NO_MATCH


def sequence(number: int, prompt: int, output: int) -> Sequence:
    params = SamplingParams(max_tokens=output, seed=0)
    request = Request(request_id=str(number), prompt_token_ids=[7] * prompt, sampling=params)
    seq = Sequence(number, request, 0)
    seq.token_ids.extend(request.prompt_token_ids)
    return seq


def cache_of(pages: int, scheme: str = "oracle", max_model_len: int = 64) -> contiguous.ContiguousCache:
    return contiguous.ContiguousCache(pages, 16, contiguous.RESERVATIONS[scheme], max_model_len)


def test_first_fit_takes_the_first_run_that_is_long_enough() -> None:
    runs = contiguous.RunPool(10)
    assert [runs.take(2), runs.take(3), runs.take(1)] == [1, 3, 6]
    runs.give(1, 2)
    assert runs.free_runs() == [(1, 2), (7, 4)]
    assert runs.take(3) == 7  # the first hole is too short
    assert runs.take(1) == 1
    assert runs.free_runs() == [(2, 1), (10, 1)]
    assert runs.take(2) is None  # two pages are free, but they are no neighbours
    assert not runs.fits(2)
    assert runs.num_free == 2


def test_a_run_joins_free_neighbours_on_both_sides() -> None:
    runs = contiguous.RunPool(9)
    for _ in range(3):
        runs.take(3)
    runs.give(1, 3)
    runs.give(7, 3)
    assert runs.free_runs() == [(1, 3), (7, 3)]
    runs.give(4, 3)
    assert runs.free_runs() == [(1, 9)]


@pytest.mark.parametrize(("start", "length"), [(1, 1), (2, 3), (4, 3), (0, 1), (9, 3)])
def test_what_was_not_handed_out_cannot_be_given_back(start: int, length: int) -> None:
    runs = contiguous.RunPool(10)
    runs.take(4)
    runs.take(4)
    runs.give(1, 4)
    with pytest.raises(ValueError, match="not handed out"):
        runs.give(start, length)
    assert runs.free_runs() == [(1, 4), (9, 2)]


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=80))
def test_runs_against_a_brute_force_model(pages: int, actions: list[tuple[bool, int]]) -> None:
    runs = contiguous.RunPool(pages)
    free = set(range(1, pages + 1))
    held: list[tuple[int, int]] = []
    for takes, number in actions:
        if takes:
            fitting = (p for p in sorted(free) if free.issuperset(range(p, p + number)))
            expected = next(fitting, None)
            assert runs.fits(number) == (expected is not None)
            assert runs.take(number) == expected
            if expected is not None:
                held.append((expected, number))
                free -= set(range(expected, expected + number))
        elif held:
            start, length = held.pop(number % len(held))
            runs.give(start, length)
            free |= set(range(start, start + length))
        assert [p for start, length in runs.free_runs() for p in range(start, start + length)] == sorted(free)
        assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(runs.free_runs()))
    for start, length in held:
        runs.give(start, length)
    assert runs.free_runs() == [(1, pages)]


@pytest.mark.parametrize(
    ("scheme", "prompt", "output", "tokens"),
    [
        ("max", 10, 5, 2048),
        ("pow2", 10, 25, 10 + 32),  # the paper's own example
        ("pow2", 10, 32, 10 + 32),
        ("pow2", 10, 33, 10 + 64),
        ("pow2", 10, 1, 10 + 1),
        ("pow2", 1000, 1030, 2048),
        ("oracle", 10, 25, 34),
    ],
)
def test_what_each_scheme_reserves(scheme: str, prompt: int, output: int, tokens: int) -> None:
    assert contiguous.RESERVATIONS[scheme](sequence(1, prompt, output).request, 2048) == tokens


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24), st.booleans()), max_size=30))
def test_sequences_hold_runs_of_their_own_and_return_them(life: list[tuple[int, int, bool]]) -> None:
    cache = cache_of(12, "pow2")
    running: list[Sequence] = []
    for number, (prompt, output, ends) in enumerate(life):
        seq = sequence(number, prompt, output)
        if cache.runs.fits(cache.run_length(seq)):
            assert cache.adopt(seq, NO_MATCH) == 0
            assert list(seq.page_table) == list(range(seq.page_table[0], seq.page_table[0] + len(seq.page_table)))
            assert cache.allocate(seq, prompt + output - 1)
            running.append(seq)
        if ends and running:
            ended = running.pop(0)
            cache.release(ended)
            assert not ended.page_table
        cache.check_integrity()
    for seq in running:
        cache.release(seq)
    assert cache.runs.free_runs() == [(1, 12)]
    assert cache.num_free_pages == cache.num_pages == 12


def test_a_sequence_cannot_outgrow_its_run_or_fork() -> None:
    cache = cache_of(4)
    seq = sequence(1, 16, 1)
    cache.adopt(seq, NO_MATCH)
    assert cache.allocate(seq, 16)
    with pytest.raises(IntegrityError, match="outgrows its 1 pages"):
        cache.allocate(seq, 17)
    with pytest.raises(UnsupportedError):
        cache.fork(seq, sequence(2, 16, 1))


def test_the_integrity_check_sees_overlapping_runs() -> None:
    cache = cache_of(4)
    one, two = sequence(1, 16, 1), sequence(2, 16, 1)
    cache.adopt(one, NO_MATCH)
    cache.adopt(two, NO_MATCH)
    cache.check_integrity()
    two.page_table[0] = one.page_table[0]
    with pytest.raises(IntegrityError, match="overlap"):
        cache.check_integrity()
